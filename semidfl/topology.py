"""Who talks to whom: the graph of the clients, and which of them hold labels.

`build` turns a `GraphConfig` into a `Topology`: the paper's four graphs, general ones for any number of
clients, or a file of edges. A graph comes out connected or not at all: models could never reach the
clients of another part, and a run would go wrong in silence.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt, log
from os.path import isfile
from pathlib import Path

import networkx as nx
import numpy as np
import numpy.typing as npt

from semidfl.config import GraphConfig
from semidfl.errors import TopologyError, nearest
from semidfl.plugins import find_plugin

__all__ = ["TOPOLOGIES", "Topology", "build", "refuse_unconnected"]

Edges = npt.NDArray[np.int64]  # (E, 2), in any order and direction, doubles allowed
Neighbours = tuple[tuple[int, ...], ...]

_PURPOSE = 0x746F706F  # "topo": keeps these draws apart from all others of the same seed
_TRIES = 100


@dataclass(frozen=True)
class Topology:
    """A connected undirected graph of clients and the role of each."""

    name: str
    """as in the config: a name or the path of a file"""
    neighbours: Neighbours
    """of every client: ascending, itself left out"""
    roles: str
    """a letter a client: L labelled, M labelled and unlabelled, U unlabelled samples"""

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return len(self.neighbours)

    def closed(self) -> npt.NDArray[np.bool_]:
        """G_i as row i, (N, N): who is a neighbour of i, and i itself."""
        matrix = np.eye(self.clients, dtype=np.bool_)
        for i, row in enumerate(self.neighbours):
            matrix[i, list(row)] = True
        return matrix

    def left(self, mixings: int = 1) -> float:
        """Of the difference between clients that lasts longest, the share that mixings with equal weights leave."""
        closed = self.closed().astype(np.float64)
        size = closed.sum(1)
        # The same eigenvalues as those of rows that sum to 1, and symmetric.
        values = np.linalg.eigvalsh(closed / np.sqrt(np.outer(size, size)))
        return float(np.abs(values[:-1]).max(initial=0.0)) ** mixings

    def edges(self) -> list[tuple[int, int]]:
        """Every edge once, as (i, j) with i < j, ascending."""
        return [(i, j) for i, row in enumerate(self.neighbours) for j in row if i < j]


def build(config: GraphConfig, seed: int) -> Topology:
    """The graph and the roles that the config asks for; the same seed gives the same on every machine."""
    if config.clients < 1:
        raise TopologyError(f"graph.clients = {config.clients} is not legal: it must be at least 1")
    if config.topology in _RANDOM:
        neighbours = _draw(config, seed)
    else:
        neighbours = _neighbours(_edges(config, seed), config.clients)
        refuse_unconnected(config.topology, neighbours)
    return Topology(config.topology, neighbours, _roles(config))


def _edges(config: GraphConfig, seed: int) -> Edges:
    name, n = config.topology, config.clients
    if name in _PAPER:
        return _paper(name, n)
    if name in _FIXED:
        return _FIXED[name](n)
    # A file is meant by a file that exists, or by what is spelt like a path: "./ring" is a file, "ring" is the ring.
    if isfile(name) or (re.search(r"[/\\.]", name) and ":" not in name):
        return _edge_file(name, n)
    if (make := find_plugin("topologies", "graph.topology", name)) is not None:
        return _checked(name, np.array([tuple(edge) for edge in make(n, seed)], dtype=np.int64).reshape(-1, 2), n)
    raise TopologyError(
        f"graph.topology = {name!r} is not known{nearest(name, TOPOLOGIES)}: "
        f"one of {', '.join(TOPOLOGIES)}, or the path of a file of edges"
    )


def _checked(name: str, edges: Edges, clients: int) -> Edges:
    """The edges of a topology of the user's own, if they join clients that exist."""
    for i, j in edges.tolist():
        if i == j or not (0 <= i < clients and 0 <= j < clients):
            raise TopologyError(f"graph.topology = {name!r} gave the edge {i} {j}: clients are 0 to {clients - 1}")
    return edges


