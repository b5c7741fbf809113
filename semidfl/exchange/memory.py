"""Cohorts in one process: nothing is copied when there is one, several meet at a barrier."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from semidfl.exchange.base import Shared

__all__ = ["MemoryExchange", "MemoryHub"]


class MemoryExchange:
    """One cohort of all clients: it sees what it published."""

    def __init__(self, clients: Sequence[int]) -> None:
        self.clients = tuple(clients)

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        return Shared(self.clients, dict(tensors))


class MemoryHub:
    """Several cohorts, one thread each; `seat` gives each its exchange."""

    def __init__(self, blocks: Sequence[Sequence[int]], timeout: float = 600.0) -> None:
        self.blocks = [tuple(block) for block in blocks]
        self._barrier = threading.Barrier(len(blocks), timeout=timeout)
        self._tables: dict[tuple[int, str], dict[int, Mapping[str, Tensor]]] = {}
        self._lock = threading.Lock()

    def seat(self, block: int) -> "_Seat":
        return _Seat(self, block)

    def abort(self) -> None:
        """Wakes the cohorts that wait for one that has failed."""
        self._barrier.abort()

    def meet(self, block: int, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        with self._lock:
            table = self._tables.setdefault((t, topic), {})
            table[block] = tensors
        self._barrier.wait()
        shared = self._joined(table)
        self._barrier.wait()  # nobody may change its tensors while others still read them
        with self._lock:
            self._tables.pop((t, topic), None)
        return shared

    def _joined(self, table: Mapping[int, Mapping[str, Tensor]]) -> Shared:
        ids = [i for block in self.blocks for i in block]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        names = table[0]
        rows = {n: torch.cat([table[b][n] for b in range(len(self.blocks))])[order] for n in names}
        return Shared(tuple(sorted(ids)), rows)


class _Seat:
    def __init__(self, hub: MemoryHub, block: int) -> None:
        self.hub, self.block = hub, block

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        return self.hub.meet(self.block, t, topic, tensors)
