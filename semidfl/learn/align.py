"""Aligns pseudo-labels with the network's class shares, which no client knows and all find by gossip.

A client's own classes are skewed, so aligning its predictions with its own shares would be wrong (Berthelot et
al. 2020 do so, on data that is not). But over the whole network, predictions should be as frequent as labels: a class
that is predicted too seldom everywhere is one that the classifiers have not learnt, and its predictions are raised,
round by round, until the raised ones are frequent enough. One step (target over prediction) is not enough where
classifiers have come to see two classes as one: they are as sure of it as of the truth.

Each client tracks the network's sum of predictions by dynamic average consensus (Zhu, Martinez 2010): add what has
changed in the own sum, then average with the neighbours. That costs 2 K numbers a round.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semidfl.cohort import take
from semidfl.data.shards import Rows
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.aggregate import equal_weights, mix

__all__ = ["Shares", "aligned", "summed"]

_RAREST = 0.01
"""share below which a class counts as no rarer"""
_PRIOR = 50.0
"""labels added to each class: a handful of labels says little about how frequent classes are"""
_STEP = 0.2
"""how much of the gap between labels and predictions, in logarithms, a round makes up: gossip takes some rounds"""
_MOST = 100.0
"""factor by which a class is raised or lowered at most"""


@dataclass(frozen=True)
class Shares:
    """Each client's estimate of the network, what it last put into it, and what it makes of it."""

    predicted: Tensor  # (C, K) estimate of the mean over all clients of their sums of aligned predictions
    own: Tensor  # (C, K) the client's own sum, as last put in
    labelled: Tensor  # (C, K) estimate of the mean number of labels a client has of each class
    tilt: Tensor  # (C, K) logarithm of the factor by which predictions of a class are raised

    @classmethod
    def start(cls, label_counts: Tensor) -> "Shares":
        """Before the first round; label_counts (C, K)."""
        nothing = torch.zeros_like(label_counts)
        return cls(nothing, nothing, label_counts, nothing)

    def __len__(self) -> int:
        return len(self.own)

    def rows(self, rows: Rows) -> "Shares":
        return Shares(*(take(x, rows) for x in vars(self).values()))

    def moved(self, own: Tensor) -> "Shares":
        """With the change of the own sum put in: the sum over all clients follows exactly."""
        return replace(self, predicted=self.predicted + (own - self.own), own=own)

    def averaged(self, predicted: Tensor, labelled: Tensor, near: Neighbourhood) -> "Shares":
        """With the neighbours' estimates (M, K) averaged in."""
        weights = equal_weights(near)
        mixed = (mix(weights, near, x, True) for x in (predicted, labelled))
        return Shares(next(mixed), self.own, next(mixed), self.tilt)

    def raised(self, clients: int) -> Tensor:
        """The next tilt: up for classes that are predicted more seldom than labelled, in all `clients`, else down."""
        labelled = self.labelled * clients + _PRIOR
        predicted = self.predicted.clamp(min=0)
        predicted = (predicted / predicted.sum(1, keepdim=True)).nan_to_num(0.0).clamp(min=_RAREST)
        gap = (labelled / labelled.sum(1, keepdim=True)).log() - (predicted / predicted.sum(1, keepdim=True)).log()
        most = torch.tensor(_MOST).log().item()
        return (self.tilt + _STEP * gap).clamp(-most, most)


def summed(p: Tensor, valid: Tensor) -> Tensor:
    """p (C, n, K), valid (C, n) -> (C, K)."""
    return (p * valid[:, :, None]).sum(1)


def aligned(p: Tensor, tilt: Tensor) -> Tensor:
    """p (C, n, K) times e^tilt (C, K), again a distribution."""
    raised = p * tilt.exp()[:, None]
    return raised / raised.sum(2, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