# --- edges to neighbours -------------------------------------------------------------------------


def _neighbours(edges: Edges, n: int) -> Neighbours:
    rows, columns = np.divmod(_sorted_keys(edges, n), n)
    # One int object an id, shared by all rows: the full graph of 5000 clients would hold 25 million else.
    ids = np.arange(n).astype(object)[columns]
    starts = np.searchsorted(rows, np.arange(n + 1))
    return tuple(tuple(ids[a:b]) for a, b in pairwise(starts))


def _sorted_keys(edges: Edges, n: int) -> npt.NDArray[np.int64]:
    """i * n + j of every edge in both directions, ascending, each once."""
    keys = np.concatenate([edges[:, 0] * n + edges[:, 1], edges[:, 1] * n + edges[:, 0]])
    if n * n > 64 * len(keys):
        return np.unique(keys)
    # Of a dense graph the table is small beside its edges, and far faster: 5000 clients, all joined, in 3 s, not 40.
    table = np.zeros(n * n, dtype=np.bool_)
    table[keys] = True
    return np.flatnonzero(table)


def _unreached(neighbours: Neighbours) -> list[int]:
    """The clients that no path joins to client 0."""
    seen, todo = {0}, [0]
    while todo and len(seen) < len(neighbours):
        new = set(neighbours[todo.pop()]) - seen
        seen |= new
        todo.extend(new)
    return sorted(set(range(len(neighbours))) - seen)


def refuse_unconnected(name: str, neighbours: Neighbours) -> None:
    if lost := _unreached(neighbours):
        some = ", ".join(map(str, lost[:8])) + (", …" if len(lost) > 8 else "")
        raise TopologyError(
            f"the graph {name!r} of {len(neighbours)} clients is not connected: no path leads from client 0 "
            f"to {len(lost)} of them ({some}); add edges, or set graph.clients to the number in the graph"
        )


# --- the paper's graphs --------------------------------------------------------------------------

_FIG1 = ("2678", "3459", "0478", "1457", "1239", "1368", "0579", "0236", "0259", "1468")
_TREE = ("13456", "02789", "1", "0", "0", "0", "0", "1", "1", "1")
_CYCLE = ("39", "46", "57", "06", "17", "28", "13", "24", "59", "08")

# Neighbours of each id, one digit an id; then the roles.
_PAPER: dict[str, tuple[tuple[str, ...], str]] = {
    "fig1": (_FIG1, "LLMMUUUUUU"),
    "topology1": (_FIG1, "LMMMUUUUUU"),
    "topology2": (_TREE, "LLMMUUUUUU"),
    "topology3": (_CYCLE, "LLLMMMUUUU"),
}


def _paper(name: str, n: int) -> Edges:
    if n != 10:
        raise TopologyError(
            f"graph.topology = {name!r} has 10 clients, not graph.clients = {n}: set it to 10, "
            f"or choose one of {', '.join(t for t in TOPOLOGIES if t not in _PAPER)}"
        )
    return _pairs([(i, int(j)) for i, row in enumerate(_PAPER[name][0]) for j in row])


# --- graphs for any number of clients ------------------------------------------------------------


def _pairs(pairs: Sequence[tuple[int, int]]) -> Edges:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)  # the shape holds for no edges, too


def _line(n: int) -> Edges:
    return np.stack([np.arange(n - 1), np.arange(1, n)], axis=1)


def _ring(n: int) -> Edges:
    # Alone, a client would be joined to itself; of two, the doubled edge is dropped later.
    return _line(n) if n < 2 else np.concatenate([_line(n), _pairs([(n - 1, 0)])])


def _star(n: int) -> Edges:
    return np.stack([np.zeros(n - 1, dtype=np.int64), np.arange(1, n)], axis=1)


def _full(n: int) -> Edges:
    return np.stack(np.triu_indices(n, 1), axis=1)


