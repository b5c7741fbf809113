"""Neighbourhood pseudo-labelling (Eq. 5 to 9): the neighbours help to label and to choose what counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semidfl.data.augment import Augment
from semidfl.data.shards import Shards, Space
from semidfl.draws import Draws
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.classifier import probabilities
from semidfl.models.stacked import Network

__all__ = ["Labeller", "class_thresholds", "qualified_counts", "sharpen", "teachers"]


def teachers(t: int, views: int, near: Neighbourhood, draws: Draws, per_sample: int = 0) -> list[Tensor]:
    """Who labels each view after the first: a client drawn from G_i, once a round or once for every sample.

    Positions into what was shared: (C,) a view, or (C, n) with `per_sample` = n.
    """
    shape = (per_sample,) if per_sample else ()
    drawn = [draws.below(t, f"teacher {k}", near.count, *shape) for k in range(1, views)]
    return [near.index.gather(1, d.reshape(d.shape[0], -1)).reshape(d.shape) for d in drawn]


@dataclass(frozen=True)
class Labeller:
    """Predicts the unlabelled samples of a chunk of clients from several augmented views."""

    network: Network
    space: Space
    augment: Augment
    limit: int  # samples of a client in one pass

    def __call__(
        self, t: int, own: Tensor, shared: Tensor, chosen: Sequence[Tensor], shards: Shards, draws: Draws
    ) -> Tensor:
        """Eq. 7: mean of the softmaxes over the views. own (C, D), shared (M, D) -> (C, n, K)."""
        total = self._view(t, 0, own, shards, draws)
        for k, teacher in enumerate(chosen, start=1):
            if teacher.dim() == 1:
                total = total + self._view(t, k, shared[teacher], shards, draws)
            else:
                total = total + self._mixed_view(t, k, shared, teacher, shards, draws)
        return total / (len(chosen) + 1)

    def _view(self, t: int, k: int, params: Tensor, shards: Shards, draws: Draws) -> Tensor:
        images = self.augment(shards.images, shards.unlabelled.table, draws, t, f"view {k}")
        return probabilities(self.network, self.space, params, images, self.limit)

    def _mixed_view(self, t: int, k: int, shared: Tensor, teacher: Tensor, shards: Shards, draws: Draws) -> Tensor:
        """Every sample by a classifier of its own draw: all that were drawn predict, each where it was."""
        chosen = torch.zeros(*teacher.shape, self.space.classes, device=teacher.device)
        for j in teacher.unique().tolist():
            view = self._view(t, k, shared[j].expand(teacher.shape[0], -1), shards, draws)
            chosen = torch.where((teacher == j)[:, :, None], view, chosen)
        return chosen


def sharpen(p: Tensor, exponent: float) -> Tensor:
    """Eq. 6: p^Z / sum p^Z."""
    powered = (p / p.amax(-1, keepdim=True)) ** exponent  # the largest is 1: nothing underflows to 0 / 0
    return powered / powered.sum(-1, keepdim=True)


def qualified_counts(p: Tensor, valid: Tensor, tau: float) -> Tensor:
    """Eq. 8: sigma_i^c, how many samples of each class are surer than tau; last column: how many are not.

    p (C, n, K), valid (C, n) -> (C, K + 1)
    """
    confidence, best = p.max(2)
    classes = p.shape[2]
    column = torch.where(confidence > tau, best, classes)
    counts = torch.zeros(p.shape[0], classes + 1, dtype=torch.int64, device=p.device)
    return counts.scatter_add_(1, column, valid.long())


def class_thresholds(own: Tensor, shared: Tensor, near: Neighbourhood, tau: float, warmup: bool) -> Tensor:
    """Eq. 9: tau_i^c = tau sigma_i^c / max over j in G_i and c of sigma_j^c; infinite where that is 0 / 0.

    own (C, K + 1), shared (M, K + 1) from `qualified_counts` -> (C, K). `warmup` counts the samples under
    tau as one more class in the maximum, which keeps the thresholds low while most are unsure.
    """
    seen = shared if warmup else shared[:, :-1]
    largest = torch.where(near.mask, seen.amax(1)[near.index], 0).amax(1, keepdim=True)
    return torch.where(largest > 0, tau * own[:, :-1].double() / largest.clamp(min=1), torch.inf).float()
