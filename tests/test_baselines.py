"""MixMatch, FlexMatch and CBAFed, each against a slow transcription of its own publication, and as whole runs."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, random
from hypothesis import given, settings
from hypothesis import strategies as st
from small import tiny
from test_rounds import in_blocks, rows_of
from torch import Tensor

from semidfl.cohort import Cohort, take
from semidfl.config import Config
from semidfl.data.augment import Strong
from semidfl.data.sources import load
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.learn.batch import PSEUDO, Batch, PseudoLabels, compose
from semidfl.learn.loss import cross_entropy_by_source, entropy_and_distance
from semidfl.learn.mixup import mixup, partners
from semidfl.methods.base import Method
from semidfl.methods.cbafed import balanced_thresholds, choose, scaled_shares
from semidfl.methods.flexmatch import NOTHING, FlexMatch, convex_thresholds, learnt_counts, update_learnt
from semidfl.methods.mixmatch import unlabelled_weight
from semidfl.record import checkpoint
from semidfl.record.log import RoundLog

METHODS = ["mixmatch", "flexmatch", "cbafed"]
VARIANTS = ["paper", "tuned"]
CLASSES = 10
LABELLED, MIXED, UNLABELLED = 0, 1, 2  # of the four clients LMUU on a ring
seeds = st.integers(0, 2**32 - 1)


def small(method: str, variant: str = "tuned", **overrides: object) -> Config:
    short = {"classifier__iterations": 4, "classifier__batch": 6, "rounds": 3, "data__ratio": 20}
    return tiny(method=method, variant=variant, **(short | overrides))


def prepared(method: str, variant: str = "tuned", **overrides: object) -> tuple[Method, Cohort]:
    return prepare(small(method, variant, **overrides), load("digits"))


def opinions(cohort: Cohort, t: int, sharp: float = 3.0) -> Tensor:
    """Predictions (C, n, K) that depend on nothing but the round: some sure, some not."""
    n = cohort.shards.unlabelled.table.shape[1]
    return (sharp * random(100 + t, len(cohort.ids), n, CLASSES)).softmax(2)


def label(method: Method, cohort: Cohort, t: int, p: Tensor) -> tuple[PseudoLabels, dict[str, Any]]:
    """What a method makes of the predictions p, and what it logs."""
    method.guess = lambda *_: p  # type: ignore[attr-defined]
    log = RoundLog(t, torch.device("cpu"))
    pseudo = method.pseudo_label(t, cohort, MemoryExchange(cohort.ids), log)
    assert pseudo is not None
    return pseudo, log.figures


def of(cohort: Cohort, client: int, x: Tensor) -> list[Any]:
    """The rows of a client's unlabelled samples, without padding."""
    return x[client, : cohort.shards.unlabelled.held[client]].tolist()


def one_hot(c: int) -> list[float]:
    return [float(k == c) for k in range(CLASSES)]


def best(p: list[float]) -> int:
    return p.index(max(p))


# --- losses, with lists and loops -------------------------------------------------------------------------------------


def softmax(logits: list[float]) -> list[float]:
    e = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(e) for x in e]


def plain_entropy(logits: list[float], target: list[float]) -> float:
    return -sum(y * math.log(p) for p, y in zip(softmax(logits), target, strict=True))


def plain_distance(logits: list[float], target: list[float]) -> float:
    """MixMatch, Eq. 4: the squared distance of the probabilities, over the number of classes L."""
    return sum((p - y) ** 2 for p, y in zip(softmax(logits), target, strict=True)) / len(logits)


def mean(x: list[float]) -> float:
    return sum(x) / len(x) if x else 0.0


def batch_of(valid: list[list[bool]], size: int) -> Batch:
    """Only what a loss looks at: a block of `size` slots for each of labelled, pseudo-labelled, generated."""
    has = torch.tensor(valid).repeat_interleave(size, dim=1)
    none = torch.zeros(0)
    return Batch(none, none, has, torch.ones(has.shape), torch.arange(3 * size), 3 * size)


