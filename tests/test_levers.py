"""What goes beyond the paper: strong augmentation, pools, logit adjustment, mixed momentum; not alignment."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ImageEnhance import Brightness, Color, Contrast
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Cohort
from semidfl.data.augment import Strong
from semidfl.data.sources import load
from semidfl.draws import Draws
from semidfl.errors import ConfigError
from semidfl.exchange.base import Shared
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.learn.aggregate import say
from semidfl.learn.batch import Batch, PseudoLabels, compose
from semidfl.methods.base import taught
from semidfl.methods.semidfl import _of_any_class
from semidfl.models.stacked import Conv2d
from semidfl.record.log import RoundLog
from tests.small import tiny
from tests.test_rounds import in_blocks, rounds_of, rows_of, ten

CPU = torch.device("cpu")


def images(count: int, height: int = 7, width: int = 9) -> torch.Tensor:
    return torch.randint(1, 256, (count, 2, height, width), generator=torch.Generator().manual_seed(0)).byte()


def test_strong_of_no_strength_is_the_identity() -> None:
    pool = images(5)
    index = torch.tensor([[4, 0, 2]])
    same = Strong(pad=0, flip=False, strength=0.0)(pool, index, Draws.of([0], [0], CPU), 1, "x")
    assert torch.equal(same[0], pool[[4, 0, 2]])


def test_strong_takes_pixels_from_where_its_map_says() -> None:
    """Against a slow bilinear look-up, pixel by pixel, of the affine map of each sample; without the cut-out."""
    pool, strong = images(1), Strong(pad=1, flip=True, cutout=0.0)
    draws, index = Draws.of([0], [0], CPU), torch.zeros(1, 6, dtype=torch.int64)
    found = strong(pool, index, draws, 3, "x")[0]
    u = draws.uniform(3, "x strong", 6, 9)[0]
    _, channels, height, width = pool.shape
    for n in range(6):
        matrix = strong._maps(2 * u[n : n + 1] - 1, pool.shape)[0].tolist()
        for y in range(height):
            for x in range(width):
                at = [(2 * x + 1) / width - 1, (2 * y + 1) / height - 1, 1.0]
                sx, sy = (sum(a * b for a, b in zip(row, at, strict=True)) for row in matrix)
                px, py = ((sx + 1) * width - 1) / 2, ((sy + 1) * height - 1) / 2
                for c in range(channels):
                    expected = 0.0
                    for iy in (math.floor(py), math.floor(py) + 1):
                        for ix in (math.floor(px), math.floor(px) + 1):
                            if 0 <= iy < height and 0 <= ix < width:
                                share = (1 - abs(px - ix)) * (1 - abs(py - iy))
                                expected += share * float(pool[0, c, iy, ix])
                    assert abs(float(found[n, c, y, x]) - expected) <= 0.51


def test_strong_maps_are_rotations_within_bounds() -> None:
    v = 2 * torch.rand(500, 9, generator=torch.Generator().manual_seed(1)) - 1
    maps = Strong(pad=2, flip=False, shear=0.0)._maps(v, torch.Size([500, 1, 8, 8]))
    zoom = maps[:, :, :2].det().sqrt()
    assert 0.85 <= float(zoom.min()) < 0.87
    assert 1.13 < float(zoom.max()) <= 1.15
    angle = torch.atan2(maps[:, 1, 0], maps[:, 0, 0]).rad2deg()
    assert 19 < float(angle.abs().max()) <= 20
    assert float(maps[:, :, 2].abs().max()) <= 2 * 2 / 8  # two pixels of eight, where the image is two wide


def test_colours_change_as_pillow_changes_them() -> None:
    """Against ImageEnhance, which rounds after each step."""
    pool = torch.randint(0, 256, (1, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    strong = Strong(pad=0, flip=False, rotation=0, scale=0, shear=0, cutout=0)
    draws, index = Draws.of([0], [0], CPU), torch.zeros(1, 20, dtype=torch.int64)
    found = strong(pool, index, draws, 3, "x")[0]
    factors = 0.5 + draws.uniform(3, "x colour", 20, 3)[0]
    assert float(factors.min()) < 0.6
    assert float(factors.max()) > 1.4
    for image, wanted in zip(found, factors.tolist(), strict=True):
        picture = Image.fromarray(pool[0].permute(1, 2, 0).numpy())
        for change, factor in zip((Brightness, Contrast, Color), wanted, strict=True):
            picture = change(picture).enhance(factor)
        theirs = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        assert int((image.int() - theirs.int()).abs().max()) <= 4


def test_the_hole_is_a_square_of_its_size() -> None:
    pool = torch.full((1, 1, 20, 20), 255, dtype=torch.uint8)
    cut = Strong(pad=0, flip=False, rotation=0, scale=0, shear=0, cutout=0.3)
    found = cut(pool, torch.zeros(1, 200, dtype=torch.int64), Draws.of([0], [0], CPU), 1, "x")[0, :, 0]
    sizes = (found == 0).sum((1, 2))
    assert int(sizes.max()) == 36
    assert 0 < int(sizes.min()) < 36  # some reach over the edge
    for image in found[:20]:
        rows, columns = (image == 0).any(1), (image == 0).any(0)
        assert int((image == 0).sum()) == int(rows.sum()) * int(columns.sum())


def test_generated_samples_weigh_as_much_as_classes_are_lacking() -> None:
    """Two slots of each source, four classes; clients with one class, with all, and with nothing of their own."""
    known = torch.tensor([[0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 1, 2], [0, 0, 0, 0, 1, 2]])
    targets = F.one_hot(known, 4).float()[:, None]
    valid = torch.tensor([[True] * 6, [True] * 6, [False] * 4 + [True] * 2])
    trust = torch.ones(3, 6)
    trust[:, 2:4] = 0.5
    trust[1] = 1.0
    batch = Batch(torch.zeros(3, 1, 6, 1, 4, 4, dtype=torch.uint8), targets, valid, trust, torch.arange(6), 6)
    filled = batch.filled_in()
    weights = filled.weights()
    # One class of four: three quarters lack, so two generated count as 1.5 samples beside four others.
    assert weights[0].tolist() == pytest.approx([x / 5.5 for x in (1, 1, 0.5, 0.5, 0.75, 0.75)])
    assert weights[1].tolist() == pytest.approx([1 / 4] * 4 + [0, 0])  # as if there were none
    assert weights[2].tolist() == pytest.approx([0] * 4 + [1 / 2] * 2)


def test_a_pool_is_a_part_of_the_clients_own_samples_and_changes() -> None:
    _, cohort = prepare(ten(), load("digits"))
    whole = cohort.shards.unlabelled
    most = sorted(n for n in whole.held if n)[1]  # so that some have fewer, one as many, others more
    seen = []
    for t in (1, 2, 2):
        with cohort.looking_at(t, most):
            some = cohort.shards.unlabelled
            seen.append([row[:n].tolist() for row, n in zip(some.table, some.held, strict=True)])
            assert some.count.tolist() == list(some.held) == [min(n, most) for n in whole.held]
            assert (some.count[:, None] * some.stands_for()).flatten().tolist() == pytest.approx(list(whole.held))
    assert cohort.shards.unlabelled is whole
    for client, n in enumerate(whole.held):
        own = set(whole.table[client, :n].tolist())
        for drawn in seen:
            assert len(set(drawn[client])) == min(n, most)
            assert set(drawn[client]) <= own
        assert seen[1][client] == seen[2][client]
        assert n <= most or seen[0][client] != seen[1][client]
    with cohort.looking_at(1, 0):
        assert cohort.shards.unlabelled is whole


def test_counts_are_of_all_samples_whatever_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is sure of how many sets the thresholds of its neighbours: of a pool, each sample stands for several."""
    method, cohort = prepare(ten(rounds=1, data__alpha=0.1, pseudo__threshold=0.01), load("digits"))
    exchange, heard = MemoryExchange(cohort.ids), []

    def share(t: int, topic: str, tensors: dict[str, Tensor]) -> Shared:
        heard.append(tensors.get("counts"))
        return MemoryExchange.share(exchange, t, topic, tensors)

    monkeypatch.setattr(exchange, "share", share)
    held = cohort.shards.unlabelled.held
    with cohort.looking_at(1, 20):
        method.pseudo_label(1, cohort, exchange, RoundLog(1, CPU))
    (counts,) = [x for x in heard if x is not None]
    assert counts.sum(1).tolist() == pytest.approx(held, abs=6)  # each class is rounded by itself
    assert max(held) > 1.5 * min(n for n in held if n)


