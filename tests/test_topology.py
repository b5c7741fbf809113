"""Graphs: the paper's, transcribed here a second time; general ones against networkx; what is refused."""

from itertools import pairwise
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semidfl import topology as module
from semidfl.config import GraphConfig
from semidfl.errors import TopologyError
from semidfl.topology import TOPOLOGIES, Topology, build

FIG1 = """0:[2,6,7,8] 1:[3,4,5,9] 2:[0,4,7,8] 3:[1,4,5,7] 4:[1,2,3,9]
          5:[1,3,6,8] 6:[0,5,7,9] 7:[0,2,3,6] 8:[0,2,5,9] 9:[1,4,6,8]"""


def graph(topology: Topology) -> "nx.Graph[int]":
    made: nx.Graph[int] = nx.Graph(topology.edges())
    made.add_nodes_from(range(topology.clients))
    return made


def check(topology: Topology, clients: int) -> None:
    """What holds for every topology."""
    assert topology.clients == len(topology.neighbours) == len(topology.roles) == clients
    for i, row in enumerate(topology.neighbours):
        assert list(row) == sorted(set(row) - {i})
        assert all(type(j) is int and i in topology.neighbours[j] for j in row)
    assert nx.is_connected(graph(topology))


# --- the paper's graphs --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fig1", "topology1"])
def test_fig1_is_the_list_of_the_paper(name: str) -> None:
    rows = [entry.split(":")[1].strip("[]").split(",") for entry in FIG1.split()]
    topology = build(GraphConfig(topology=name), 0)
    assert topology.neighbours == tuple(tuple(map(int, row)) for row in rows)
    assert {len(row) for row in topology.neighbours} == {4}
    check(topology, 10)


def test_topology2_is_two_joined_stars() -> None:
    topology = build(GraphConfig(topology="topology2"), 0)
    assert topology.edges() == [(0, 1), *((0, j) for j in (3, 4, 5, 6)), *((1, j) for j in (2, 7, 8, 9))]
    check(topology, 10)


def test_topology3_is_the_ring_of_the_paper() -> None:
    walk = [0, 3, 6, 1, 4, 7, 2, 5, 8, 9, 0]
    expected = sorted(tuple(sorted(pair)) for pair in pairwise(walk))
    topology = build(GraphConfig(topology="topology3"), 0)
    assert topology.edges() == expected
    check(topology, 10)


@pytest.mark.parametrize(
    ("name", "labelled", "mixed"),
    [("fig1", {0, 1}, {2, 3}), ("topology1", {0}, {1, 2, 3}), ("topology2", {0, 1}, {2, 3}),
     ("topology3", {0, 1, 2}, {3, 4, 5})],
)  # fmt: skip
def test_roles_of_the_paper(name: str, labelled: set[int], mixed: set[int]) -> None:
    roles = build(GraphConfig(topology=name), 0).roles
    assert {i for i, role in enumerate(roles) if role == "L"} == labelled
    assert {i for i, role in enumerate(roles) if role == "M"} == mixed
    assert roles.count("U") == 10 - len(labelled | mixed)


@pytest.mark.parametrize("name", ["fig1", "topology1", "topology2", "topology3"])
def test_the_papers_graphs_need_ten_clients(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name}.*10 clients, not graph.clients = 12.*ring"):
        build(GraphConfig(topology=name, clients=12), 0)


# --- graphs for any number of clients ------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 10, 13, 24])
@pytest.mark.parametrize(
    ("name", "reference"),
    [("line", nx.path_graph), ("star", lambda n: nx.star_graph(n - 1)), ("full", nx.complete_graph)],
)
def test_fixed_graphs_are_those_of_networkx(name: str, reference: object, n: int) -> None:
    topology = build(GraphConfig(topology=name, clients=n), 0)
    check(topology, n)
    assert topology.edges() == sorted(tuple(sorted(e)) for e in reference(n).edges())  # type: ignore[operator]