@given(seeds, st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=30)
def test_losses_are_means_of_their_parts(seed: int, valid: list[list[bool]]) -> None:
    size, clients = 4, len(valid)
    logits, targets = random(seed, clients, 12, 5) * 3, random(seed + 1, clients, 12, 5).softmax(2)
    targets[:, 5] = 0.0  # a pseudo-labelled sample that did not qualify
    batch = batch_of(valid, size)
    entropy = cross_entropy_by_source(logits, targets, batch)
    trust = torch.where(batch.source == PSEUDO, 7.5, 1.0).expand_as(batch.trust)  # lambda_U
    both = entropy_and_distance(logits, targets, replace(batch, trust=trust))
    for c, has in enumerate(valid):
        rows = list(zip(logits[c].tolist(), targets[c].tolist(), strict=True))
        parts = [rows[size * source : size * source + size] if has[source] else [] for source in range(3)]
        h = [mean([plain_entropy(z, y) for z, y in part]) for part in parts]
        assert entropy[c].item() == pytest.approx(sum(h), rel=1e-5)
        distance = mean([plain_distance(z, y) for z, y in parts[1]])
        assert both[c].item() == pytest.approx(h[0] + 7.5 * distance + h[2], rel=1e-5)


def test_lambda_may_be_a_samples_own() -> None:
    images, targets = random(1, 2, 3, 4, 1, 5, 5), random(2, 2, 3, 4, 10).softmax(3)
    share = random(3, 2, 3, 4).sigmoid()
    partner = torch.tensor([1, 2, 3, 0]).expand(2, 3, 4)
    x, y = mixup(images, targets, share, partner)
    for c in range(2):
        for e in range(3):
            for m in range(4):
                lam = max(share[c, e, m].item(), 1 - share[c, e, m].item())
                assert_close(x[c, e, m], lam * images[c, e, m] + (1 - lam) * images[c, e, partner[c, e, m]])
                assert_close(y[c, e, m], lam * targets[c, e, m] + (1 - lam) * targets[c, e, partner[c, e, m]])


# --- a whole training step against the publication's objective --------------------------------------------------------


def loss_of(method: Method, cohort: Cohort, t: int, pseudo: PseudoLabels) -> list[float]:
    """The method's own: with a learning rate of 0 the weights stay, and the loss is the mean over the iterations."""
    log = RoundLog(t, torch.device("cpu"))
    method.train_classifier(t, cohort, pseudo, log)
    return log.figures["loss"].tolist()


def drawn(
    method: Method, cohort: Cohort, t: int, client: int, pseudo: PseudoLabels, strong: Strong | None
) -> tuple[Tensor, Tensor, Batch]:
    """Images (E, S, …) and targets (E, S, K) of a client's iterations, before MixUp."""
    setup, c = method.setup, method.setup.config.classifier
    shards, draws, some = (take(x, [client]) for x in (cohort.shards, cohort.draws, pseudo))
    batch = compose(t, "classify", c.iterations, c.batch, setup.augment, CLASSES, shards, draws, some, None, strong)
    return setup.space.normalise(batch.images)[0], batch.targets[0], batch


def parts_of(
    method: Method, cohort: Cohort, client: int, batch: Batch, x: Tensor, y: Tensor
) -> list[list[list[tuple[list[float], list[float]]]]]:
    """For every iteration: (logits, target) of the labelled samples, and of the unlabelled ones."""
    size, held = method.setup.config.classifier.batch, cohort.shards.labelled.held[client]
    steps = []
    for e in range(len(x)):
        logits = method.setup.classifier(cohort.classifier.params[client : client + 1], x[e : e + 1])[0]
        rows = list(zip(logits.tolist(), y[e].tolist(), strict=True))
        steps.append([rows[:size], rows[size:]] if held else [[], rows])
    return steps


def shaken(method: str, variant: str = "tuned", **overrides: object) -> tuple[Method, Cohort]:
    """With weights that differ by client and do not move."""
    found, cohort = prepared(method, variant, classifier__lr=0.0, **overrides)
    cohort.classifier.params = cohort.classifier.params + 0.1 * random(5, *cohort.classifier.params.shape)
    return found, cohort


