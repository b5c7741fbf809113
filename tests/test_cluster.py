"""What a cluster is made of, without Ray: blocks of clients, parcels, checkpoints in parts, merged figures, sweeps."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semidfl import topology
from semidfl.cli import main
from semidfl.cluster.fleet import merged
from semidfl.cluster.partition import blocks_of
from semidfl.config import Config, GraphConfig, config_hash, override
from semidfl.data.sources import load
from semidfl.errors import CheckpointError, ConfigError
from semidfl.exchange.memory import MemoryExchange
from semidfl.exchange.ray import CalledOff, Key, Mailbox, Parcel, RayExchange
from semidfl.experiment import prepare, train
from semidfl.record import checkpoint, parts
from semidfl.sweep import Trial, _write, plan, rungs
from semidfl.topology import Topology
from tests.folders import save
from tests.helpers import Scene, scenes
from tests.helpers import topology as graph_of
from tests.small import tiny
from tests.test_rounds import rows_of, ten


def cut_of(graph: Topology, members: Sequence[Sequence[int]]) -> int:
    """Edges between blocks, by the definition."""
    home = {i: b for b, block in enumerate(members) for i in block}
    return sum(home[i] != home[j] for i in home for j in graph.neighbours[i] if i < j)


# --- blocks -----------------------------------------------------------------------------------------------------------


@given(scenes(most=9), st.integers(1, 5))
def test_every_client_is_in_one_block_and_blocks_are_even(scene: Scene, count: int) -> None:
    blocks = blocks_of(scene.graph, count)
    sizes = [len(block) for block in blocks.members]
    assert sorted(i for block in blocks.members for i in block) == list(range(scene.graph.clients))
    assert len(sizes) == min(count, scene.graph.clients)
    assert max(sizes) - min(sizes) <= 1
    assert blocks.cut == cut_of(scene.graph, blocks.members)


@pytest.mark.parametrize("name", ["fig1", "topology1", "topology2", "topology3"])
def test_halves_of_the_papers_graphs_cut_as_few_edges_as_any(name: str) -> None:
    graph = topology.build(GraphConfig(name), 0)
    halves = (set(some) for some in itertools.combinations(range(10), 5))
    fewest = min(cut_of(graph, [sorted(half), sorted(set(range(10)) - half)]) for half in halves)
    assert blocks_of(graph, 2).cut == fewest


def test_a_ring_is_cut_where_blocks_meet_and_cliques_stay_whole() -> None:
    ring = [[(i - 1) % 60, (i + 1) % 60] for i in range(60)]
    assert blocks_of(graph_of(ring), 5).cut == 5
    # Clients of the three cliques are numbered in turn: blocks of consecutive ids would cut nearly all.
    cliques = [[j for j in range(30) if j % 3 == i % 3 and j != i] for i in range(30)]
    assert blocks_of(graph_of(cliques), 3).cut == 0


def test_large_graphs_are_cut_less_than_at_random() -> None:
    graph = topology.build(GraphConfig("small-world", clients=600, probability=0.05), 0)
    blocks = blocks_of(graph, 6)
    assert blocks.cut < 0.25 * blocks.edges  # at random 5/6 of the edges are cut
    assert "of 1200 edges are cut" in blocks.words()


# --- the exchange -----------------------------------------------------------------------------------------------------


def exchanges_of(graph: Topology, count: int) -> tuple[list[RayExchange], list[tuple[int, int, Key, Parcel]]]:
    """One exchange a block; parcels go straight into the mailboxes and are noted."""
    blocks, boxes, noted = blocks_of(graph, count), [Mailbox() for _ in range(count)], []

    def seat(block: int) -> RayExchange:
        def post(peer: int, key: Key, parcel: Parcel) -> None:
            noted.append((block, peer, key, parcel))
            boxes[peer].put(1, key, block, parcel)

        sends, receives = blocks.crossing(graph, block)
        boxes[block].begin(1)
        return RayExchange(blocks.members[block], sends, receives, post, boxes[block])

    return [seat(block) for block in range(len(blocks.members))], noted


def all_at_once(exchanges: Sequence[RayExchange], tensors: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{}] * len(exchanges)

    def work(b: int) -> None:
        found[b] = exchanges[b].share(1, "models", tensors[b]).tensors

    threads = [threading.Thread(target=work, args=(b,), daemon=True) for b in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int8])
def test_each_sees_own_and_neighbouring_rows_and_nothing_else_is_sent(dtype: torch.dtype) -> None:
    graph = topology.build(GraphConfig("fig1"), 0)
    exchanges, noted = exchanges_of(graph, 3)
    rows = (torch.arange(60).view(10, 3, 2) % 100).to(dtype)
    members = blocks_of(graph, 3).members
    seen = all_at_once(exchanges, [{"x": rows[list(ids)], "a": rows[list(ids), 0, 0]} for ids in members])
    for ids, exchange, tensors in zip(members, exchanges, seen, strict=True):
        around = {j for i in ids for j in (i, *graph.neighbours[i])}
        assert exchange.ids == tuple(sorted(around))
        assert torch.equal(tensors["x"], rows[sorted(around)])
        assert torch.equal(tensors["a"], rows[sorted(around), 0, 0])
    pairs = [(sender, peer) for sender, peer, _, _ in noted]
    assert len(pairs) == len(set(pairs))  # once for each actor that needs it
    needed = {(i, b) for b, ids in enumerate(members) for j in ids for i in graph.neighbours[j] if i not in ids}
    size = 7 * rows.element_size()
    assert sum(sum(x.nbytes for x in parcel.values()) for *_, parcel in noted) == len(needed) * size
    told = [exchange.reset() for exchange in exchanges]
    assert sum(one["bytes"]["models"] for one in told) == len(needed) * size
    assert exchanges[0].reset()["bytes"] == {}


def test_who_waits_for_a_lost_actor_is_woken() -> None:
    box, caught = Mailbox(), []
    box.begin(1)

    def wait() -> None:
        try:
            box.take((1, "models"), [0])
        except CalledOff as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    box.call_off()
    thread.join(10)
    assert caught == ["round 1 was called off while 'models' were awaited"]
    with pytest.raises(CalledOff):
        box.take((1, "models"), [])


def test_parcels_of_an_earlier_start_are_dropped_and_of_a_later_one_kept() -> None:
    box, key = Mailbox(), (3, "models")
    box.begin(2)
    box.put(1, key, 0, {"x": np.zeros(1, np.uint8)})
    box.put(2, key, 1, {"x": np.ones(1, np.uint8)})
    box.put(3, key, 1, {"x": np.full(1, 9, np.uint8)})  # its sender has already heard of the restart
    with pytest.raises(CalledOff):
        box.take(key, [1])
    box.begin(3)
    assert box.take(key, [1])[0]["x"].tolist() == [9]


# --- checkpoints in parts ---------------------------------------------------------------------------------------------


def test_a_state_saved_in_parts_is_read_by_any_other_number_of_actors(tmp_path: Path) -> None:
    config = ten(method="dfl-lb", rounds=2)
    _, cohort = prepare(config, load("digits"))
    method, _ = prepare(config, load("digits"))
    list(train(config, method, cohort, MemoryExchange(cohort.ids)))
    whole, key = cohort.state(), config_hash(config)
    for part, ids in enumerate([[3, 1, 9], [0, 2], [4, 5, 6, 7, 8]]):
        parts.save(tmp_path, part, 3, 2, ids, {name: x[ids] for name, x in whole.items()}, key)
    assert parts.rounds(tmp_path) == [2]
    for ids in ([8, 2, 3], [3, 1, 9], list(range(10))):
        found = parts.load(tmp_path, 2, ids, key)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], x[ids]) for name, x in whole.items())
    with pytest.raises(CheckpointError, match="another config"):
        parts.load(tmp_path, 2, [0], "0" * 12)
    with pytest.raises(CheckpointError, match="lacks some clients"):
        parts.load(tmp_path, 2, [0, 10], key)


def test_a_round_counts_only_with_all_its_parts_and_a_damaged_one_falls_back(tmp_path: Path) -> None:
    state = {"x": torch.arange(4.0)[:, None]}
    checkpoint.save(tmp_path, 3, state, {"config": "c"})
    for round in (4, 5):
        for part, ids in enumerate([[0, 1], [2, 3]]):
            parts.save(tmp_path, part, 2, round, ids, {"x": state["x"][ids] + round}, "c")
    assert parts.rounds(tmp_path) == [5, 4, 3]
    (tmp_path / "2-of-2" / "round-000005.safetensors").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="trying the checkpoint before it"):
        round, found = parts.load_latest(tmp_path, [1, 2], "c")
    assert round == 4
    assert found["x"].flatten().tolist() == [5, 6]
    parts.save(tmp_path, 0, 2, 6, [0, 1], state, "c")
    assert parts.rounds(tmp_path) == [5, 3]  # the second part of 6 is missing, and the first keeps its last two
    parts.forget_others(tmp_path, 5)
    assert parts.rounds(tmp_path) == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        parts.load_latest(tmp_path, [0], "c")


# --- a cluster that is not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:none", "127.0.0.1:99999"])
def test_an_address_where_nobody_answers_is_refused_at_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("semidfl.cluster.start.find_spec", lambda name: object())
    assert main(["run", "demo", "--engine", "ray", "--ray-address", address]) == 2
    assert f"compute.ray_address = {address!r}: nobody answers there" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_ray_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("semidfl.cluster.start.find_spec", lambda name: None)
    assert main(["run", "demo", "--engine", "ray"]) == 2
    assert "pip install 'semidfl[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_of_blocks_make_the_figures_of_all() -> None:
    records = [
        {"round": 3, "loss": [0.5, 0.25], "weights": [[1.0], [1.0]], "seconds": {"mix": 2.0}, "sent": {"m": [7, 8]}},
        {"round": 3, "loss": [0.125], "weights": [[0.5, 0.5]], "seconds": {"mix": 3.0}, "sent": {"m": [9]}},
    ]
    assert merged(records, [(0, 2), (1,)]) == {
        "round": 3,
        "loss": [0.5, 0.125, 0.25],
        "weights": [[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]],
        "seconds": {"mix": 3.0},
        "sent": {"m": [7, 9, 8]},
    }


# --- sweeps -----------------------------------------------------------------------------------------------------------


def make(values: dict[str, str]) -> Config:
    return override(tiny(), values)


def test_a_grid_has_every_combination_once() -> None:
    trials, search = plan(make, {"classifier.lr": "0.1, 0.2", "views": "1,2,2", "seed": "5"})
    assert search == "grid"
    found = [(t.config.classifier.lr, t.config.pseudo.views, t.config.seed) for t in trials]
    assert sorted(found) == [(0.1, 1, 5), (0.1, 2, 5), (0.2, 1, 5), (0.2, 2, 5)]


def test_random_trials_stay_in_their_ranges_and_are_the_same_again() -> None:
    flags = {
        "search": "random",
        "trials": "40",
        "classifier.lr": "0.001..0.1/log",
        "views": "1..6",
        "method": "semidfl",
    }
    trials, _ = plan(make, flags)
    rates = [t.config.classifier.lr for t in trials]
    assert len(trials) == 40
    assert 0.001 <= min(rates) < 0.003 < 0.03 < max(rates) <= 0.1
    assert {t.config.pseudo.views for t in trials} == {1, 2, 3, 4, 5, 6}
    assert [t.values for t in plan(make, flags)[0]] == [t.values for t in trials]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"seed": "1"}, "nothing to search"),
        ({"seed": "1,2", "search": "bayes"}, "grid, random or halving"),
        ({"seed": "1,2", "trials": "3"}, "--trials = '3'"),
        ({"classifier.lr": "0.1..0.2"}, "is a range: a grid needs values"),
        ({"classifier.lr": "0.2..0.1", "search": "random"}, "is no range"),
        ({"classifier.lr": "0..1/log", "search": "random"}, "is no range"),
        ({"classifier.lr": "0.1,fast"}, "must be a number"),
        ({"clasifier.lr": "0.1,0.2"}, "did you mean 'classifier.lr'"),
        ({"seed": "1,2", "method": "dfl-lb", "search": "halving"}, "measures none"),
        ({"seed": "1,2", "generator.kind": "none", "search": "halving"}, "measures none"),
        ({"seed": "1,2", "aggregation.weights": "constant", "search": "halving"}, "measures none"),
        ({"seed": "1,2", "aggregation.weights": "adatest"}, "judges by test images"),
        ({"aggregation.weights": "adagen,adatest"}, "judges by test images"),
        ({"rounds": "4,2", "search": "halving"}, "rounds cannot be searched"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        plan(make, flags)


def test_a_sweep_that_ends_before_anything_is_generated_says_so(tmp_path: Path) -> None:
    trials = [Trial({"seed": str(k)}, Config(), rounds=2, tested=0.5, folder=Path(str(k))) for k in range(2)]
    page, sheet = (path.read_text() for path in _write(tmp_path, trials))
    assert "nan" not in page + sheet
    assert "What nobody has judged" in page
    assert sheet.splitlines()[1] == "1,0,2,,50.00,0.0,0,"
    for trial in trials:
        trial.judged = 0.25
    assert "What nobody has judged" not in _write(tmp_path, trials)[0].read_text()


def test_rungs_begin_where_there_is_something_to_judge_by() -> None:
    config = override(Config(), {"rounds": 90, "generator.start": 5})
    assert rungs([config]) == [10, 30, 90]
    assert rungs([config, override(config, {"generator.start": 20})]) == [22, 30, 90]
    assert rungs([override(config, {"generator.start": 90}), config]) == [90]


def test_halving_trains_the_best_further_from_where_they_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = [
        f"--{path}={value}"
        for path, value in vars_of(tiny(rounds=6, classifier__iterations=2, compute__deterministic=True))
    ]
    words = ["sweep", "paper", *fixed, "--search=halving", "--trials=3", "--classifier.lr=0.01..0.3", "--name=s"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "after round 4: 1 go on" in out
    table = (tmp_path / "runs/s/sweep.csv").read_text().splitlines()
    assert [row.split(",")[2] for row in table[1:]] == ["6", "4", "4"]
    best = table[1].split(",")
    folder = tmp_path / "runs/s" / best[6]
    straight = prepare(
        override(tiny(rounds=6, classifier__iterations=2, compute__deterministic=True), {"classifier.lr": best[1]}),
        load("digits"),
    )
    list(train(straight[0].setup.config, *straight, MemoryExchange(straight[1].ids)))
    kept, _ = checkpoint.load_model(folder / "checkpoints/round-000006.safetensors")
    for i, state in rows_of(straight[1]).items():
        assert [name for name, x in state.items() if not torch.equal(x, kept[name][i])] == []
    assert (folder / "clients.json").is_file()
    (folder / "summary.json").unlink()  # killed between the last round and the end
    assert main(words) == 0  # nothing is trained again, but it ends
    assert (tmp_path / "runs/s/sweep.csv").read_text().splitlines() == table
    assert (folder / "summary.json").is_file()


def test_a_sweep_on_sites_has_a_client_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    for site, k in itertools.product("abc", range(8)):
        save(tmp_path / "sites" / site / str(k % 2) / f"{k}.png", np.full((8, 8), 9 * k, np.uint8))
    words = ["sweep", "paper", "--dataset=sites", "--rounds=1", "--topology=full", "--generator.kind=none"]
    words += ["--classifier.lr=0.1,0.2"]
    assert main([*words, "--clients=2"]) == 2
    assert "holds 3 sites" in capsys.readouterr().err
    assert main([*words, "--clients=3"]) == 0


@pytest.mark.parametrize("wrong", [["--roles", "UUUU"], ["--method", "nothing"], ["--dataset", "none.npz"]])
def test_a_run_that_cannot_be_replaces_no_other(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(tmp_path)
    fixed = [f"--{path}={value}" for path, value in vars_of(tiny(rounds=1, compute__report=False))]
    assert main(["run", "paper", *fixed, "--name=x"]) == 0
    before = sorted(path.name for path in (tmp_path / "runs/x").rglob("*"))
    assert main(["run", "paper", *fixed, *wrong, "--name", "x", "--overwrite", "--engine", "ray"]) == 2
    assert sorted(path.name for path in (tmp_path / "runs/x").rglob("*")) == before


def vars_of(config: Config) -> list[tuple[str, object]]:
    from semidfl.config import leaves

    # All of them: what is left out would be as the recipe has it for digits.
    return [(path, value) for path, value in leaves(config) if value != "" and path != "name"]
