"""Which actor hosts which clients: blocks of equal size that cut few edges of the graph.

A cut edge is a model that crosses from one actor to another in every round. Blocks are grown one after the other, each
taking the client that has the most neighbours in it, and then improved by swapping pairs of clients between two blocks
as long as that cuts fewer edges (Kernighan and Lin's idea, in its plainest form).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from semidfl.topology import Topology

__all__ = ["Blocks", "blocks_of"]

_PASSES = 8
"""of swapping at most; small graphs settle in two or three"""


@dataclass(frozen=True)
class Blocks:
    """The clients of each actor, ascending, and what that costs."""

    members: tuple[tuple[int, ...], ...]
    edges: int  # of the graph
    cut: int  # of these, between two actors

    def crossing(self, graph: Topology, block: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By other block, ascending: the clients of `block` that go there, and the clients that come from there."""
        home = {client: b for b, clients in enumerate(self.members) for client in clients}
        cut = [(i, j, home[j]) for i in self.members[block] for j in graph.neighbours[i] if home[j] != block]
        others = sorted({b for _, _, b in cut})
        sends: dict[int, set[int]] = {b: set() for b in others}
        receives: dict[int, set[int]] = {b: set() for b in others}
        for i, j, b in cut:
            sends[b].add(i)
            receives[b].add(j)
        return {b: sorted(x) for b, x in sends.items()}, {b: sorted(x) for b, x in receives.items()}

    def words(self) -> str:
        """As the run's first line says it."""
        sizes = sorted({len(clients) for clients in self.members})
        each = " or ".join(map(str, sizes))
        return f"{len(self.members)} actors with {each} clients each; {self.cut} of {self.edges} edges are cut"


def blocks_of(graph: Topology, count: int) -> Blocks:
    """Splits the clients over `count` actors, sizes differing by one at most; the same for the same graph."""
    count = min(count, graph.clients)
    home = _grown(graph, count)
    for _ in range(_PASSES):
        if not _improved(graph, home):
            break
    members = tuple(tuple(i for i, b in enumerate(home) if b == block) for block in range(count))
    cut = sum(home[i] != home[j] for i, row in enumerate(graph.neighbours) for j in row) // 2
    return Blocks(members, sum(map(len, graph.neighbours)) // 2, cut)


def _grown(graph: Topology, count: int) -> list[int]:
    """The block of every client: each block grows along edges until it has its share."""
    home = [-1] * graph.clients
    free = [len(row) for row in graph.neighbours]  # neighbours that have no block yet
    for block in range(count):
        size = graph.clients // count + (block < graph.clients % count)
        inside = [0] * graph.clients
        heap: list[tuple[int, int, int]] = []
        for _ in range(size):
            client = _next(heap, home, inside)
            if client < 0:  # the first, or nothing left to grow along: begin where the fewest edges lead away
                client = _loosest(home, free)
            home[client] = block
            for j in graph.neighbours[client]:
                free[j] -= 1
                inside[j] += 1
                if home[j] < 0:
                    heapq.heappush(heap, (-inside[j], free[j], j))
    return home


def _loosest(home: Sequence[int], free: Sequence[int]) -> int:
    return min((i for i, b in enumerate(home) if b < 0), key=lambda i: (free[i], i))


def _next(heap: list[tuple[int, int, int]], home: Sequence[int], inside: Sequence[int]) -> int:
    """The client with the most neighbours inside, of these the one with the fewest outside; -1 if there is none."""
    while heap:
        links, _, client = heapq.heappop(heap)
        if home[client] < 0 and -links == inside[client]:  # else an entry that a later one has replaced
            return client
    return -1


def _improved(graph: Topology, home: list[int]) -> bool:
    """One pass of swaps over all pairs of blocks that share an edge; whether any was made."""
    border: dict[tuple[int, int], set[int]] = {}  # (from, to) -> clients that have a neighbour there
    for i, row in enumerate(graph.neighbours):
        for j in row:
            if home[i] != home[j]:
                border.setdefault((home[i], home[j]), set()).add(i)
    pairs = sorted((a, b) for a, b in border if a < b)
    return sum(_swapped(graph, home, a, b, border[a, b], border[b, a]) for a, b in pairs) > 0


def _swapped(graph: Topology, home: list[int], a: int, b: int, ours: set[int], theirs: set[int]) -> int:
    """Swaps clients at the border of blocks a and b, the most useful first, while fewer edges are then cut."""

    def gain(client: int, to: int) -> int:
        return sum((home[j] == to) - (home[j] == home[client]) for j in graph.neighbours[client])

    def ranked(clients: set[int], block: int, to: int) -> list[int]:
        still_here = (i for i in clients if home[i] == block)  # a swap with a third block may have moved some
        return sorted(still_here, key=lambda i: (-gain(i, to), i))

    made = 0
    for one, other in zip(ranked(ours, a, b), ranked(theirs, b, a), strict=False):
        # Earlier swaps have changed what these two gain.
        if gain(one, b) + gain(other, a) - 2 * (other in graph.neighbours[one]) > 0:
            home[one], home[other] = b, a
            made += 1
    return made