@pytest.mark.parametrize("client", [LABELLED, MIXED, UNLABELLED])
def test_mixmatch_trains_on_entropy_of_labels_and_distance_of_guesses(client: int) -> None:
    """Berthelot et al. 2019, section 3: shuffle, mix with lambda' = max(lambda, 1 - lambda), then Eq. 3 to 5."""
    method, cohort = shaken("mixmatch", rounds=8)
    t = 6
    pseudo, _ = label(method, cohort, t, opinions(cohort, t))
    x, y, batch = drawn(method, cohort, t, client, pseudo, None)
    draws = take(cohort.draws, [client])
    lam = batch.chosen(draws.beta(t, "lambda", 0.75, 4, 18))[0]
    partner = partners(batch.chosen(draws.bits(t, "partner", 4, 18)), batch.valid)[0]
    mixed_x, mixed_y = torch.zeros_like(x), torch.zeros_like(y)
    for e in range(x.shape[0]):
        for m in range(x.shape[1]):
            share, n = max(float(lam[e, m]), 1 - float(lam[e, m])), int(partner[e, m])
            mixed_x[e, m] = share * x[e, m] + (1 - share) * x[e, n]
            mixed_y[e, m] = share * y[e, m] + (1 - share) * y[e, n]
    weight = 5 * 6 / 8  # K/2, at 6 of 8 rounds
    expected = [
        mean([plain_entropy(*s) for s in known]) + weight * mean([plain_distance(*s) for s in guessed])
        for known, guessed in parts_of(method, cohort, client, batch, mixed_x, mixed_y)
    ]
    assert loss_of(method, cohort, t, pseudo)[client] == pytest.approx(mean(expected), rel=1e-4)
    assert lam.unique().numel() > lam.numel() // 2


@pytest.mark.parametrize("client", [LABELLED, MIXED, UNLABELLED])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_flexmatch_trains_strong_views_on_hard_labels_of_what_qualified(client: int, strength: float) -> None:
    """Zhang et al. 2021, Eq. 8: the mean is over all unlabelled samples of the batch."""
    method, cohort = shaken("flexmatch", pseudo__threshold=0.6, augment__strong=strength)
    label(method, cohort, 1, opinions(cohort, 1, sharp=20.0))  # once all is learnt, the thresholds are high
    pseudo, _ = label(method, cohort, 2, opinions(cohort, 2))
    x, y, batch = drawn(method, cohort, 2, client, pseudo, Strong(1, False, strength or 1.0))
    expected, used = [], 0
    for known, guessed in parts_of(method, cohort, client, batch, x, y):
        sure = [plain_entropy(z, one_hot(best(q))) for z, q in guessed if max(q) > 0]
        used += len(sure)
        expected.append(mean([plain_entropy(*s) for s in known]) + sum(sure) / 6)
    assert (0 < used < 24) == (client != LABELLED)  # some qualify, not all
    assert loss_of(method, cohort, 2, pseudo)[client] == pytest.approx(mean(expected), rel=1e-4)


@pytest.mark.parametrize("client", [LABELLED, MIXED, UNLABELLED])
@pytest.mark.parametrize(("method", "variant"), [("flexmatch", "paper"), ("cbafed", "paper"), ("cbafed", "tuned")])
def test_the_others_train_weak_views_by_one_cross_entropy(method: str, variant: str, client: int) -> None:
    found, cohort = shaken(method, variant)
    pseudo, _ = label(found, cohort, 1, opinions(cohort, 1))
    x, y, batch = drawn(found, cohort, 1, client, pseudo, None)
    steps = parts_of(found, cohort, client, batch, x, y)
    expected = [mean([plain_entropy(*s) for s in known + guessed]) for known, guessed in steps]
    assert loss_of(found, cohort, 1, pseudo)[client] == pytest.approx(mean(expected), rel=1e-4)


