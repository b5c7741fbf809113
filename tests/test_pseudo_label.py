"""Neighbourhood pseudo-labelling: Eq. 6 to 9 with lists and loops; who helps whom to label."""

import math
from collections import Counter

import pytest
import torch
from helpers import (
    PlainCNN,
    Scene,
    assert_close,
    draws_of,
    load,
    network_of,
    params_of,
    pixels,
    plain_augment,
    random,
    scenes,
    shards_of,
    topology,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from semidfl.data.augment import Augment
from semidfl.data.shards import Space
from semidfl.learn.pseudo_label import Labeller, class_thresholds, qualified_counts, sharpen, teachers
from semidfl.models.cnn import CNN

seeds = st.integers(0, 2**32 - 1)
taus = st.sampled_from([0.0, 0.3, 0.5, 0.6, 0.95, 1.0])


def eq6(p: list[float], exponent: float) -> list[float]:
    total = sum(x**exponent for x in p)
    return [x**exponent / total for x in p]


def eq8(samples: list[list[float]], tau: float) -> dict[int, int]:
    """sigma^c, and under the key -1 how many are not surer than tau."""
    sigma: Counter[int] = Counter()
    for p in samples:
        sigma[p.index(max(p)) if max(p) > tau else -1] += 1
    return sigma


def eq9(sigma: dict[int, list[int]], i: int, group: list[int], tau: float, warmup: bool) -> list[float]:
    """sigma: client -> counts of the classes, then of the unsure. Infinite: nothing is surer than that."""
    largest = 0
    for j in group:
        for count in sigma[j] if warmup else sigma[j][:-1]:
            largest = max(largest, count)
    return [tau * count / largest if largest else math.inf for count in sigma[i][:-1]]


# --- Eq. 6, 8 and 9 ----------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 10), st.sampled_from([0.5, 1.0, 2.0, 3.7, 8.0]))
def test_sharpen_is_eq_6(seed: int, classes: int, exponent: float) -> None:
    p = random(seed, 2, 3, classes).double().softmax(2)
    sharpened = sharpen(p, exponent)
    for c in range(2):
        for n in range(3):
            assert sharpened[c, n].tolist() == pytest.approx(eq6(p[c, n].tolist(), exponent))


def test_sharpen_draws_towards_the_largest() -> None:
    assert sharpen(torch.tensor([0.6, 0.3, 0.1]), 2.0).tolist() == pytest.approx([36 / 46, 9 / 46, 1 / 46])
    assert sharpen(torch.tensor([1.0, 0.0]), 2.0).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("exponent", [60.0, 1000.0])
def test_sharpening_hard_is_still_a_distribution(exponent: float) -> None:
    p = sharpen(torch.tensor([0.12, *[0.88 / 9] * 9]), exponent)
    assert p.sum().item() == pytest.approx(1)
    assert p.argmax() == 0


@given(seeds, st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), taus)
def test_counts_are_eq_8(seed: int, clients: int, n: int, classes: int, tau: float) -> None:
    p = (3 * random(seed, clients, n, classes)).softmax(2)
    valid = random(seed + 1, clients, n) > -0.5
    counts = qualified_counts(p, valid, tau)
    for i in range(clients):
        samples = [row for row, real in zip(p[i].tolist(), valid[i].tolist(), strict=True) if real]
        sigma = eq8(samples, tau)
        assert counts[i].tolist() == [sigma[c] for c in range(classes)] + [sigma[-1]]


def test_as_sure_as_tau_is_not_surer() -> None:
    for tau in (0.25, 0.6, 0.95):
        p = torch.tensor([[[tau, 0.0], [0.0, tau], [tau + 0.01, 0.0]]])
        assert qualified_counts(p, torch.ones(1, 3, dtype=torch.bool), tau).tolist() == [[1, 0, 2]]


@given(scenes(), st.data(), st.floats(0.01, 1), st.booleans())
def test_thresholds_are_eq_9(scene: Scene, data: st.DataObject, tau: float, warmup: bool) -> None:
    counts = st.lists(st.integers(0, 5) | st.integers(0, 10**5), min_size=4, max_size=4)  # 3 classes and the unsure
    sigma = {j: data.draw(counts) for j in scene.seen}
    own, shared = (torch.tensor([sigma[j] for j in ids]) for ids in (scene.own, scene.seen))
    thresholds = class_thresholds(own, shared, scene.near, tau, warmup)
    for i, row in zip(scene.own, thresholds.tolist(), strict=True):
        assert row == pytest.approx(eq9(sigma, i, scene.group(i), tau, warmup), rel=1e-6)


def test_a_neighbours_count_lowers_the_threshold_and_a_strangers_does_not() -> None:
    line = Scene(topology([[1], [0, 2], [1]]), [0, 1, 2], [0, 1, 2])
    counts = torch.tensor([[4, 2, 90], [8, 0, 0], [100, 1, 0]])
    plain = class_thresholds(counts, counts, line.near, 0.8, warmup=False)
    assert plain.flatten().tolist() == pytest.approx([0.4, 0.2, 0.064, 0, 0.8, 0.008])
    warm = class_thresholds(counts, counts, line.near, 0.8, warmup=True)
    assert warm[0].tolist() == pytest.approx([0.8 * 4 / 90, 0.8 * 2 / 90])


