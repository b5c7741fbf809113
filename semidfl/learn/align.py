"""Aligns pseudo-labels with the network's class shares, which no client knows and all find by gossip.

A client's own classes are skewed, so aligning its predictions with its own shares would be wrong (Berthelot et
al. 2020 do so, on data that is not). But over the whole network, predictions should be as frequent as labels:
a class that is predicted too seldom everywhere is one that the classifiers have not learnt, and its predictions
are raised. Each client tracks the network's mean prediction by dynamic average consensus (Zhu, Martinez 2010):
add what has changed in the own mean, then average with the neighbours. That costs 2 K numbers a round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from semidfl.cohort import take
from semidfl.data.shards import Rows
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.aggregate import equal_weights, mix

__all__ = ["Shares", "aligned", "mean_prediction"]

_RAREST = 0.01
"""share below which a class is not raised any further"""
_PRIOR = 50.0
"""labels added to each class: a handful of labels says little about how frequent classes are"""


@dataclass(frozen=True)
class Shares:
    """Each client's estimate of the network, and what it last put into it."""

    predicted: Tensor  # (C, K) estimate of the mean prediction over all clients
    own: Tensor  # (C, K) the client's own mean prediction, as last put in
    labelled: Tensor  # (C, K) estimate of the mean number of labels a client has of each class

    @classmethod
    def start(cls, label_counts: Tensor) -> "Shares":
        """Before the first round; label_counts (C, K)."""
        even = torch.full_like(label_counts, 1 / label_counts.shape[1])
        return cls(even, even, label_counts)

    def __len__(self) -> int:
        return len(self.own)

    def rows(self, rows: Rows) -> "Shares":
        return Shares(*(take(x, rows) for x in vars(self).values()))

    def moved(self, own: Tensor) -> "Shares":
        """With the change of the own mean prediction put in: the sum over all clients follows exactly."""
        return Shares(self.predicted + (own - self.own), own, self.labelled)

    def averaged(self, predicted: Tensor, labelled: Tensor, near: Neighbourhood) -> "Shares":
        """With the neighbours' estimates (M, K) averaged in."""
        weights = equal_weights(near)
        return Shares(mix(weights, near, predicted, True), self.own, mix(weights, near, labelled, True))

    def ratio(self, clients: int) -> Tensor:
        """(C, K): how much more frequent each class is among labels than among predictions, in all `clients`."""
        predicted = self.predicted.clamp(min=_RAREST)
        labelled = self.labelled * clients + _PRIOR
        return (labelled / labelled.sum(1, keepdim=True)) / (predicted / predicted.sum(1, keepdim=True))


def mean_prediction(p: Tensor, valid: Tensor) -> Tensor:
    """p (C, n, K), valid (C, n) -> (C, K)."""
    return (p * valid[:, :, None]).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)


def aligned(p: Tensor, ratio: Tensor) -> Tensor:
    """p (C, n, K) times ratio (C, K), again a distribution."""
    raised = p * ratio[:, None]
    return raised / raised.sum(2, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
