"""CBAFed (Li, Li and Wang 2023, CVPR): fixed pseudo-labels with class-balanced thresholds, residual weights.

At the start of a round, one weak view of every unlabelled sample is labelled, hard, and the labels are fixed.
A class's threshold rises with its share of the training data; a sample that fails may take its second class, if
that is a rare one. Every 5 rounds the weights of 5 rounds ago are mixed in.

Where the publication and PAPER.md leave something open:
- The second class needs no probability of its own, as in the authors' code. It could not: a second probability is
  at most 1/2, and with ten classes no threshold is below 0.85 - sqrt(1/10) = 0.53, so the rule would be empty.
- Shares are of the labels and of the last round's pseudo-labels, each sample once, as in the authors' code, times
  K / 10: the constants are made for ten classes. Where nothing is labelled yet, no class is rare.
- The publication's server adds up the counts of all clients. Here a client adds up those of its neighbourhood
  (tuned), or has its own only (paper: nothing but models is exchanged).
- The publication begins after supervised training; `pseudo.start` is the first round after that, and the first
  old weights are those before it.

T_lower is 0.07 and the residual 0.8 new + 0.2 old in `paper`, 0.03 and 0.5 + 0.5 in `tuned`.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Cohort, each
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.batch import PseudoLabels
from semidfl.methods.baseline import Baseline, report

if TYPE_CHECKING:
    from semidfl.exchange.base import Exchange
    from semidfl.record.log import RoundLog

__all__ = ["CBAFed", "balanced_thresholds", "choose", "class_counts", "scaled_shares"]

_BASE, _UPPER = 0.85, 0.95
_EVERY = 5


class CBAFed(Baseline):
    def pseudo_label(self, t: int, cohort: Cohort, exchange: "Exchange", log: "RoundLog") -> PseudoLabels | None:
        if t < self.setup.config.pseudo.start:
            return None
        cohort.memory.setdefault("residual", cohort.classifier.params.clone())
        classes, valid = self.setup.space.classes, cohort.shards.unlabelled.valid()
        counts = self._counts(t, cohort, exchange)
        share = scaled_shares(counts)
        thresholds = each(balanced_thresholds, self.setup.chunk(self.setup.classifier, len(share)), share)
        rare = (share < (0.03 if self.tuned else 0.07)) & (counts.sum(1, keepdim=True) > 0)
        label, kept = choose(self.guess(t, cohort), thresholds, rare)
        kept &= valid
        seen = class_counts(label, kept, classes)
        cohort.memory["pseudo_counts"] = (seen * cohort.shards.unlabelled.stands_for()).round().long()
        report(log, cohort, classes, label, kept, thresholds)
        return PseudoLabels(F.one_hot(label, classes).float(), kept)

    def _counts(self, t: int, cohort: Cohort, exchange: "Exchange") -> Tensor:
        """(C, K): labels and last pseudo-labels of each class, one's own or all of the neighbourhood's."""
        setup, held = self.setup, cohort.shards.labelled
        own = class_counts(cohort.shards.labels[held.table], held.valid(), setup.space.classes)
        own = own + cohort.memory.get("pseudo_counts", torch.zeros_like(own))
        if not self.tuned:
            return own
        shared = exchange.share(t, "counts", {"counts": own})
        near = Neighbourhood.of(setup.graph, cohort.ids, shared.ids, setup.device)
        return (shared.tensors["counts"][near.index] * near.mask[:, :, None]).sum(1)

    def after_mixing(self, t: int, cohort: Cohort) -> None:
        """The residual connection: what is mixed now is the old of the next time."""
        since = t - self.setup.config.pseudo.start + 1
        if since > 0 and since % _EVERY == 0:
            new = 0.5 if self.tuned else 0.8
            cohort.classifier.params = new * cohort.classifier.params + (1 - new) * cohort.memory["residual"]
            cohort.memory["residual"] = cohort.classifier.params.clone()


def class_counts(label: Tensor, counted: Tensor, classes: int) -> Tensor:
    """How many of the counted cells hold each class. label, counted (C, n) -> (C, K)."""
    counts = torch.zeros(len(label), classes, dtype=torch.int64, device=label.device)
    return counts.scatter_add_(1, torch.where(counted, label, 0), counted.long())


def scaled_shares(counts: Tensor) -> Tensor:
    """(C, K): the share of each class, 1/10 for all when balanced; zeros where nothing is counted."""
    return counts.double() / counts.sum(1, keepdim=True).clamp(min=1) * (counts.shape[1] / 10)


def balanced_thresholds(share: Tensor) -> Tensor:
    """t_c = share_c + T_base - std(share), at most 0.95: the better a class is known, the stricter. (C, K)."""
    return (share + _BASE - share.std(1, keepdim=True)).clamp(max=_UPPER).float()


def choose(p: Tensor, thresholds: Tensor, rare: Tensor) -> tuple[Tensor, Tensor]:
    """The label of each sample and whether it has one, (C, n) both: its first class if surer than that class's
    threshold, else its own second class if that is rare.

    p (C, n, K), thresholds (C, K), rare (C, K) bool
    """
    top = p.topk(2, dim=2)
    first, second = top.indices.unbind(2)
    sure = top.values[:, :, 0] > thresholds.gather(1, first)
    return torch.where(sure, first, second), sure | rare.gather(1, second)