def test_a_pool_is_the_same_in_any_company() -> None:
    _, cohort = prepare(ten(), load("digits"))
    held = sorted(n for n in cohort.shards.unlabelled.held if n)
    for most in (20, held[len(held) // 2]):  # the second is enough for some
        _assert_same_pool(cohort, most)


def _assert_same_pool(cohort: Cohort, most: int) -> None:
    together = cohort.shards.unlabelled.some(3, cohort.draws, most)
    for client in range(10):
        alone = cohort.shards.unlabelled.rows([client]).some(3, cohort.draws.rows([client]), most)
        assert alone.table[0, : alone.held[0]].tolist() == together.table[client, : together.held[client]].tolist()


def test_a_failed_round_leaves_the_client_all_its_samples() -> None:
    _, cohort = prepare(ten(), load("digits"))
    whole = cohort.shards
    with pytest.raises(ZeroDivisionError), cohort.looking_at(1, 5):
        raise ZeroDivisionError
    assert cohort.shards is whole


def test_class_shares_are_the_weighted_targets() -> None:
    targets = F.one_hot(torch.tensor([[[0, 1, 1], [0, 2, 2]]]), 3).float()  # (1, 2 steps, 3 slots, 3 classes)
    valid, trust = torch.tensor([[True, True, False]]), torch.tensor([[1.0, 0.5, 1.0]])
    batch = Batch(torch.zeros(1, 2, 3, 1, 4, 4, dtype=torch.uint8), targets, valid, trust, torch.arange(3), 3)
    # Slot 0: class 0 twice, weight 1; slot 1: classes 1 and 2, weight 1/2; slot 2 does not count.
    assert batch.class_shares().tolist() == [pytest.approx([2 / 3, 1 / 6, 1 / 6])]


def test_logit_adjustment_shifts_by_the_log_of_the_own_shares() -> None:
    """The loss of a single step against plain cross-entropy on shifted logits."""
    config = ten(method="dfl-lb", classifier__iterations=1, classifier__logit_adjustment=0.7)
    method, cohort = prepare(config, load("digits"))
    setup, log = method.setup, RoundLog(1, CPU)
    batch = compose(1, "classify", 1, 20, setup.augment, 10, cohort.shards, cohort.draws, None, None)
    logits = setup.classifier(cohort.classifier.params, setup.space.normalise(batch.images[:, 0]))
    method.train_classifier(1, cohort, None, log)
    for client in range(4):
        labels = batch.targets[client, 0].argmax(1)
        share = torch.bincount(labels, minlength=10) / 20
        shifted = logits[client] + 0.7 * share.clamp(min=0.02).log()
        assert float(log.figures["loss"][client]) == pytest.approx(float(F.cross_entropy(shifted, labels)), rel=1e-4)


@pytest.mark.parametrize("method", ["semidfl", "dfl-lb", "cbafed"])
def test_the_average_follows_the_mixed_weights_in_every_method(method: str) -> None:
    config = ten(method=method, rounds=2, classifier__ema=0.25)
    kind, cohort = prepare(config, load("digits"))
    expected = cohort.classifier.params.clone()
    for _ in train(config, kind, cohort, MemoryExchange(cohort.ids)):
        expected = 0.25 * expected + 0.75 * cohort.classifier.params
    torch.testing.assert_close(cohort.classifier.average, expected)


def test_mixed_momentum_is_the_neighbourhoods_mean() -> None:
    config = ten(method="dfl-lb", rounds=1, aggregation__momentum=True)
    method, cohort = prepare(config, load("digits"))
    method.train_classifier(1, cohort, None, RoundLog(1, CPU))
    local = cohort.classifier.optimiser["velocity"]
    method, cohort = prepare(config, load("digits"))
    record = next(iter(train(config, method, cohort, MemoryExchange(cohort.ids))))
    torch.testing.assert_close(cohort.classifier.optimiser["velocity"][7], local[[0, 2, 3, 6, 7]].mean(0))
    assert record["bytes_sent"]["models"][0] == 2 * 4 * 4 * method.setup.classifier.size  # twice the classifier


@pytest.mark.parametrize("method", ["semidfl", "dfl-lb", "mixmatch", "flexmatch"])
def test_who_learns_more_has_more_say(method: str) -> None:
    """The weights of a round against a slow count, client by client: labels are 1, the share of labels given 1 more."""
    config = ten(method=method, variant="tuned", rounds=1, aggregation__idle=0.2, pseudo__threshold=0.13)
    kind, cohort = prepare(config, load("digits"))
    record = next(iter(train(config, kind, cohort, MemoryExchange(cohort.ids))))
    held, graph = cohort.shards, kind.setup.graph
    given = [0] * 10 if method == "dfl-lb" else record["pseudo_labels"]
    factors = []
    for client in range(10):
        share = given[client] / max(held.unlabelled.held[client], 1)
        factors.append(0.2 + 0.8 * ((held.labelled.held[client] > 0) + share))
    assert method != "semidfl" or any(0.2 < x < 1 for x in factors)
    for client, weights in enumerate(record["weights"]):
        near = sorted((client, *graph.neighbours[client]))
        total = sum(factors[j] for j in near)
        assert weights == pytest.approx([factors[j] / total for j in near], rel=1e-5)


@pytest.mark.parametrize("method", ["semidfl", "mixmatch", "flexmatch", "cbafed", "dfl-lb"])
def test_doubled_pseudo_labels_are_for_every_method_that_has_some(method: str) -> None:
    """Who has none, or only labels, trains as before."""
    same = {"compute__deterministic": True, "generator__kind": "none", "pseudo__threshold": 0.13}
    config = ten(method=method, variant="tuned", rounds=1, **same)
    once, doubled = (
        rounds_of(replace(config, pseudo=replace(config.pseudo, doubled=x)))[1].classifier.optimiser["velocity"]
        for x in (False, True)
    )
    differ = [not torch.equal(a, b) for a, b in zip(once, doubled, strict=True)]
    assert differ[:2] == [False, False]  # labels only
    assert any(differ) == (method != "dfl-lb")


def test_taught_counts_what_really_teaches() -> None:
    """Labels, and the share of the samples looked at that carry a target; a target of zeros is none."""
    _, cohort = prepare(ten(), load("digits"))
    with cohort.looking_at(1, 10):
        n = cohort.shards.unlabelled.table.shape[1]
        kept = torch.ones(10, n, dtype=torch.bool)
        targets = torch.zeros(10, n, 10)
        targets[2, :4, 1], targets[5, :10, 3], targets[6, :5, 0] = 1.0, 1.0, 0.5
        kept[6, 2:] = False
        found = taught(cohort, PseudoLabels(targets, kept))
        assert taught(cohort, None).tolist() == [1.0] * 4 + [0.0] * 6
    assert n == 10  # of the 163 that a client has at least
    assert found.tolist() == pytest.approx([1, 1, 1.4, 1, 0, 1, 0.2, 0, 0, 0])


def test_with_a_robust_rule_nobody_claims_to_have_learnt_more() -> None:
    config = ten(method="dfl-lb", rounds=1, aggregation__idle=0.2, aggregation__robust="clip")
    kind, cohort = prepare(config, load("digits"))
    assert "taught" not in kind.claims(cohort, None)
    record = next(iter(train(config, kind, cohort, MemoryExchange(cohort.ids))))
    assert all(w == pytest.approx([0.2] * 5) for w in record["weights"])


def test_what_neighbours_claim_to_have_learnt_from_is_bounded() -> None:
    claimed = torch.tensor([0.0, 0.5, 2.0, 1e9, float("nan"), -3.0], dtype=torch.float64)
    found = say(claimed, 0.25)
    assert found is not None
    assert found.tolist() == pytest.approx([0.25, 0.625, 1.75, 1.75, 0.25, 0.25])
    assert say(None, 0.25) is None


def test_unqualified_images_train_the_generator_without_a_class() -> None:
    _, cohort = prepare(ten(), load("digits"))
    every = _of_any_class(None, cohort.shards, 10)
    assert every.kept.sum(1).tolist() == list(cohort.shards.unlabelled.held)
    assert torch.count_nonzero(every.targets) == 0


def test_all_levers_together_give_the_same_bits_wherever_clients_are() -> None:
    levers = {
        "pseudo__align": True,
        "pseudo__pool": 170,  # clients hold 163 to 179
        "pseudo__masked": True,
        "pseudo__doubled": True,
        "pseudo__labels": "hard",
        "pseudo__sharpen": 1.7,
        "augment__strong": 1.0,
        "classifier__logit_adjustment": 0.5,
        "classifier__ema": 0.5,
        "classifier__loss": "sources",
        "classifier__turns": 0.5,
        "generator__ema": 0.5,
        "generator__all_images": True,
        "generator__keep_agreed": True,
        "generator__fill": True,
        "aggregation__momentum": True,
        "aggregation__idle": 0.3,
    }
    config = ten(compute__deterministic=True, rounds=3, **levers)
    alone = rows_of(rounds_of(config)[1])
    spread = in_blocks(config, [[9, 0, 5], [7, 1], [2, 8, 3, 6, 4]])
    assert "memory.shares.predicted" in alone[0]
    for client, tensors in alone.items():
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"


def test_filters_are_standardised_only_where_a_norm_follows() -> None:
    with pytest.raises(ConfigError, match=r"classifier\.standardise is for resnet18: the cnn has no norm"):
        prepare(tiny(classifier__standardise=True), load("digits"))
    method, _ = prepare(tiny(classifier__standardise=True, classifier__model="resnet18"), load("digits"))
    convolutions = [x for x in method.setup.classifier.module.modules() if isinstance(x, Conv2d)]
    assert len(convolutions) == 20
    assert all(x.standard for x in convolutions)