# --- MixMatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixmatch_guesses_all_unlabelled_samples(variant: str) -> None:
    method, cohort = prepared("mixmatch", variant)
    p = opinions(cohort, 1)
    pseudo, figures = label(method, cohort, 1, p)
    assert figures["pseudo_labels"].tolist() == list(cohort.shards.unlabelled.held)
    for client in range(4):
        assert of(cohort, client, pseudo.targets) == of(cohort, client, p)
        assert all(of(cohort, client, pseudo.kept))


def test_mixmatch_guesses_are_sharpened_means_over_two_views() -> None:
    """Section 3.2 of the publication: K = 2, T = 1/2."""
    method, cohort = shaken("mixmatch")
    pseudo = method.pseudo_label(1, cohort, MemoryExchange(cohort.ids), RoundLog(1, torch.device("cpu")))
    assert pseudo is not None
    setup, shards = method.setup, cohort.shards
    for client in (MIXED, UNLABELLED):
        total = torch.zeros(1)
        for view in range(2):
            index, draws = shards.unlabelled.table[client : client + 1], take(cohort.draws, [client])
            images = setup.augment(shards.images, index, draws, 1, f"view {view}")
            params = cohort.classifier.params[client : client + 1]
            total = total + setup.classifier(params, setup.space.normalise(images)).softmax(2)
        held = shards.unlabelled.held[client]
        for n, q in enumerate((total / 2)[0, :held].tolist()):
            expected = [x**2 / sum(z**2 for z in q) for x in q]
            assert pseudo.targets[client, n].tolist() == pytest.approx(expected, abs=1e-5)


def test_mixmatch_weighs_guesses_more_from_round_to_round() -> None:
    assert [unlabelled_weight(t, 4, 10) for t in (1, 2, 3, 4, 5)] == [1.25, 2.5, 3.75, 5.0, 5.0]


def final(config: Config) -> dict[str, Tensor]:
    method, cohort = prepare(config, load("digits"))
    for _ in train(config, method, cohort, MemoryExchange(cohort.ids)):
        pass
    return cohort.state()


@pytest.mark.parametrize(
    ("method", "ablation"),
    [
        ("mixmatch", {"pseudo__kind": "vanilla"}),
        ("flexmatch", {"pseudo__kind": "apl", "pseudo__threshold_warmup": True, "mixup__beta": 0.0}),
    ],
)
def test_the_papers_adaptations_are_ablations_of_semidfl(method: str, ablation: dict[str, Any]) -> None:
    ours = final(small(method, "paper"))
    theirs = final(small("semidfl", generator__kind="none", aggregation__weights="constant", **ablation))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- FlexMatch --------------------------------------------------------------------------------------------------------


def plain_flexmatch(counts: Counter[int], tau: float) -> list[float]:
    """Eq. 11 and 12: counts of the classes, and under the key -1 of what is not learnt yet."""
    largest = max([*counts.values(), 1])
    betas = [counts[c] / largest for c in range(CLASSES)]
    return [beta / (2 - beta) * tau for beta in betas]


@given(seeds, st.sampled_from([0.3, 0.6, 0.95]))
@settings(max_examples=30)
def test_flexmatch_thresholds(seed: int, tau: float) -> None:
    valid = random(seed, 3, 40) > -1
    before = random(seed + 1, 3, 40).mul(6).long().clamp(-1, CLASSES - 1)
    confidence, guess = (3 * random(seed + 2, 3, 40, CLASSES)).softmax(2).max(2)
    learnt = update_learnt(before, confidence, guess, valid, tau)
    thresholds = convex_thresholds(learnt_counts(learnt, valid, CLASSES), tau)
    for c in range(3):
        status = before[c].tolist()
        for n in range(40):
            if valid[c, n] and confidence[c, n] > tau:
                status[n] = int(guess[c, n])
        assert learnt[c].tolist() == status
        counts = Counter(s for s, there in zip(status, valid[c].tolist(), strict=True) if there)
        assert thresholds[c].tolist() == pytest.approx(plain_flexmatch(counts, tau), rel=1e-6)


