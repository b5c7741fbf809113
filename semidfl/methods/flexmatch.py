"""FlexMatch (Zhang et al. 2021, arXiv:2110.08263): a threshold for each class, lower where less has been learnt.

- paper: SemiDFL's `apl` pseudo-labels with warm-up: soft targets, counts of the present predictions, one
  cross-entropy over what qualified; no MixUp.
- tuned: hard labels from a weak view train a strong view; each sample keeps the class it was last sure of, and
  those are counted; thresholds by the convex map; a masked mean over all unlabelled samples drawn.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Cohort
from semidfl.data.augment import Augmentation, Strong
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.batch import PseudoLabels
from semidfl.learn.loss import Loss, cross_entropy_by_source, mean_cross_entropy
from semidfl.learn.pseudo_label import class_thresholds, qualified_counts
from semidfl.methods.baseline import Baseline, report

if TYPE_CHECKING:
    from semidfl.exchange.base import Exchange
    from semidfl.record.log import RoundLog

__all__ = ["FlexMatch", "convex_thresholds", "learnt_counts", "update_learnt"]

NOTHING = -1
"""learnt status of a sample that the classifier was never sure of"""


class FlexMatch(Baseline):
    def pseudo_label(self, t: int, cohort: Cohort, exchange: "Exchange", log: "RoundLog") -> PseudoLabels | None:
        if t < self.setup.config.pseudo.start:
            return None
        return self._own(t, cohort, log) if self.tuned else self._light(t, cohort, log)

    def _light(self, t: int, cohort: Cohort, log: "RoundLog") -> PseudoLabels:
        """The paper's adaptation: sharpened means over K views, Eq. 8 and 9 of SemiDFL on the client's own counts."""
        config, valid = self.setup.config.pseudo, cohort.shards.unlabelled.valid()
        p = self.guess(t, cohort, config.views, config.sharpen)
        counts = qualified_counts(p, valid, config.threshold)
        alone = Neighbourhood.alone(len(cohort.ids), self.setup.device)
        thresholds = class_thresholds(counts, counts, alone, config.threshold, warmup=True)
        confidence, best = p.max(2)
        kept = valid & (confidence > thresholds.gather(1, best))
        report(log, cohort, p.shape[2], best, kept, thresholds)
        return PseudoLabels(p, kept)

    def _own(self, t: int, cohort: Cohort, log: "RoundLog") -> PseudoLabels:
        """The publication's.

        The status is updated before it is counted: its lag of one iteration would be one of a round here.
        """
        tau, classes = self.setup.config.pseudo.threshold, self.setup.space.classes
        valid = cohort.shards.unlabelled.valid()
        confidence, best = self.guess(t, cohort).max(2)
        learnt = update_learnt(self._recall(cohort), confidence, best, valid, tau)
        self._remember(cohort, learnt)
        thresholds = convex_thresholds(learnt_counts(learnt, valid, classes), tau)
        kept = valid & (confidence > thresholds.gather(1, best))
        report(log, cohort, classes, best, kept, thresholds)
        # All are drawn; those under their threshold carry a target of zeros, and so no loss (Eq. 8).
        return PseudoLabels(F.one_hot(best, classes) * kept[:, :, None].float(), valid)

    def _recall(self, cohort: Cohort) -> Tensor:
        """(C, n): what each unlabelled sample was last learnt as."""
        return self._status(cohort).gather(1, _places(cohort)).long()

    def _remember(self, cohort: Cohort, learnt: Tensor) -> None:
        cohort.memory["learnt"] = self._status(cohort).scatter(1, _places(cohort), learnt.to(torch.int16))

    def _status(self, cohort: Cohort) -> Tensor:
        """By place in the pool, so that a client's row is the same in any company; anew where the pool is another."""
        size, known = (len(cohort.ids), len(cohort.shards.images) + 1), cohort.memory.get("learnt")
        if known is not None and known.shape == size:
            return known
        return torch.full(size, NOTHING, dtype=torch.int16, device=self.setup.device)

    def loss(self, t: int) -> Loss:
        return cross_entropy_by_source if self.tuned else mean_cross_entropy

    def strong(self) -> Augmentation | None:
        weak = self.setup.augment
        return self.setup.strong or (Strong(weak.pad, weak.flip) if self.tuned else None)


def _places(cohort: Cohort) -> Tensor:
    """(C, n): each unlabelled sample's place in the pool; one behind its end for cells without a sample."""
    unlabelled = cohort.shards.unlabelled
    return torch.where(unlabelled.valid(), unlabelled.table, len(cohort.shards.images))


def update_learnt(before: Tensor, confidence: Tensor, best: Tensor, valid: Tensor, tau: float) -> Tensor:
    """(C, n): the class of every sample surer than tau; the others stay what they were."""
    return torch.where(valid & (confidence > tau), best, before)


def learnt_counts(learnt: Tensor, valid: Tensor, classes: int) -> Tensor:
    """Eq. 5: sigma(c), how many samples have been learnt as each class; last column: how many have not.

    learnt, valid (C, n) -> (C, K + 1)
    """
    column = torch.where(learnt == NOTHING, classes, learnt)
    counts = torch.zeros(len(learnt), classes + 1, dtype=torch.int64, device=learnt.device)
    return counts.scatter_add_(1, column, valid.long())


def convex_thresholds(counts: Tensor, tau: float) -> Tensor:
    """Eq. 11 and 12: tau M(beta), beta(c) = sigma(c) / max(all sigma, the not yet learnt), M(x) = x / (2 - x).

    counts (C, K + 1) -> (C, K)
    """
    beta = counts[:, :-1].double() / counts.amax(1, keepdim=True).clamp(min=1)
    return (tau * beta / (2 - beta)).float()
