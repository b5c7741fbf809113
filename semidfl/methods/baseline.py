"""What the semi-supervised baselines share: clients label their own data with their own classifier.

`variant = "paper"` is the SemiDFL paper's light adaptation (weak augmentation, one cross-entropy), "tuned" is
faithful to the method's own publication. In both, labels are given once at the start of a round, by the classifier
mixed in the round before, and hold for its E iterations: rounds, not iterations, are the steps of all methods here.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Cohort, each, take
from semidfl.data.shards import Shards, by_length
from semidfl.draws import Draws
from semidfl.learn.pseudo_label import Labeller, sharpen
from semidfl.methods.base import Method

if TYPE_CHECKING:
    from semidfl.record.log import RoundLog

__all__ = ["Baseline", "report"]


class Baseline(Method):
    @property
    def tuned(self) -> bool:
        """Whether to follow the method's own publication."""
        return self.setup.config.variant == "tuned"

    def guess(self, t: int, cohort: Cohort, views: int = 1, exponent: float = 1.0) -> Tensor:
        """Mean prediction over weak views of every unlabelled sample, sharpened (C, n, K); zeros where none."""
        setup, own = self.setup, cohort.classifier.best
        n = cohort.shards.unlabelled.table.shape[1]
        p = torch.zeros(len(cohort.ids), n, setup.space.classes, device=setup.device)
        rows = by_length(cohort.shards.unlabelled)
        if not rows:
            return p
        size, limit = setup.passes(len(rows), n, uneven=True)
        labeller = Labeller(setup.classifier, setup.space, setup.augment, limit)

        def predict(own: Tensor, shards: Shards, draws: Draws) -> Tensor:
            oneself = torch.arange(len(own), device=own.device)
            q = sharpen(labeller(t, own, own, [oneself] * (views - 1), shards, draws), exponent)
            return F.pad(q, (0, 0, 0, n - q.shape[1]))

        p[rows] = each(predict, size, *(take(x, rows) for x in (own, cohort.shards, cohort.draws)))
        return p


def report(
    log: "RoundLog", cohort: Cohort, classes: int, label: Tensor, kept: Tensor, thresholds: Tensor | None = None
) -> None:
    """How many samples (C, n) have got a pseudo-label, and how many a right one, as far as the truth is known."""
    truth = cohort.shards.labels[cohort.shards.unlabelled.table]
    right, wrong = kept & (label == truth), kept & (label != truth) & (truth >= 0)
    log["pseudo_labels"] = kept.sum(1)
    log["pseudo_precision"] = right.sum(1) / (right | wrong).sum(1)
    for name, some in (("given", kept), ("right", right), ("wrong", wrong)):  # (C, K): by class
        counts = torch.zeros(len(label), classes, dtype=torch.int64, device=label.device)
        log[f"pseudo_{name}"] = counts.scatter_add_(1, label, some.long())
    if thresholds is not None:
        log["thresholds"] = thresholds