def test_flexmatch_remembers_what_it_does_not_look_at() -> None:
    method, cohort = flexmatch_with_a_pool()
    whole = cohort.shards.unlabelled
    status = method._status(cohort).clone()
    status[:, :-1] = 7
    cohort.memory["learnt"] = status
    with cohort.looking_at(1, 5):
        seen = cohort.shards.unlabelled
        method._remember(cohort, torch.full_like(seen.table, 3))
    for client, n in enumerate(whole.held):
        looked = set(seen.table[client, : seen.held[client]].tolist())
        for place in whole.table[client, :n].tolist():
            assert cohort.memory["learnt"][client, place] == (3 if place in looked else 7)


def test_flexmatch_starts_anew_where_the_data_have_grown() -> None:
    method, cohort = flexmatch_with_a_pool()
    method._remember(cohort, torch.full_like(cohort.shards.unlabelled.table, 3))
    cohort.memory["learnt"] = cohort.memory["learnt"][:, :-7]  # as of seven samples fewer
    assert (method._recall(cohort) == NOTHING).all()


def flexmatch_with_a_pool() -> tuple[FlexMatch, Cohort]:
    method, cohort = prepare(tiny(method="flexmatch", variant="tuned", pseudo__pool=5), load("digits"))
    assert isinstance(method, FlexMatch)
    return method, cohort


def test_flexmatch_remembers_what_was_learnt() -> None:
    """Three rounds of the publication's Algorithm 1, sample by sample; the second and third are less sure."""
    tau = 0.6
    method, cohort = prepared("flexmatch", pseudo__threshold=tau)
    status = [[-1] * n for n in cohort.shards.unlabelled.held]
    forgotten = False
    for t in (1, 2, 3):
        p = opinions(cohort, t, sharp=4 - t)
        pseudo, figures = label(method, cohort, t, p)
        for client, learnt in enumerate(status):
            samples = of(cohort, client, p)
            for n, q in enumerate(samples):
                forgotten |= learnt[n] != -1 and max(q) <= tau
                learnt[n] = best(q) if max(q) > tau else learnt[n]
            limits = plain_flexmatch(Counter(learnt), tau)
            assert figures["thresholds"][client].tolist() == pytest.approx(limits, rel=1e-6)
            targets = [one_hot(best(q)) if max(q) > limits[best(q)] else [0.0] * CLASSES for q in samples]
            assert of(cohort, client, pseudo.targets) == targets
            assert all(of(cohort, client, pseudo.kept))
            assert figures["pseudo_labels"][client].item() == sum(map(sum, targets))
    assert forgotten  # there was something to forget


def test_flexmatch_paper_counts_afresh_in_every_round() -> None:
    method, cohort = prepared("flexmatch", "paper", pseudo__threshold=0.6)
    for t in (1, 2):
        p = opinions(cohort, t)
        pseudo, figures = label(method, cohort, t, p)
        for client in (MIXED, UNLABELLED):
            samples = of(cohort, client, p)
            sigma = Counter(best(q) if max(q) > 0.6 else -1 for q in samples)
            limits = [0.6 * sigma[c] / max(sigma.values()) for c in range(CLASSES)]
            assert figures["thresholds"][client].tolist() == pytest.approx(limits, rel=1e-6)
            assert of(cohort, client, pseudo.kept) == [max(q) > limits[best(q)] for q in samples]
            assert of(cohort, client, pseudo.targets) == samples  # soft
    assert not cohort.memory


# --- CBAFed -----------------------------------------------------------------------------------------------------------


def plain_shares(counts: Counter[int], classes: int = CLASSES) -> list[float]:
    total = sum(counts.values())
    return [counts[c] / total * classes / 10 if total else 0.0 for c in range(classes)]


def plain_cbafed(share: list[float]) -> list[float]:
    return [min(s + 0.85 - statistics.stdev(share), 0.95) for s in share]


def plain_choice(q: list[float], limits: list[float], rare: list[bool]) -> int | None:
    first, second = sorted(range(len(q)), key=lambda c: -q[c])[:2]
    if q[first] > limits[first]:
        return first
    return second if rare[second] else None


counts_of_classes = st.lists(st.integers(0, 30), min_size=4, max_size=12)


