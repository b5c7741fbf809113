"""The one place where cohorts meet.

Each client publishes tensors under a topic of a round and sees those of its neighbourhood. In memory
everybody is there; over a network only those who answered in time. All that is computed from what was
seen goes through a `Neighbourhood`, so a missing peer needs no special case anywhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from semidfl.topology import Topology

__all__ = ["Counted", "Exchange", "Neighbourhood", "Shared", "mixed_before", "mixing", "mixings", "row_sum"]


@dataclass(frozen=True)
class Shared:
    """What a cohort sees of a topic: the rows of all clients that answered, its own included."""

    ids: tuple[int, ...]  # M client ids, ascending
    tensors: dict[str, Tensor]  # (M, …)
    trust: Tensor | None = None  # (M,) factors of the mixing weights, below 1 for what is out of date; None: all 1


class Exchange(Protocol):
    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        """Publish one row per own client, return those of own clients and neighbours."""
        ...


def mixings(times: int) -> list[str]:
    """The topics under which models are sent to be mixed in a round, one after the other."""
    return ["models", *(f"models-{k}" for k in range(2, times + 1))]


def mixing(topic: str) -> bool:
    """Whether it is one of these."""
    return topic == "models" or mixed_before(topic)


def mixed_before(topic: str) -> bool:
    """Whether it is one of these but the first: what is sent under it was mixed in the same round."""
    return topic.startswith("models-")


@dataclass(frozen=True)
class Neighbourhood:
    """G_i of each own client, as positions among the clients that answered.

    Lists are in ascending order of client id and padded to the longest, so what is computed from them
    does not depend on which other clients happen to share the process.
    """

    index: Tensor  # (C, G) positions into Shared
    mask: Tensor  # (C, G) bool, False where padded

    @classmethod
    def of(cls, graph: Topology, own: Sequence[int], seen: Sequence[int], device: torch.device) -> "Neighbourhood":
        return _neighbourhood(graph, tuple(own), tuple(seen), device)

    @classmethod
    def alone(cls, clients: int, device: torch.device) -> "Neighbourhood":
        """Every client with itself only."""
        index = torch.arange(clients, device=device)[:, None]
        return cls(index, torch.ones_like(index, dtype=torch.bool))

    def trusted(self, weights: Tensor, trust: Tensor | None) -> Tensor:
        """Weights (C, G) times the trust (M,) in each neighbour, again with rows that sum to 1."""
        if trust is None:
            return weights
        scaled = weights * trust.to(weights)[self.index]
        return scaled / row_sum(scaled)

    @property
    def count(self) -> Tensor:
        """(C,) size of each neighbourhood."""
        return self.mask.sum(1)


def row_sum(x: Tensor) -> Tensor:
    """(C, G) -> (C, 1), summed from left to right: padding on the right then changes no bit."""
    return x.cumsum(1)[:, -1:]


@lru_cache(maxsize=32)  # the same in every round, as long as the same clients answer
def _neighbourhood(graph: Topology, own: tuple[int, ...], seen: tuple[int, ...], device: torch.device) -> Neighbourhood:
    place = {client: position for position, client in enumerate(seen)}
    lists = [[place[j] for j in sorted((i, *graph.neighbours[i])) if j in place] for i in own]
    longest = max(len(x) for x in lists)
    # Padded with one of the client's own: what stands there counts nothing, but zero times NaN is NaN.
    index = torch.tensor([x + x[:1] * (longest - len(x)) for x in lists])
    mask = torch.arange(longest) < torch.tensor([len(x) for x in lists])[:, None]
    return Neighbourhood(index.to(device), mask.to(device))


class Counted:
    """An exchange that notes what each client sends: what it publishes, once to every neighbour."""

    def __init__(self, inner: Exchange, graph: Topology, own: Sequence[int]) -> None:
        self.inner = inner
        self._degrees = [len(graph.neighbours[i]) for i in own]
        self.sent: dict[str, list[int]] = {}  # topic -> bytes of each own client, since the last reset

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        row = sum(x[0].numel() * x.element_size() for x in tensors.values())
        self.sent[topic] = [row * degree for degree in self._degrees]
        return self.inner.share(t, topic, tensors)

    def reset(self) -> dict[str, list[int]]:
        """What was sent since the last reset."""
        sent, self.sent = self.sent, {}
        return sent
