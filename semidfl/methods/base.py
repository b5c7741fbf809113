"""What clients do in a round. A method overrides the steps in which it differs; this base trains on labels only.

The steps are those of Algorithm 1, called in order by `rounds.one_round`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semidfl.cohort import Cohort, Learner, Synthetic, each, take
from semidfl.data.augment import Augmentation
from semidfl.data.shards import Rows, Shards
from semidfl.draws import Draws
from semidfl.learn.aggregate import equal_weights
from semidfl.learn.batch import PseudoLabels, compose
from semidfl.learn.classifier import train_classifier
from semidfl.learn.descend import Outcome
from semidfl.learn.loss import Loss, mean_cross_entropy, mean_cross_entropy_times_sources
from semidfl.learn.optimise import cosine
from semidfl.learn.turn import turn

if TYPE_CHECKING:
    from semidfl.exchange.base import Exchange, Neighbourhood
    from semidfl.record.log import RoundLog
    from semidfl.setup import Setup

__all__ = ["Method", "learning_rows", "update_rows"]


class Method:
    """Labels only: a client without labels takes what its neighbours have learnt and adds nothing (DFL-LB)."""

    all_labelled = False
    """whether every client gets its data with labels"""
    generates = False
    """whether clients train a generator"""
    mixup_per_sample = False
    """whether MixUp's lambda is drawn for every sample, or once a batch"""

    def __init__(self, setup: "Setup") -> None:
        self.setup = setup

    def pseudo_label(self, t: int, cohort: Cohort, exchange: "Exchange", log: "RoundLog") -> PseudoLabels | None:
        """P_i: labels for unlabelled samples."""
        return None

    def train_generator(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: "RoundLog") -> None:
        """psi_i^{t+1/2}."""

    def generate(self, t: int, cohort: Cohort, log: "RoundLog") -> None:
        """D_i."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: "RoundLog") -> None:
        """phi_i^{t+1/2}, by MixUp of all that the client has."""
        setup, config = self.setup, self.setup.config
        c, beta, loss, strong = config.classifier, self.mixup_beta(), self.loss(t), self.strong()
        doubled = config.pseudo.doubled
        scale = cosine(t, config.rounds) if c.schedule == "cosine" else 1.0

        def train(
            learner: Learner, shards: Shards, draws: Draws, some: PseudoLabels | None, made: Synthetic | None
        ) -> Outcome:
            classes = setup.space.classes
            batch = compose(
                t, "classify", c.iterations, c.batch, setup.augment, classes, shards, draws, some, made, strong, doubled
            )
            if config.generator.fill:
                batch = batch.filled_in()
            return train_classifier(
                t,
                setup.classifier,
                setup.optimiser,
                scale,
                beta,
                c.logit_adjustment,
                setup.space,
                learner,
                batch,
                draws,
                self.mixup_per_sample,
                loss,
                turn(t, c.iterations, c.batch, setup.augment, shards, draws) if c.turns else None,
                c.turns,
            )

        everyone = list(range(len(cohort.ids)))
        rows = everyone if c.turns or cohort.synthetic is not None else learning_rows(cohort, pseudo)
        if not rows:
            log["loss"] = torch.zeros(len(cohort.ids))
            return
        parts = [take(x, rows) for x in (cohort.classifier, cohort.shards, cohort.draws, pseudo, cohort.synthetic)]
        size = setup.chunk(setup.classifier, len(rows))
        log["loss"] = update_rows(cohort.classifier, rows, each(train, size, *parts))

    def mixup_beta(self) -> float:
        """The base trains on samples as they are."""
        return 0.0

    def loss(self, t: int) -> Loss:
        """What the classifier's training makes small: one cross-entropy over all that the client has."""
        each_counts = self.setup.config.classifier.loss == "sources"
        return mean_cross_entropy_times_sources if each_counts else mean_cross_entropy

    def strong(self) -> Augmentation | None:
        """How pseudo-labelled samples are augmented for training; None: as all others."""
        return self.setup.strong

    def judge(self, cohort: Cohort) -> Tensor | None:
        """a_i (C,): how good each classifier is, or nothing while that is not known."""
        return None

    def claims(self, cohort: Cohort, pseudo: PseudoLabels | None) -> dict[str, Tensor]:
        """What each client says of itself to those who mix its models, by which they weigh them."""
        accuracy, rule = self.judge(cohort), self.setup.config.aggregation
        found = {} if accuracy is None else {"accuracy": accuracy}
        if rule.idle < 1 and rule.robust == "none":  # a liar could claim nine times an honest client's weight
            found["taught"] = taught(cohort, pseudo)
        return found

    def weights(self, near: "Neighbourhood", accuracy: Tensor | None) -> Tensor:
        """w_ij (C, G); accuracy (M,) of all that answered."""
        return equal_weights(near)

    def after_mixing(self, t: int, cohort: Cohort) -> None:
        """A last word on the mixed weights."""


def learning_rows(cohort: Cohort, pseudo: PseudoLabels | None) -> list[int]:
    """The clients that have labelled or pseudo-labelled samples, as far as the host knows."""
    unlabelled: Sequence[int] = cohort.shards.unlabelled.held if pseudo is not None else [0] * len(cohort.ids)
    return [i for i, (n, m) in enumerate(zip(cohort.shards.labelled.held, unlabelled, strict=True)) if n or m]


def taught(cohort: Cohort, pseudo: PseudoLabels | None) -> Tensor:
    """(C,): 1 for labels, and the share of the unlabelled samples looked at that have got one."""
    known = (cohort.shards.labelled.count > 0).double()
    if pseudo is None:
        return known
    looked_at = cohort.shards.unlabelled.count
    given = (pseudo.kept & (pseudo.targets.sum(2) > 0)).sum(1)  # a target of zeros teaches nothing
    return known + given.double() / looked_at.clamp(min=1)


def update_rows(learner: Learner, rows: Rows, outcome: Outcome) -> Tensor:
    """Puts what some clients have learnt in its place; returns the losses of all, 0 for the others."""
    params, state, loss = outcome
    learner.params = learner.params.clone()
    learner.params[rows] = params
    for name, x in state.items():
        learner.optimiser[name] = learner.optimiser[name].clone()
        learner.optimiser[name][rows] = x
    losses = torch.zeros(learner.params.shape[0], device=params.device)
    losses[rows] = loss
    return losses