@given(counts_of_classes)
def test_cbafed_thresholds(counts: list[int]) -> None:
    share = scaled_shares(torch.tensor([counts]))
    plain = plain_shares(Counter(dict(enumerate(counts))), len(counts))
    assert share[0].tolist() == pytest.approx(plain)
    assert balanced_thresholds(share)[0].tolist() == pytest.approx(plain_cbafed(plain), rel=1e-6)


@given(st.lists(st.integers(0, 30), min_size=10, max_size=10))
def test_with_ten_classes_no_second_probability_could_pass_a_threshold(counts: list[int]) -> None:
    """Why the second class is asked for nothing but to be rare."""
    assert balanced_thresholds(scaled_shares(torch.tensor([counts]))).min().item() > 0.5


@given(seeds)
@settings(max_examples=30)
def test_cbafed_chooses_as_the_publication(seed: int) -> None:
    p = (4 * random(seed, 3, 30, CLASSES)).softmax(2)
    limits, rare = random(seed + 1, 3, CLASSES).sigmoid(), random(seed + 2, 3, CLASSES) > 0
    chosen, kept = choose(p, limits, rare)
    for c in range(3):
        for n in range(30):
            expected = plain_choice(p[c, n].tolist(), limits[c].tolist(), rare[c].tolist())
            assert (int(chosen[c, n]) if kept[c, n] else None) == expected


def test_cbafed_gives_every_sample_its_own_second_class() -> None:
    """All fail as class 0, and differ in what comes second; class 3 is not rare."""
    p = torch.full((1, 4, CLASSES), 0.02)
    p[0, :, 0] = 0.5
    for n, second in enumerate([4, 7, 3, 9]):
        p[0, n, second] = 0.34
    rare = torch.ones(1, CLASSES, dtype=torch.bool)
    rare[0, 3] = False
    chosen, kept = choose(p, torch.full((1, CLASSES), 0.85), rare)
    assert kept.tolist() == [[True, True, False, True]]
    assert chosen[kept].tolist() == [4, 7, 9]


@pytest.mark.parametrize(("variant", "lower"), [("paper", 0.07), ("tuned", 0.03)])
def test_cbafed_balances_labels_and_pseudo_labels(variant: str, lower: float) -> None:
    """Three rounds: shares from the labels and the last pseudo-labels, one's own or the neighbourhood's."""
    method, cohort = prepared("cbafed", variant, data__alpha=0.5, graph__topology="line")  # unequal degrees
    shards, graph = cohort.shards, method.setup.graph
    labels = [Counter(shards.labels[shards.labelled.table[i, : shards.labelled.held[i]]].tolist()) for i in range(4)]
    given: list[Counter[int]] = [Counter() for _ in range(4)]
    seconds = 0
    for t in (1, 2, 3):
        p = opinions(cohort, t)
        pseudo, figures = label(method, cohort, t, p)
        own = [labels[i] + given[i] for i in range(4)]
        given = []
        for i in range(4):
            near = [i] if variant == "paper" else [i, *graph.neighbours[i]]
            counts = sum((own[j] for j in near), Counter())
            share = plain_shares(counts)
            limits, rare = plain_cbafed(share), [bool(counts) and s < lower for s in share]
            assert figures["thresholds"][i].tolist() == pytest.approx(limits, rel=1e-6)
            choices = [plain_choice(q, limits, rare) for q in of(cohort, i, p)]
            assert of(cohort, i, pseudo.kept) == [c is not None for c in choices]
            for c, target in zip(choices, of(cohort, i, pseudo.targets), strict=True):
                assert c is None or target == one_hot(c)
            seconds += sum(c is not None and c != best(q) for c, q in zip(choices, of(cohort, i, p), strict=True))
            given.append(Counter(c for c in choices if c is not None))
            if variant == "paper" and i == UNLABELLED and t == 1:  # it knows no class yet, so none is rare
                assert limits == [0.85] * CLASSES
                assert not any(c is not None and c != best(q) for c, q in zip(choices, of(cohort, i, p), strict=True))
    assert seconds > 20


