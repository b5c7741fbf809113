"""What goes beyond the paper: strong augmentation, alignment by gossip, logit adjustment, mixed momentum."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ImageEnhance import Brightness, Color, Contrast
from torch.nn import functional as F

from semidfl.cohort import Cohort
from semidfl.config import GraphConfig
from semidfl.data.augment import Strong
from semidfl.data.sources import load
from semidfl.draws import Draws
from semidfl.exchange.base import Neighbourhood, Shared
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.learn.align import Shares, aligned, averaging, gossip_weights, summed
from semidfl.learn.batch import Batch, compose
from semidfl.methods.semidfl import _of_any_class
from semidfl.record.log import RoundLog
from semidfl.topology import Topology, build
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


def test_alignment_against_a_plain_loop() -> None:
    p = torch.rand(2, 3, 4).softmax(2)
    tilt = torch.tensor([[1.0, 2.0, 0.5, 1.0], [3.0, 1.0, 1.0, 0.1]])
    found = aligned(p, tilt.log())
    for c in range(2):
        for n in range(3):
            raised = [float(p[c, n, k]) * float(tilt[c, k]) for k in range(4)]
            assert found[c, n].tolist() == pytest.approx([x / sum(raised) for x in raised], rel=1e-5)


def test_sums_leave_padding_out() -> None:
    p = torch.rand(2, 5, 3)
    valid = torch.tensor([[True, True, False, False, False], [False] * 5])
    found = summed(p, valid)
    torch.testing.assert_close(found[0], p[0, :2].sum(0))
    assert found[1].tolist() == [0, 0, 0]


# --- alignment by gossip, of predictions that do not change ----------------------------------------------------------


@dataclass
class Network:
    """Clients of a graph, each class dealt to them by a Dirichlet draw; the classifiers are nearly always right."""

    graph: Topology
    truth: torch.Tensor  # (C, n)
    valid: torch.Tensor
    p: torch.Tensor  # (C, n, K)
    labels: torch.Tensor  # (C, K), all at the first client
    prior: float

    @classmethod
    def of(
        cls, topology: str, alpha: float, shares: list[float], labels: int, prior: float, merged: bool = False
    ) -> "Network":
        graph, random = build(GraphConfig(topology), 0), np.random.RandomState(1)
        clients, classes = graph.clients, len(shares)
        truth = np.repeat(np.arange(classes), [round(3000 * share) for share in shares])
        deal = random.dirichlet([alpha] * clients, classes)
        owner = np.array([random.choice(clients, p=deal[k]) for k in truth])
        rows = [torch.from_numpy(truth[owner == i]) for i in range(clients)]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        valid = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        logits = torch.randn(*padded.shape, classes, generator=torch.Generator().manual_seed(0))
        logits += 5 * F.one_hot(padded, classes)
        if merged:  # the second class is taken for the first, but less surely than the first itself
            logits[..., 0] = torch.where(padded == 1, logits[..., 1] + 2, logits[..., 0])
        counts = torch.zeros(clients, classes)
        counts[0] = torch.tensor([labels * share for share in shares])
        return cls(graph, padded, valid, logits.softmax(2), counts, prior)

    def align(
        self, rounds: int = 300, lost: float = 0.0, restarts: tuple[int, ...] = (), liar: bool = False, **rule: bool
    ) -> Shares:
        everyone, random = tuple(range(self.graph.clients)), np.random.RandomState(2)
        shares = Shares.start(self.labels)
        for t in range(rounds):
            own = summed(aligned(self.p, shares.tilt), self.valid)
            said = {name: x.clone() for name, x in shares.public().items()}
            if liar:  # client 5 says that all labels are of the last class
                said["labelled"][5], said["labelled"][5, -1] = 0.0, 1e9
            met = []
            for i in everyone:  # each hears from whom it hears, and always itself
                heard = tuple(j for j in everyone if j == i or random.rand() >= lost)
                seen = Shared(heard, {name: x[list(heard)] for name, x in said.items()})
                met.append(shares.rows([i]).averaged(seen.tensors, averaging(self.graph, (i,), seen, CPU, **rule)))
            shares = Shares(*(torch.cat(rows) for rows in zip(*(vars(s).values() for s in met), strict=True)))
            shares = shares.renewed(own, self.labels)
            shares = replace(shares, tilt=shares.raised(self.graph.clients, self.prior))
            if t in restarts:  # client 3 comes back with nothing
                anew = Shares.start(self.labels)
                parts = [(getattr(shares, f), getattr(anew, f)) for f in vars(shares)]
                shares = Shares(*(torch.cat([x[:3], y[3:4], x[4:]]) for x, y in parts))
        return shares

    def right(self, tilt: torch.Tensor) -> float:
        return float(((aligned(self.p, tilt).argmax(2) == self.truth) & self.valid).sum() / self.valid.sum())


EVEN = [0.1] * 10


@pytest.mark.parametrize("topology", ["fig1", "ring", "star"])
def test_skewed_clients_keep_what_was_right(topology: str) -> None:
    """Classes are even in the network and skewed at each client, and 60 labels lie at one: nothing is to be raised."""
    network = Network.of(topology, 0.1, EVEN, 60, prior=200.0)
    shares = network.align()
    before = network.right(torch.zeros(10, 10))
    assert before > 0.99
    assert network.right(shares.tilt) > before - 0.005
    total = shares.labelled.sum(0)  # no client's labels count twice, on no graph
    torch.testing.assert_close(total, network.labels.sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("alpha", [100.0, 0.1])
def test_alignment_parts_classes_that_were_seen_as_one(alpha: float) -> None:
    network = Network.of("fig1", alpha, EVEN, 60, prior=200.0, merged=True)
    assert network.right(torch.zeros(10, 10)) < 0.91
    assert network.right(network.align().tilt) > 0.97


@pytest.mark.parametrize("labels", [40, 200])
def test_rare_classes_are_not_made_frequent_by_few_labels(labels: int) -> None:
    network = Network.of("fig1", 100.0, [0.95, 0.05], labels, prior=1.0)
    tilt = network.align().tilt
    ill = aligned(network.p, tilt)[..., 1] > 0.95
    assert (network.truth[ill & network.valid] == 1).float().mean() > 0.97
    assert network.right(tilt) > 0.99
    sure_of_even = replace(network, prior=200.0)  # what the prior is for, and what it does where it is wrong
    assert sure_of_even.right(sure_of_even.align().tilt) < 0.97


def test_estimates_follow_at_once() -> None:
    """Over all clients they sum to the predictions of the round: factors that learn of them late would swing."""
    network = Network.of("fig1", 0.1, EVEN, 60, prior=200.0)
    for rounds in range(1, 4):  # the tilt moves, and with it the aligned predictions
        shares, now = network.align(rounds), summed(aligned(network.p, network.align(rounds - 1).tilt), network.valid)
        torch.testing.assert_close(shares.predicted.sum(0), now.sum(0))
    assert not torch.equal(shares.told, network.align(1).told)


@pytest.mark.parametrize("trouble", [{"lost": 0.13}, {"restarts": (60, 120, 200)}])
def test_alignment_gets_over_lost_messages_and_restarts(trouble: dict) -> None:
    network = Network.of("fig1", 0.1, EVEN, 60, prior=200.0)
    before = network.right(torch.zeros(10, 10))
    assert network.right(network.align(**trouble).tilt) > before - 0.005


def test_one_liar_decides_unless_the_median_is_taken() -> None:
    network = Network.of("fig1", 0.1, EVEN, 60, prior=200.0)
    assert network.right(network.align(100, liar=True).tilt) < 0.8
    assert network.right(network.align(100, liar=True, robust=True).tilt) > 0.95  # medians of skewed shares are rough


def test_what_is_out_of_date_counts_less() -> None:
    graph, everyone = build(GraphConfig("full", 3), 0), (0, 1, 2)
    values = torch.tensor([[0.0], [3.0], [6.0]])
    fresh, old = (
        averaging(graph, everyone, Shared(everyone, {}, trust), CPU) for trust in (None, torch.tensor([1, 1, 0.5]))
    )
    assert fresh(values, values).tolist() == [pytest.approx([3.0])] * 3
    assert old(values, values).flatten().tolist() == pytest.approx([2.0, 1 + 1 + 0.5, 3 / 3 + 6 * (0.5 / 3 + 0.5 / 3)])


def test_gossip_weights_are_alike_in_both_directions() -> None:
    graph = build(GraphConfig("star"), 0)
    everyone = tuple(range(10))
    weights = gossip_weights(graph, everyone, everyone, CPU)
    near = Neighbourhood.of(graph, everyone, everyone, CPU)
    dense = torch.zeros(10, 10, dtype=torch.float64).scatter_add_(1, near.index, weights)
    assert torch.equal(dense, dense.T)
    assert (dense.sum(1) <= 1 + 1e-12).all()
    assert dense[0, 5] == dense[5, 0] == 1 / 10
    some = gossip_weights(graph, everyone, (0, 2, 3), CPU)  # those who did not answer are left out
    assert some.shape == (10, 3)
    assert some[2].tolist() == [1 / 10, 1 / 2, 0.0]


def test_a_class_without_labels_or_predictions_stays_finite() -> None:
    nothing = torch.zeros(1, 3)
    shares = Shares(torch.tensor([[1.0, 0.0, 0.0]]), nothing, nothing, nothing)
    for _ in range(200):
        shares = replace(shares, tilt=shares.raised(5, 50.0))
    assert torch.isfinite(shares.tilt).all()
    assert shares.tilt.abs().max() <= 4.6
    assert shares.tilt[0, 0] < shares.tilt[0, 1] == shares.tilt[0, 2]
    assert Shares.start(nothing).raised(5, 1.0).tolist() == [pytest.approx([0, 0, 0], abs=1e-6)]


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
        "pseudo__labels": "hard",
        "pseudo__sharpen": 1.7,
        "augment__strong": 1.0,
        "classifier__logit_adjustment": 0.5,
        "classifier__ema": 0.5,
        "generator__ema": 0.5,
        "generator__all_images": True,
        "generator__keep_agreed": True,
        "generator__fill": True,
        "aggregation__momentum": True,
    }
    config = ten(compute__deterministic=True, rounds=3, **levers)
    alone = rows_of(rounds_of(config)[1])
    spread = in_blocks(config, [[9, 0, 5], [7, 1], [2, 8, 3, 6, 4]])
    assert "memory.shares.predicted" in alone[0]
    for client, tensors in alone.items():
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"