@pytest.mark.parametrize("warmup", [True, False])
def test_where_nothing_is_sure_nothing_is_kept(warmup: bool) -> None:
    """Client 0 and its neighbour have nothing above tau, and with warm-up not even a sample; 2 stands apart."""
    scene = Scene(topology([[1], [0], []]), [0, 1, 2], [0, 1, 2])
    unsure = 0 if warmup else 9
    counts = torch.tensor([[0, 0, unsure], [0, 0, unsure], [3, 0, 1]])
    thresholds = class_thresholds(counts, counts, scene.near, 0.95, warmup)
    certain = torch.ones(3, 2)
    assert (certain > thresholds).tolist() == [[False, False], [False, False], [True, True]]
    assert not thresholds.isnan().any()


# --- who labels --------------------------------------------------------------------------------------------

STAR = Scene(topology([[1, 2, 3], [0], [0], [0], []]), [0, 1, 4], [0, 1, 3, 4])  # 2 has not answered


@pytest.mark.parametrize("per_sample", [0, 900])
def test_teachers_are_drawn_evenly_from_the_neighbourhood(per_sample: int) -> None:
    rounds = range(1, 3) if per_sample else range(1, 901)
    drawn = [teachers(t, 3, STAR.near, draws_of(3), per_sample) for t in rounds]
    assert {len(views) for views in drawn} == {2}
    assert {x.shape for views in drawn for x in views} == {(3, per_sample) if per_sample else (3,)}
    for view in range(2):
        for row, i in enumerate(STAR.own):
            places = torch.cat([views[view][row].reshape(-1) for views in drawn]).tolist()
            found = Counter(STAR.seen[p] for p in places)
            assert set(found) == set(STAR.group(i))  # its neighbours that are there, and itself
            assert len(found) == 1 or stats.chisquare(list(found.values())).pvalue > 0.001


def test_each_view_and_sample_has_a_teacher_of_its_own() -> None:
    first, second = teachers(1, 3, STAR.near, draws_of(3), 200)
    assert not torch.equal(first[0], second[0])
    assert first[0].unique().numel() == 3
    assert teachers(1, 1, STAR.near, draws_of(3)) == []


# --- Eq. 7 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["round", "sample"])
def test_predictions_are_the_mean_over_views_each_by_its_teacher(draw: str) -> None:
    """One network, one sample and one view at a time, in plain torch, against the labeller's batches."""
    t, views, pad, n, ids = 4, 3, 1, 5, [0, 2, 3]
    graph = topology([[1, 2], [0], [0, 3], [2]])
    near = Scene(graph, ids, [0, 1, 2, 3]).near
    network = network_of(lambda: CNN(1, 8, 8, 10))
    shared = 3 * params_of(network, 4)  # large weights, so that the networks disagree
    own = shared[ids] + 0.1  # told apart from what was shared: only the first view is its own
    space, draws = Space(1, 8, 8, 10, (0.4,), (0.3,)), draws_of(3)
    lists = [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9, 3]]
    shards = shards_of(pixels(1, 10, 1, 8, 8), torch.zeros(10, dtype=torch.int64), [[], [], []], lists)

    chosen = teachers(t, views, near, draws, n if draw == "sample" else 0)
    # 2 samples a pass: the last pass is smaller
    p = Labeller(network, space, Augment(pad, True), limit=2)(t, own, shared, chosen, shards, draws)
    assert p.shape == (3, n, 10)

    def predict(params: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        x = (image.double() / 255 - 0.4) / 0.3
        return load(PlainCNN(1, 8, 8, 10), params)(x.float()[None])[0].softmax(0)

    for i in range(3):
        for s, position in enumerate(lists[i]):
            total = torch.zeros(10)
            for k in range(views):
                down, right = (int(draws.below(t, f"view {k} {way}", 3, n)[i, s]) - 1 for way in ("down", "right"))
                mirror = bool(draws.below(t, f"view {k} mirror", 2, n)[i, s])
                image = plain_augment(shards.images[position], pad, down, right, mirror)
                teacher = chosen[k - 1][i] if draw == "round" else chosen[k - 1][i][s]
                total += predict(own[i] if k == 0 else shared[teacher], image).detach()
            assert_close(p[i, s], total / views)


def test_predictions_do_not_depend_on_company() -> None:
    network = network_of(lambda: CNN(1, 8, 8, 10))
    params = params_of(network, 3)
    lists = [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 3]]
    shards = shards_of(pixels(1, 10, 1, 8, 8), torch.zeros(10, dtype=torch.int64), [[], [], []], lists)
    labeller = Labeller(network, Space(1, 8, 8, 10, (0.5,), (0.5,)), Augment(2, True), 100)
    near = Scene(topology([[1, 2], [0, 2], [0, 1]]), [0, 1, 2], [0, 1, 2]).near
    draws = draws_of(3)
    chosen = teachers(1, 2, near, draws, 6)
    together = labeller(1, params, params, chosen, shards, draws)
    for i in range(3):
        held = len(lists[i])
        mine = [c[[i], :held] for c in chosen]
        alone = labeller(1, params[[i]], params, mine, shards.rows([i]), draws.rows([i]))
        assert_close(together[i, :held], alone[0])