@pytest.mark.parametrize(("n", "edges"), [(1, 0), (2, 1), (3, 3), (10, 10)])
def test_ring(n: int, edges: int) -> None:
    topology = build(GraphConfig(topology="ring", clients=n), 0)
    check(topology, n)
    assert len(topology.edges()) == edges
    assert n < 3 or topology.neighbours[0] == (1, n - 1)


@pytest.mark.parametrize(("n", "sides"), [(1, (1, 1)), (7, (1, 7)), (12, (3, 4)), (16, (4, 4)), (30, (5, 6))])
def test_grid_is_as_square_as_can_be(n: int, sides: tuple[int, int]) -> None:
    topology = build(GraphConfig(topology="grid", clients=n), 0)
    check(topology, n)
    reference = nx.convert_node_labels_to_integers(nx.grid_2d_graph(*sides), ordering="sorted")
    assert topology.edges() == sorted(tuple(sorted(e)) for e in reference.edges())


@pytest.mark.parametrize(("n", "sides"), [(9, (3, 3)), (12, (3, 4)), (30, (5, 6))])
def test_torus_wraps_both_ways(n: int, sides: tuple[int, int]) -> None:
    topology = build(GraphConfig(topology="torus", clients=n), 0)
    check(topology, n)
    reference = nx.convert_node_labels_to_integers(nx.grid_2d_graph(*sides, periodic=True), ordering="sorted")
    assert topology.edges() == sorted(tuple(sorted(e)) for e in reference.edges())
    assert {len(row) for row in topology.neighbours} == {4}


@pytest.mark.parametrize(("n", "sides", "good"), [(1, "1 x 1", 9), (10, "2 x 5", 9), (13, "1 x 13", 12)])
def test_torus_refuses_a_short_side(n: int, sides: str, good: int) -> None:
    with pytest.raises(TopologyError, match=rf"graph.clients = {n}: as {sides} .*to itself or double.*with {good}$"):
        build(GraphConfig(topology="torus", clients=n), 0)


@pytest.mark.parametrize("name", ["fig1", "topology2", "ring", "line", "star", "erdos-renyi"])
def test_what_mixing_leaves_is_what_is_seen_to_be_left(name: str) -> None:
    """Clients with any numbers, mixed again and again: in the end their spread shrinks by one factor."""
    made = build(GraphConfig(topology=name, clients=10), seed=3)
    numbers = np.random.default_rng(0).normal(size=10)
    for _ in range(400):
        numbers = np.array([np.mean(numbers[[i, *near]]) for i, near in enumerate(made.neighbours)])
        numbers -= numbers.mean()
        last, numbers = np.abs(numbers).max(), numbers / np.abs(numbers).max()
    assert made.left() == pytest.approx(last, rel=1e-6)
    assert made.left(3) == pytest.approx(last**3, rel=1e-6)


def test_where_all_are_neighbours_nothing_is_left() -> None:
    assert build(GraphConfig(topology="full", clients=7), seed=0).left() == pytest.approx(0.0, abs=1e-12)
    assert build(GraphConfig(topology="full", clients=1), seed=0).left() == 0.0


def test_closed_holds_the_neighbours_and_the_client_itself() -> None:
    topology = build(GraphConfig(topology="line", clients=3), 0)
    assert topology.closed().dtype == np.bool_
    assert topology.closed().tolist() == [[True, True, False], [True, True, True], [False, True, True]]


# --- random graphs -------------------------------------------------------------------------------


@given(st.sampled_from(["random-regular", "erdos-renyi", "small-world"]), st.integers(6, 40), st.integers(0, 2**63 - 1))
def test_random_graphs_are_connected_and_follow_the_seed(name: str, n: int, seed: int) -> None:
    config = GraphConfig(topology=name, clients=n)
    check(build(config, seed), n)
    assert build(config, seed) == build(config, seed)