def _sides(n: int) -> tuple[int, int]:
    """The most square rows x columns that hold n clients: 12 is 3 x 4, a prime is 1 x n."""
    rows = next(d for d in range(isqrt(n), 0, -1) if n % d == 0)
    return rows, n // rows


def _grid(n: int) -> Edges:
    place = np.arange(n).reshape(_sides(n))
    across = np.stack([place[:, :-1].ravel(), place[:, 1:].ravel()], axis=1)
    return np.concatenate([across, np.stack([place[:-1].ravel(), place[1:].ravel()], axis=1)])


def _torus(n: int) -> Edges:
    rows, columns = _sides(n)
    if rows < 3:
        good = next(m for d in range(1, n + 9) for m in (n - d, n + d) if m > 8 and _sides(m)[0] >= 3)
        raise TopologyError(
            f"graph.topology = 'torus' cannot hold graph.clients = {n}: as {rows} x {columns} the edge around a side "
            f"of {rows} would join a client to itself or double an edge; both sides need 3 or more, as with {good}"
        )
    place = np.arange(n).reshape(rows, columns)
    wrapped = [np.stack([place.ravel(), np.roll(place, -1, axis).ravel()], axis=1) for axis in (0, 1)]
    return np.concatenate(wrapped)


# --- random graphs -------------------------------------------------------------------------------


def _draw(config: GraphConfig, seed: int) -> Neighbours:
    """The first connected graph of up to `_TRIES` draws, each with a seed derived from `seed`."""
    draw, advice = _RANDOM[config.topology]
    for attempt in range(_TRIES):
        edges = draw(config, np.random.SeedSequence((seed, _PURPOSE, attempt)))
        neighbours = _neighbours(edges, config.clients)
        if not _unreached(neighbours):
            return neighbours
    limit = log(config.clients) / config.clients
    raise TopologyError(
        f"none of {_TRIES} draws of {config.topology!r} with graph.clients = {config.clients}, graph.degree = "
        f"{config.degree}, graph.probability = {config.probability:g} is connected: {advice.format(limit=limit)}"
    )


def _networkx_seed(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1, np.uint64)[0])


def _regular(config: GraphConfig, seeds: np.random.SeedSequence) -> Edges:
    _check_regular(config)
    n, degree = config.clients, config.degree
    if 2 * degree < n:
        return _pairs(list(nx.random_regular_graph(degree, n, seed=_networkx_seed(seeds)).edges()))
    # networkx joins free ends at random until it fits, which in a dense graph hardly ever happens
    # (100 clients of degree 90: not in a minute). What a dense one leaves out is sparse, and regular too.
    left_out = ~np.eye(n, dtype=np.bool_)
    if degree < n - 1:
        a, b = _pairs(list(nx.random_regular_graph(n - 1 - degree, n, seed=_networkx_seed(seeds)).edges())).T
        left_out[a, b] = left_out[b, a] = False
    return np.argwhere(left_out)


def _erdos_renyi(config: GraphConfig, seeds: np.random.SeedSequence) -> Edges:
    n, p = config.clients, config.probability
    # Not from networkx, which needs seconds for each draw of 5000 clients; this takes a tenth of one.
    random = np.random.RandomState(np.random.MT19937(seeds))
    ends = [i + 1 + np.flatnonzero(random.random_sample(n - 1 - i) < p) for i in range(n)]
    return np.stack([np.repeat(np.arange(n), [len(e) for e in ends]), np.concatenate(ends)], axis=1)


def _small_world(config: GraphConfig, seeds: np.random.SeedSequence) -> Edges:
    _check_small_world(config)
    graph = nx.watts_strogatz_graph(config.clients, config.degree, config.probability, seed=_networkx_seed(seeds))
    return _pairs(list(graph.edges()))


def _check_degree(config: GraphConfig) -> None:
    n, degree = config.clients, config.degree
    if not 1 <= degree < n:
        raise TopologyError(
            f"graph.degree = {degree} is not legal with graph.clients = {n}: "
            f"{config.topology} needs a degree of at least 1 and below the number of clients"
        )


