"""SemiDFL: neighbourhood pseudo-labels, consensus diffusion, consensus MixUp, adaptive aggregation."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Cohort, Learner, Synthetic, each, take
from semidfl.data.shards import Shards, by_length
from semidfl.draws import Draws
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.aggregate import equal_weights, find_rule
from semidfl.learn.align import Shares, aligned, averaging, summed
from semidfl.learn.batch import PseudoLabels, compose
from semidfl.learn.classifier import accuracy, probabilities
from semidfl.learn.descend import Outcome
from semidfl.learn.pseudo_label import Labeller, class_thresholds, qualified_counts, sharpen, teachers
from semidfl.methods.base import Method, learning_rows, update_rows
from semidfl.methods.baseline import report

if TYPE_CHECKING:
    from semidfl.exchange.base import Exchange
    from semidfl.record.log import RoundLog
    from semidfl.setup import Setup

__all__ = ["SemiDFL"]


class SemiDFL(Method):
    def __init__(self, setup: "Setup") -> None:
        super().__init__(setup)
        self._rule = find_rule(setup.config.aggregation.weights)

    @property
    def generates(self) -> bool:  # type: ignore[override]
        return self.setup.config.generator.kind != "none"

    def pseudo_label(self, t: int, cohort: Cohort, exchange: "Exchange", log: "RoundLog") -> PseudoLabels | None:
        """Eq. 5 to 9: predict with own and neighbours' classifiers, then keep what passes the class thresholds."""
        setup, config = self.setup, self.setup.config.pseudo
        if t < config.start:
            return None
        rows = by_length(cohort.shards.unlabelled)
        p = self._predict(t, cohort, exchange, rows)  # Eq. 5 or 7: (C, n, K)
        tilt = self._tilt(t, cohort, exchange, p) if config.align else None
        p = self._sharpened(p, tilt, cohort.shards)  # Eq. 6
        valid = cohort.shards.unlabelled.valid()
        stands_for = cohort.shards.unlabelled.stands_for()  # where only a pool is looked at, counts are of all samples
        counts = (qualified_counts(p, valid, config.threshold) * stands_for).round().long()  # Eq. 8
        if config.kind == "npl":
            shared = exchange.share(t, "counts", {"counts": counts})
            near = Neighbourhood.of(setup.graph, cohort.ids, shared.ids, setup.device)
            seen = shared.tensors["counts"]
        else:
            near, seen = Neighbourhood.alone(len(cohort.ids), setup.device), counts
        thresholds = class_thresholds(counts, seen, near, config.threshold, config.threshold_warmup)  # Eq. 9
        if config.kind == "vanilla":
            thresholds = torch.full_like(thresholds, -1.0)
        elif not config.adaptive:
            thresholds = torch.full_like(thresholds, config.threshold)
        confidence, best = p.max(2)
        kept = valid & (confidence > thresholds.gather(1, best))
        report(log, cohort, p.shape[2], best, kept, thresholds)
        targets = F.one_hot(best, p.shape[2]).float() if config.labels == "hard" else p
        trust = kept.sum(1) / valid.sum(1).clamp(min=1) if config.masked else None
        return PseudoLabels(targets, kept, trust)

    def _predict(self, t: int, cohort: Cohort, exchange: "Exchange", rows: list[int]) -> Tensor:
        """Mean prediction over the views of every unlabelled sample (C, n, K); even where there is none."""
        setup, config, own = self.setup, self.setup.config.pseudo, cohort.classifier.best
        if config.kind == "npl":
            shared = exchange.share(t, "classifiers", {"classifier": own})
            near = Neighbourhood.of(setup.graph, cohort.ids, shared.ids, setup.device)
            seen = shared.tensors["classifier"]
        else:
            near, seen = Neighbourhood.alone(len(cohort.ids), setup.device), own
        n = cohort.shards.unlabelled.table.shape[1]
        chosen = teachers(t, config.views, near, cohort.draws, n if config.npl_draw == "sample" else 0)
        p = torch.full((len(cohort.ids), n, setup.space.classes), 1 / setup.space.classes, device=setup.device)
        if not rows:
            return p
        size, limit = setup.passes(len(rows), n, uneven=True)
        labeller = Labeller(setup.classifier, setup.space, setup.augment, limit)

        def predict(own: Tensor, shards: Shards, draws: Draws, *chosen: Tensor) -> Tensor:
            width = shards.unlabelled.table.shape[1]
            local = [c if c.dim() == 1 else c[:, :width] for c in chosen]
            q = labeller(t, own, seen, local, shards, draws)
            return F.pad(q, (0, 0, 0, n - width), value=1 / setup.space.classes)

        args = [take(x, rows) for x in (own, cohort.shards, cohort.draws, *chosen)]
        p[rows] = each(predict, size, *args)
        return p

    def _sharpened(self, p: Tensor, tilt: Tensor | None, shards: Shards) -> Tensor:
        """Eq. 6, after alignment where that is asked for."""

        def finish(p: Tensor, shards: Shards, *tilt: Tensor) -> Tensor:
            own = trimmed(p, shards)
            q = sharpen(aligned(own, *tilt) if tilt else own, self.setup.config.pseudo.sharpen)
            return F.pad(q, (0, 0, 0, p.shape[1] - own.shape[1]))

        size = self.setup.chunk(self.setup.classifier, len(p))
        return each(finish, size, p, shards, *([] if tilt is None else [tilt]))

    def _tilt(self, t: int, cohort: Cohort, exchange: "Exchange", p: Tensor) -> Tensor:
        """(C, K): how far to raise each class, since labels outnumber predictions as far as gossip knows."""
        setup, held, kept = self.setup, cohort.shards, "shares."
        known = held.labels[held.labelled.table].clamp(min=0)  # cells without a sample may say -1
        labels = (F.one_hot(known, setup.space.classes) * held.labelled.valid()[..., None]).sum(1).float()
        last = {name.removeprefix(kept): x for name, x in cohort.memory.items() if name.startswith(kept)}
        shares = Shares(**last) if last else Shares.start(labels)
        size = setup.chunk(setup.classifier, len(cohort.ids))

        def predictions(q: Tensor, held: Shards, tilt: Tensor) -> Tensor:
            return summed(aligned(trimmed(q, held), tilt), held.unlabelled.valid()) * held.unlabelled.stands_for()

        own: Tensor = each(predictions, size, p, held, shares.tilt)
        seen = exchange.share(t, "shares", shares.public())
        mean = averaging(setup.graph, cohort.ids, seen, setup.device, setup.config.aggregation.robust != "none")
        shares = shares.averaged(seen.tensors, mean).renewed(own, labels)
        tilt: Tensor = each(lambda s: s.raised(setup.clients, setup.config.pseudo.prior), size, shares)
        cohort.memory |= {kept + name: x for name, x in vars(replace(shares, tilt=tilt)).items()}
        return tilt

    def train_generator(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: "RoundLog") -> None:
        """Eq. 11, on labelled and pseudo-labelled samples."""
        if cohort.generator is None:
            return
        setup, g = self.setup, self.setup.config.generator
        steps = g.iterations or self.setup.config.classifier.iterations

        def train(learner: Learner, shards: Shards, draws: Draws, some: PseudoLabels | None) -> Outcome:
            classes = setup.space.classes
            batch = compose(t, "diffuse", steps, g.batch, setup.augment, classes, shards, draws, some, None)
            return setup.generator.train(t, learner, batch, draws)

        if g.all_images:
            pseudo = _of_any_class(pseudo, cohort.shards, setup.space.classes)
        rows = learning_rows(cohort, pseudo)
        if not rows:
            return
        size = setup.chunk(setup.generator, len(rows))
        parts = [take(x, rows) for x in (cohort.generator, cohort.shards, cohort.draws, pseudo)]
        outcome = each(train, size, *parts)
        log["generator_loss"] = update_rows(cohort.generator, rows, outcome)

    def generate(self, t: int, cohort: Cohort, log: "RoundLog") -> None:
        """From round R on, every few rounds: balanced over the classes, for training and for judging."""
        g = self.setup.config.generator
        if cohort.generator is None or t < g.start or (t - g.start) % g.every:
            return
        setup, device = self.setup, self.setup.device
        labels = torch.cat([torch.arange(n, device=device) % setup.space.classes for n in (g.samples, g.validation)])
        # The average lags behind by design; without one, the weights just trained.
        params = cohort.generator.best
        size = setup.chunk(setup.generator, len(cohort.ids))
        limit = setup.limit(setup.generator, size)
        images = each(lambda p, draws: setup.generator.sample(t, p, labels, draws, limit), size, params, cohort.draws)
        (train, check), (asked, truth) = (
            x.split([g.samples, g.validation], dim=1) for x in (images, labels.repeat(len(cohort.ids), 1))
        )
        kept = self._agreed(cohort, train, asked) if g.keep_agreed else torch.ones_like(asked, dtype=torch.bool)
        cohort.synthetic = Synthetic(train, asked, kept, check, truth)
        log["generated_kept"] = kept.sum(1)

    def _agreed(self, cohort: Cohort, images: Tensor, labels: Tensor) -> Tensor:
        """(C, n): where the client's own classifier sees the class that was asked for."""
        setup = self.setup
        size, limit = setup.passes(len(cohort.ids), images.shape[1])
        p = each(
            lambda params, some: probabilities(setup.classifier, setup.space, params, some, limit),
            size,
            cohort.classifier.best,
            images,
        )
        return p.argmax(2) == labels

    def mixup_beta(self) -> float:
        return self.setup.config.mixup.beta

    def judge(self, cohort: Cohort) -> Tensor | None:
        """a_i: accuracy of phi_i^{t+1/2} on the client's own generated samples, once there are some."""
        setup = self.setup
        kind = setup.config.aggregation.weights
        if kind == "constant" or cohort.synthetic is None:
            return None
        if kind == "adatest":
            images, labels = (x.expand(len(cohort.ids), *x.shape[1:]) for x in setup.probe)
        else:
            images, labels = cohort.synthetic.check_images, cohort.synthetic.check_labels
        size, limit = setup.passes(len(cohort.ids), images.shape[1])
        return each(
            lambda p, x, y: accuracy(setup.classifier, setup.space, p, x, y, limit),
            size,
            cohort.classifier.params,
            images,
            labels,
        )

    def weights(self, near: Neighbourhood, accuracy: Tensor | None) -> Tensor:
        """Eq. 12."""
        if accuracy is None:
            return equal_weights(near)
        # Others' accuracy is what they claim: a million would give one of them all the weight.
        return self._rule(accuracy.nan_to_num(0.0).clamp(0, 1), near)


def trimmed(p: Tensor, shards: Shards) -> Tensor:
    """Without the padding that other clients' longer lists ask for: (C, n, …) -> (C, longest here, …)."""
    return p[:, : shards.unlabelled.table.shape[1]]


def _of_any_class(pseudo: PseudoLabels | None, shards: Shards, classes: int) -> PseudoLabels:
    """Every unlabelled sample; the zero vector, which means any class, where no pseudo-label qualified."""
    valid = shards.unlabelled.valid()
    if pseudo is None:
        return PseudoLabels(torch.zeros(*valid.shape, classes, device=valid.device), valid)
    return PseudoLabels(pseudo.targets * pseudo.kept[:, :, None], valid)