@pytest.mark.parametrize(("variant", "new"), [("paper", 0.8), ("tuned", 0.5)])
@pytest.mark.parametrize("start", [1, 3])
def test_cbafed_mixes_in_the_weights_of_five_rounds_ago(variant: str, new: float, start: int) -> None:
    method, cohort = prepared("cbafed", variant, pseudo__start=start)
    history = [cohort.classifier.params.tolist()]  # after round 0, 1, …
    for t in range(1, 14):
        method.pseudo_label(t, cohort, MemoryExchange(cohort.ids), RoundLog(t, torch.device("cpu")))
        mixed = random(t, *cohort.classifier.params.shape)  # as if trained and mixed
        cohort.classifier.params = mixed.clone()
        method.after_mixing(t, cohort)
        if t >= start and (t - start + 1) % 5 == 0:
            old = torch.tensor(history[t - 5])
            assert_close(cohort.classifier.params, new * mixed + (1 - new) * old)
        else:
            assert torch.equal(cohort.classifier.params, mixed)
        history.append(cohort.classifier.params.tolist())


# --- whole runs -------------------------------------------------------------------------------------------------------

LENGTHS = {"mixmatch": 2, "flexmatch": 5, "cbafed": 6}
"""rounds; FlexMatch has learnt something by the third and is unsure of it later, CBAFed's residual is in the fifth"""


def whole(method: str, variant: str) -> Config:
    return small(method, variant, rounds=LENGTHS[method], pseudo__threshold=0.5, compute__deterministic=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", METHODS)
def test_runs_give_the_same_bits_wherever_clients_are(method: str, variant: str) -> None:
    config = whole(method, variant)
    found, cohort = prepare(config, load("digits"))
    start = cohort.classifier.params.clone()
    records = list(train(config, found, cohort, MemoryExchange(cohort.ids)))
    assert all(x is not None for x in records[-1]["accuracy"])
    assert all(x is not None for record in records for x in record["loss"])
    topics = {"models", "counts"} if (method, variant) == ("cbafed", "tuned") else {"models"}
    assert set(records[-1]["bytes_sent"]) == topics
    assert cohort.generator is None
    assert (cohort.classifier.params != start).any(1).all()

    spread = in_blocks(config, [[3, 0], [2, 1]])
    for client, tensors in rows_of(cohort).items():
        assert tensors.keys() == spread[client].keys()
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"


@pytest.mark.parametrize("method", METHODS)
def test_clients_train_on_what_they_have(method: str) -> None:
    """A client without labels trains once it has pseudo-labels, and not before."""
    for start in (1, 2):
        config = small(method, "tuned" if method != "cbafed" else "paper", rounds=1, pseudo__start=start)
        found, cohort = prepare(config, load("digits"))
        cohort.classifier.params *= 3  # so that even CBAFed is sure of something
        list(train(config, found, cohort, MemoryExchange(cohort.ids)))
        moved = cohort.classifier.optimiser["velocity"].count_nonzero(1) > 0
        assert moved.tolist() == [True, True, start == 1, start == 1]


@pytest.mark.parametrize(("method", "variant"), [("flexmatch", "tuned"), ("cbafed", "paper"), ("cbafed", "tuned")])
def test_memory_survives_a_checkpoint(method: str, variant: str, tmp_path: Path) -> None:
    config = whole(method, variant)
    found, cohort = prepare(config, load("digits"))
    exchange = MemoryExchange(cohort.ids)
    for record in train(config, found, cohort, exchange):
        if record["round"] == 3:
            checkpoint.save(tmp_path, 3, cohort.state(), {})

    def resumed(forget: bool) -> Cohort:
        found, cohort = prepare(config, load("digits"))
        done, tensors, _ = checkpoint.load_latest(tmp_path)
        cohort.restore(tensors)
        if forget:
            cohort.memory.clear()
        list(train(config, found, cohort, exchange, done + 1))
        return cohort

    same, other = resumed(forget=False).state(), resumed(forget=True).state()
    expected = cohort.state()
    assert same.keys() == expected.keys()
    assert all(torch.equal(same[name], x) for name, x in expected.items())
    # The memory is not idle.
    assert not torch.equal(other["classifier.params"], expected["classifier.params"])