@pytest.mark.parametrize("name", ["random-regular", "erdos-renyi", "small-world"])
def test_other_seeds_give_other_random_graphs(name: str) -> None:
    assert len({build(GraphConfig(topology=name), seed).neighbours for seed in range(5)}) == 5


def test_random_graphs_are_frozen() -> None:
    """A change here is a change of every run on a random graph: of our draw, or of networkx's."""
    edges = {n: build(GraphConfig(topology=n), 7).edges() for n in ("random-regular", "erdos-renyi", "small-world")}
    assert edges["random-regular"][:8] == [(0, 1), (0, 3), (0, 6), (0, 8), (1, 3), (1, 4), (1, 6), (2, 4)]
    assert edges["erdos-renyi"][:8] == [(0, 1), (0, 6), (0, 8), (1, 3), (1, 6), (2, 7), (3, 7), (4, 5)]
    assert edges["small-world"][:8] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 9), (2, 5), (2, 6)]


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (10, 2), (10, 3), (10, 7), (11, 10), (100, 90), (1000, 4)])
def test_regular_graphs_have_the_degree(n: int, degree: int) -> None:
    topology = build(GraphConfig(topology="random-regular", clients=n, degree=degree), 0)
    check(topology, n)
    assert {len(row) for row in topology.neighbours} == {degree}


def test_erdos_renyi_has_the_share_of_edges() -> None:
    topology = build(GraphConfig(topology="erdos-renyi", clients=300, probability=0.2), 0)
    assert len(topology.edges()) / (300 * 299 / 2) == pytest.approx(0.2, abs=0.01)  # five standard deviations


