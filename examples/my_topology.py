"""A topology of one's own: two cliques joined by one bridge."""

from collections.abc import Iterator
from itertools import combinations


def barbell(clients: int, seed: int) -> Iterator[tuple[int, int]]:
    """The edges, each once; the graph must be connected."""
    half = clients // 2
    yield from combinations(range(half), 2)
    yield from combinations(range(half, clients), 2)
    yield half - 1, half