def _check_regular(config: GraphConfig) -> None:
    _check_degree(config)
    n, degree = config.clients, config.degree
    if n * degree % 2:
        raise TopologyError(
            f"graph.degree = {degree} is not legal with graph.clients = {n}: both are odd, and every edge "
            f"has two ends; make one of them even"
        )
    if degree == 1 and n > 2:
        raise TopologyError(f"graph.degree = 1 joins {n} clients in pairs, which are not connected: set 2 or more")


def _check_small_world(config: GraphConfig) -> None:
    _check_degree(config)
    if config.degree % 2:
        raise TopologyError(
            f"graph.degree = {config.degree} is not legal: small-world joins as many clients on either side, "
            f"so it must be even"
        )


# The draw, and what to change where none comes out connected.
_RANDOM: dict[str, tuple[Callable[[GraphConfig, np.random.SeedSequence], Edges], str]] = {
    "random-regular": (_regular, "raise graph.degree to 3 or more"),
    "erdos-renyi": (_erdos_renyi, "raise graph.probability well above ln(N) / N = {limit:.3g}"),
    "small-world": (_small_world, "raise graph.degree or lower graph.probability"),
}
_FIXED: dict[str, Callable[[int], Edges]] = {
    "ring": _ring,
    "line": _line,
    "star": _star,
    "full": _full,
    "grid": _grid,
    "torus": _torus,
}
TOPOLOGIES = (*_PAPER, *_FIXED, *_RANDOM)


# --- a file of edges -----------------------------------------------------------------------------


def _edge_file(name: str, n: int) -> Edges:
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TopologyError(
            f"graph.topology = {name!r}: there is no such file{nearest(name, TOPOLOGIES)}; "
            f"the graphs with a name are {', '.join(TOPOLOGIES)}"
        ) from None
    except (OSError, ValueError) as error:
        raise TopologyError(f"graph.topology = {name!r} cannot be read as a file of edges: {error}") from None
    return _pairs(list(_parse(name, text, n)))


def _parse(name: str, text: str, n: int) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{name}, line {number} ({line.strip()[:60]!r})"
        if not (content := line.partition("#")[0].strip()):
            continue
        # 18 digits fit int64, and keep int() from choking on a line of thousands.
        if not (found := re.fullmatch(r"(-?[0-9]{1,18})\s+(-?[0-9]{1,18})", content)):
            raise TopologyError(f'{where} is not an edge: a line holds the ids of two clients, "i j"')
        i, j = int(found[1]), int(found[2])
        if bad := [k for k in (i, j) if not 0 <= k < n]:
            raise TopologyError(f"{where} names client {bad[0]}: with graph.clients = {n} the ids are 0 to {n - 1}")
        if i == j:
            raise TopologyError(f"{where} joins client {i} to itself: leave it out, a client always hears itself")
        yield i, j


# --- roles ---------------------------------------------------------------------------------------


def _roles(config: GraphConfig) -> str:
    roles, n = config.roles, config.clients
    if not roles:
        return _PAPER[config.topology][1] if config.topology in _PAPER else _default_roles(n)
    if bad := set(roles) - set("LMU"):
        raise TopologyError(f"graph.roles holds {sorted(bad)}: legal letters are L, M and U")
    if len(roles) != n:
        raise TopologyError(f"graph.roles = {roles!r} has {len(roles)} letters for graph.clients = {n}: one each")
    if not set(roles) & set("LM"):
        raise TopologyError(f"graph.roles = {roles!r} gives nobody labels: at least one client must be L or M")
    return roles


def _default_roles(n: int) -> str:
    """20 % L, 20 % M, the others U, by id; a client alone is M, or the unlabelled data would lie idle."""
    if n == 1:
        return "M"
    fifth = (2 * n + 5) // 10
    few = max(1, fifth)
    return "L" * few + "M" * fifth + "U" * (n - few - fifth)
