"""MixMatch (Berthelot et al. 2019, arXiv:1905.02249): low-entropy guesses for all unlabelled samples, and MixUp.

- paper: SemiDFL's `vanilla` pseudo-labels with local MixUp: one lambda a batch, one cross-entropy.
- tuned: lambda per sample from Beta(0.75, 0.75); cross-entropy for what was labelled, lambda_U times the squared
  distance of the probabilities for what was guessed, with lambda_U rising. The publication guesses in every
  iteration, for the samples drawn; here the guesses of a round are made at its start, as in all methods.
"""

from typing import TYPE_CHECKING

import torch

from semidfl.cohort import Cohort
from semidfl.learn.batch import PseudoLabels
from semidfl.learn.loss import Loss, entropy_and_distance, mean_cross_entropy
from semidfl.methods.baseline import Baseline, report

if TYPE_CHECKING:
    from semidfl.exchange.base import Exchange
    from semidfl.record.log import RoundLog

__all__ = ["MixMatch", "unlabelled_weight"]

_BETA = 0.75
"""alpha of the publication for CIFAR-10 (section 4.2)"""


class MixMatch(Baseline):
    @property
    def mixup_per_sample(self) -> bool:  # type: ignore[override]
        return self.tuned

    def pseudo_label(self, t: int, cohort: Cohort, exchange: "Exchange", log: "RoundLog") -> PseudoLabels | None:
        """Eq. 6 and 7: the sharpened mean over K views, for every sample; T = 1/2 is the exponent 2."""
        config = self.setup.config.pseudo
        if t < config.start:
            return None
        p = self.guess(t, cohort, config.views, config.sharpen)
        valid = cohort.shards.unlabelled.valid()
        report(log, cohort, p.shape[2], p.argmax(2), valid)
        if not self.tuned:
            return PseudoLabels(p, valid)
        weight = unlabelled_weight(t, self.setup.config.rounds, self.setup.space.classes)
        return PseudoLabels(p, valid, torch.full((len(p),), weight, device=p.device))

    def mixup_beta(self) -> float:
        return _BETA if self.tuned else self.setup.config.mixup.beta

    def loss(self, t: int) -> Loss:
        return entropy_and_distance if self.tuned else mean_cross_entropy


def unlabelled_weight(t: int, rounds: int, classes: int) -> float:
    """lambda_U in round t of 1..rounds: rises in a line to K/2, where L_U is |q - p|^2 / 2 a sample.

    The publication wants it tuned for each data set (section 3.5; 75 for CIFAR-10, 250 for SVHN), and lets it rise
    over the first 16,000 steps: most of a run here, which has rounds x E, 25,000 at most in the paper's settings.
    Its values do not carry over: they weigh two losses in one place, under Adam, which is blind to a loss's scale;
    here most clients have the second loss only, and SGD takes steps as long as the weight. Measured on digits,
    5 % labels, alpha = 100, 60 rounds, accuracy after the last: 75: 0.12, 25: 0.70, 10: 0.89, 5: 0.90, 1: 0.87
    (labels alone: 0.81; 75 with Adam, lr 0.002: 0.08).
    """
    return classes / 2 * min(1.0, t / rounds)
