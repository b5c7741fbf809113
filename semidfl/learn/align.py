"""Aligns pseudo-labels with the network's class shares, which no client knows and all find by gossip.

A client's own classes are skewed, so aligning its predictions with its own shares would be wrong (Berthelot et
al. 2020 do so, on data that is not). But over the whole network, predictions should be about as frequent as labels: a
class that is predicted too seldom everywhere is one that the classifiers have not learnt, and its predictions are
raised, round by round, until the raised ones are frequent enough. One step (target over prediction) is not enough
where classifiers have come to see two classes as one: they are as sure of it as of the truth. Few labels say little
about how frequent classes are: predictions may be anywhere within what the labels leave open. Where classes are known
to be about even, `prior` says so.

Each client has an estimate of the network's predictions and labels. In every round it averages them with its
neighbours', with weights that sum to 1 over rows and over columns, so that every client's data counts alike on any
graph. What has changed in its own sum is put in at once (dynamic average consensus, Zhu and Martinez 2010): an
estimate that lags makes the factors swing, since they teach the classifiers whose predictions they correct. And
some of its own is put in anew: what was lost, or was a lie, is forgotten. How far classes are raised is averaged, too:
else clients that saw only their own classes in the first rounds would stay apart for ever. That costs 3 K numbers a
round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from semidfl.cohort import take
from semidfl.data.shards import Rows
from semidfl.exchange.base import Neighbourhood, Shared, row_sum
from semidfl.learn.aggregate import mix
from semidfl.learn.robust import median
from semidfl.topology import Topology

__all__ = ["Shares", "aligned", "averaging", "gossip_weights", "summed"]

_RAREST = 0.01
"""share below which a class counts as no rarer"""
_DOUBT = 2.0
"""standard deviations of the labels' shares within which predictions are left alone"""
_STEP = 0.1
"""how much of the gap between labels and predictions, in logarithms, a round makes up: gossip takes some rounds"""
_MOST = 4.6
"""logarithm of the factor by which a class is raised or lowered at most: a hundred"""
_ANEW = 0.05
"""part of an estimate that is the client's own, put in anew in every round"""


@dataclass(frozen=True)
class Shares:
    """Each client's estimate of the network, and what it makes of it."""

    predicted: Tensor  # (C, K) of the mean over all clients of their sums of aligned predictions
    labelled: Tensor  # (C, K) of the mean number of labels a client has of each class
    tilt: Tensor  # (C, K) logarithm of the factor by which predictions of a class are raised
    told: Tensor  # (C, K) the own sum of aligned predictions as the estimate last took it in; nobody else's business

    @classmethod
    def start(cls, label_counts: Tensor) -> "Shares":
        """Before the first round; label_counts (C, K)."""
        predicted, tilt, told = (torch.zeros_like(label_counts) for _ in range(3))  # each with memory of its own
        return cls(predicted, label_counts, tilt, told)

    def __len__(self) -> int:
        return len(self.tilt)

    def rows(self, rows: Rows) -> "Shares":
        return Shares(*(take(x, rows) for x in vars(self).values()))

    def public(self) -> dict[str, Tensor]:
        """What neighbours are sent."""
        return {name: x for name, x in vars(self).items() if name != "told"}

    def averaged(self, seen: Mapping[str, Tensor], mean: Callable[[Tensor, Tensor], Tensor]) -> "Shares":
        """With what the neighbours have (M, K); mean(own, of all that answered)."""
        return replace(self, **{name: mean(own, seen[name]) for name, own in self.public().items()})

    def renewed(self, predictions: Tensor, labels: Tensor) -> "Shares":
        """With what has changed in the client's own sums (C, K), and some of them anew, put in."""
        predicted, labelled = (
            (1 - _ANEW) * x + _ANEW * own
            for x, own in ((self.predicted + predictions - self.told, predictions), (self.labelled, labels))
        )
        return Shares(predicted, labelled, self.tilt, predictions)

    def raised(self, clients: int, prior: float) -> Tensor:
        """The next tilt: up for classes that are predicted more seldom than labels say, in all `clients`, else down."""
        labels = self.labelled * clients + prior
        number = labels.sum(1, keepdim=True)
        share = labels / number
        doubt = _DOUBT * (share * (1 - share) / (number + 1)).sqrt()
        predicted = self.predicted.clamp(min=0)
        predicted = predicted / predicted.sum(1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
        known = predicted.sum(1, keepdim=True) > 0
        low, high, now = (x.clamp(min=_RAREST).log() for x in (share - doubt, share + doubt, predicted))
        gap = (low - now).clamp(min=0) - (now - high).clamp(min=0)
        tilt = self.tilt + _STEP * torch.where(known, gap, 0.0)
        return (tilt - tilt.mean(1, keepdim=True)).clamp(-_MOST, _MOST)


@lru_cache(maxsize=32)  # the same in every round, as long as the same clients answer
def gossip_weights(graph: Topology, own: Sequence[int], seen: Sequence[int], device: torch.device) -> Tensor:
    """(C, G) in the order of a `Neighbourhood`: one over the larger of both neighbourhoods (Xiao, Boyd 2004).

    Rows sum to at most 1; what is missing is the client's own. So both take as much of each other, and the mean over
    all clients stays what it is.
    """
    size = [1 + len(graph.neighbours[i]) for i in range(graph.clients)]
    there = set(seen)
    rows = [[1 / max(size[i], size[j]) for j in sorted((i, *graph.neighbours[i])) if j in there] for i in own]
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows], dtype=torch.float64).to(device)


def averaging(
    graph: Topology, own: tuple[int, ...], seen: Shared, device: torch.device, robust: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """For `averaged`: by gossip, or by the median of the neighbourhood where neighbours may lie."""
    near = Neighbourhood.of(graph, own, seen.ids, device)
    if robust:
        return lambda mine, all_: median(near, all_)
    weights = gossip_weights(graph, own, seen.ids, device)
    if seen.trust is not None:
        weights = weights * seen.trust.to(weights)[near.index]
    rest = (1 - row_sum(weights)).float()
    return lambda mine, all_: mix(weights, near, all_, True) + rest * mine


def summed(p: Tensor, valid: Tensor) -> Tensor:
    """p (C, n, K), valid (C, n) -> (C, K)."""
    return (p * valid[:, :, None]).sum(1)


def aligned(p: Tensor, tilt: Tensor) -> Tensor:
    """p (C, n, K) times e^tilt (C, K), again a distribution."""
    raised = p * tilt.exp()[:, None]
    return raised / raised.sum(2, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