def test_small_world_without_rewiring_is_a_ring_of_the_degree() -> None:
    topology = build(GraphConfig(topology="small-world", clients=9, degree=4, probability=0), 0)
    assert topology.neighbours[0] == (1, 2, 7, 8)
    assert {len(row) for row in topology.neighbours} == {4}


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        (GraphConfig("erdos-renyi", 10, probability=0.2), "raise graph.probability"),
        (GraphConfig("random-regular", 100, degree=2), "raise graph.degree to 3"),
        (GraphConfig("small-world", 30, degree=2, probability=0.5), "raise graph.degree or lower graph.probability"),
    ],
)
def test_unconnected_draws_are_drawn_again(config: GraphConfig, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draw of seed 5 is not connected: alone it is refused, with more tries a later one is taken."""
    monkeypatch.setattr(module, "_TRIES", 1)
    with pytest.raises(TopologyError, match=f"none of 1 draws.*is connected: {advice}"):
        build(config, 5)
    monkeypatch.undo()
    check(build(config, 5), config.clients)


@pytest.mark.parametrize(
    ("name", "n", "degree", "probability", "message"),
    [
        ("random-regular", 9, 3, 0.3, "graph.degree = 3 .*graph.clients = 9: both are odd"),
        ("random-regular", 8, 8, 0.3, "graph.degree = 8 .*graph.clients = 8.*below the number of clients"),
        ("random-regular", 8, 0, 0.3, "graph.degree = 0 .*at least 1"),
        ("random-regular", 8, 1, 0.3, "graph.degree = 1 joins 8 clients in pairs"),
        ("small-world", 8, 8, 0.3, "graph.degree = 8 .*below the number of clients"),
        ("small-world", 8, 3, 0.3, "graph.degree = 3 .*must be even"),
        ("erdos-renyi", 50, 4, 0.01, "none of 100 draws.*raise graph.probability well above .* 0.0782"),
    ],
)
def test_impossible_random_graphs(name: str, n: int, degree: int, probability: float, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        build(GraphConfig(topology=name, clients=n, degree=degree, probability=probability), 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [n for n in TOPOLOGIES if n not in ("fig1", "topology1", "topology2", "topology3")])
def test_thousands_of_clients(name: str) -> None:
    n = 2000 if name == "full" else 5000
    topology = build(GraphConfig(topology=name, clients=n), 0)
    assert topology.closed().sum() == n + sum(map(len, topology.neighbours))


# --- files of edges ------------------------------------------------------------------------------


def test_a_file_of_edges(tmp_path: Path) -> None:
    file = tmp_path / "graph"
    file.write_text("# a path\n\n2 1\n  0\t1  # and back\n1 0\n")
    topology = build(GraphConfig(topology=str(file), clients=3), 0)
    assert topology == Topology(str(file), ((1,), (0, 2), (1,)), "LMU")


def test_an_empty_file_will_do_for_one_client(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("")
    assert build(GraphConfig(topology=str(file), clients=1), 0).neighbours == ((),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n1 2\n2 3", r"line 3 \('2 3'\) names client 3: with graph.clients = 3 the ids are 0 to 2"),
        ("0 1\n-1 2", "line 2 .* names client -1"),
        ("# c\n1 1", "line 2 .* joins client 1 to itself"),
        ("0 1\n1 2 5", "line 2 .* is not an edge"),
        ("0 1\n1", "line 2 .* is not an edge"),
        ("0,1\n", "line 1 .* is not an edge"),
        ("0 1.0\n", "line 1 .* is not an edge"),
        ("0 " + "9" * 5000, "line 1 .* is not an edge"),
        ("0 1\n", r"3 clients is not connected: .* to 1 of them \(2\)"),
        ("", r"not connected: .* to 2 of them \(1, 2\)"),
    ],
)
def test_faulty_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(text)
    with pytest.raises(TopologyError, match=message):
        build(GraphConfig(topology=str(file), clients=3), 0)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("binary.txt", "."):
        with pytest.raises(TopologyError, match="cannot be read as a file of edges"):
            build(GraphConfig(topology=str(tmp_path / name), clients=3), 0)
    with pytest.raises(TopologyError, match=r"missing\.txt'.*no such file.*fig1, topology1"):
        build(GraphConfig(topology=str(tmp_path / "missing.txt"), clients=3), 0)


@pytest.mark.parametrize(("name", "hint"), [("rng", "did you mean 'ring'"), ("erdos", "erdos-renyi"), ("", "fig1")])
def test_unknown_names_list_the_known(name: str, hint: str) -> None:
    with pytest.raises(TopologyError, match=hint) as caught:
        build(GraphConfig(topology=name), 0)
    assert all(known in str(caught.value) for known in TOPOLOGIES)


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "roles"),
    [(1, "M"), (2, "LU"), (3, "LMU"), (4, "LMUU"), (5, "LMUUU"), (10, "LLMMUUUUUU"), (20, "LLLLMMMMUUUUUUUUUUUU")],
)
def test_default_roles(n: int, roles: str) -> None:
    assert build(GraphConfig(topology="line", clients=n), 0).roles == roles


@given(st.integers(2, 500))
def test_default_roles_are_20_20_60(n: int) -> None:
    roles = build(GraphConfig(topology="line", clients=n), 0).roles
    assert roles == "".join(sorted(roles))
    assert abs(roles.count("L") - 0.2 * n) <= 0.6
    assert abs(roles.count("M") - 0.2 * n) <= 0.5


def test_roles_of_the_config_come_first() -> None:
    assert build(GraphConfig(roles="UUUUUUUUUM"), 0).roles == "UUUUUUUUUM"


@pytest.mark.parametrize(
    ("roles", "message"),
    [("LMU", "3 letters for graph.clients = 4"), ("UUUU", "gives nobody labels"), ("LXUU", "holds .'X'.")],
)
def test_faulty_roles(roles: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        build(GraphConfig(topology="ring", clients=4, roles=roles), 0)


def test_a_graph_needs_a_client() -> None:
    with pytest.raises(TopologyError, match=r"graph\.clients = 0"):
        build(GraphConfig(topology="ring", clients=0), 0)
