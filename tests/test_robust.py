"""Robust mixing against plain Python, on any graph with any of the neighbours missing; and what it is for."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import CPU, Scene, assert_close, random, scenes, topology
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semidfl.config import AggregationConfig
from semidfl.exchange.base import Neighbourhood
from semidfl.learn import robust
from semidfl.learn.aggregate import adaptive_weights, equal_weights, mix
from semidfl.learn.robust import clip, combiner, median, trimmed_mean
from tests.test_rounds import in_blocks, rounds_of, rows_of, ten

RULES = ["clip", "trimmed-mean", "median"]
SEVEN = topology([[j for j in range(7) if j != i] for i in range(7)])
ALL = Scene(SEVEN, list(range(7)), list(range(7)))


def plain_clip(own: int, group: dict[int, list[float]], weights: dict[int, float], radius: float) -> list[float]:
    """He et al. 2022, the radius a share of the own length: one neighbour and one number after the other."""
    here = group[own]
    far = {j: math.dist(x, here) for j, x in group.items()}
    limit = radius * math.hypot(*here)
    result = list(here)
    for j, x in group.items():
        shrink = min(1.0, limit / far[j]) if far[j] else 1.0
        result = [r + weights[j] * shrink * (a - b) for r, a, b in zip(result, x, here, strict=True)]
    return result


def plain_trimmed(group: dict[int, list[float]], trim: int) -> list[float]:
    drop = min(trim, (len(group) - 1) // 2)
    columns = (sorted(column) for column in zip(*group.values(), strict=True))
    return [statistics.fmean(column[drop : len(column) - drop]) for column in columns]


def groups(scene: Scene, params: Tensor) -> list[dict[int, list[float]]]:
    return [{j: params[scene.seen.index(j)].double().tolist() for j in scene.group(i)} for i in scene.own]


def weights_of(scene: Scene) -> Tensor:
    return adaptive_weights(random(3, len(scene.seen)).sigmoid(), scene.near)


def own_of(scene: Scene, params: Tensor) -> Tensor:
    return params[[scene.seen.index(i) for i in scene.own]]


@given(scenes(), st.sampled_from([0.3, 1.0, 2.0]), st.booleans())
def test_clip_is_the_plain_one(scene: Scene, radius: float, ordered: bool) -> None:
    params, weights = random(1, len(scene.seen), 11), weights_of(scene)
    found = clip(weights, scene.near, own_of(scene, params), params, radius, ordered)
    rows = [row[mask].tolist() for row, mask in zip(weights, scene.near.mask, strict=True)]
    for i, group, row, ours in zip(scene.own, groups(scene, params), rows, found, strict=True):
        expected = plain_clip(i, group, dict(zip(group, row, strict=True)), radius)
        assert_close(ours, torch.tensor(expected), 1e-5)


@given(scenes(), st.integers(1, 4))
def test_trimmed_mean_is_the_plain_one(scene: Scene, trim: int) -> None:
    params = random(1, len(scene.seen), 11)
    for group, ours in zip(groups(scene, params), trimmed_mean(scene.near, params, trim), strict=True):
        assert_close(ours, torch.tensor(plain_trimmed(group, trim)), 1e-6)


@given(scenes())
def test_median_is_the_median(scene: Scene) -> None:
    params = random(1, len(scene.seen), 11)
    for group, ours in zip(groups(scene, params), median(scene.near, params), strict=True):
        expected = [statistics.median(column) for column in zip(*group.values(), strict=True)]
        assert_close(ours, torch.tensor(expected), 1e-6)


def test_none_is_eq_3_to_the_bit() -> None:
    params, weights = random(1, 7, 11), weights_of(ALL)
    for ordered in (True, False):
        none = combiner(AggregationConfig(), ordered)
        assert torch.equal(none(weights, ALL.near, params, params), mix(weights, ALL.near, params, ordered))


def test_a_wide_clip_is_the_weighted_mean() -> None:
    params, weights = random(1, 7, 11), weights_of(ALL)
    found = clip(weights, ALL.near, params, params, 1e6, ordered=False)
    assert_close(found, mix(weights, ALL.near, params, ordered=True), 1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_names_lead_to_their_rules(rule: str) -> None:
    params, weights = random(1, 7, 11), weights_of(ALL)
    found = combiner(AggregationConfig(robust=rule, clip=0.5, trim=2), True)(weights, ALL.near, params, params)
    expected = {
        "clip": clip(weights, ALL.near, params, params, 0.5, True),
        "trimmed-mean": trimmed_mean(ALL.near, params, 2),
        "median": median(ALL.near, params),
    }
    assert torch.equal(found, expected[rule])
    assert not any(torch.equal(found, x) for name, x in expected.items() if name != rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lie", [1e3, -1e30, 3e38, math.inf, math.nan])
def test_a_minority_cannot_move_the_honest_far(rule: str, lie: float) -> None:
    """Two of seven, whatever they send: the honest stay within the honest, Eq. 3 does not."""
    params = random(1, 7, 50)
    params[[2, 5]] = lie
    honest = [0, 1, 3, 4, 6]
    config = AggregationConfig(robust=rule, trim=2)
    after = combiner(config, False)(equal_weights(ALL.near), ALL.near, params, params)[honest]
    before = params[honest]
    assert torch.isfinite(after).all()
    if rule == "clip":
        assert ((after - before).norm(dim=1) <= 0.3 * before.norm(dim=1)).all()
    else:
        assert (after >= before.amin(0)).all()
        assert (after <= before.amax(0)).all()
    spoilt = mix(equal_weights(ALL.near), ALL.near, params, False)[honest]
    assert not torch.isfinite(spoilt).all() or float((spoilt - before).norm(dim=1).min()) > 100


def test_more_liars_than_are_trimmed_do_move_it() -> None:
    params = random(1, 7, 50)
    params[[2, 5]] = 1e3
    assert float(trimmed_mean(ALL.near, params, 1)[0].min()) > 100
    params[[1, 3]] = 1e3  # four of seven: nothing can help
    assert float(median(ALL.near, params)[0].min()) > 100


def test_the_claimed_accuracy_does_not_outvote_the_median() -> None:
    """Two liars with the highest claim against three: weighed by Eq. 12, they would have the larger half."""
    scene = Scene(topology([[1, 2, 3, 4], *([[0]] * 4)]), [0], [0, 1, 2, 3, 4])
    params = torch.tensor([[0.0], [0.1], [0.2], [9.0], [9.0]])
    weights = adaptive_weights(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0]), scene.near)
    assert float(weights[0, 3:].sum()) > 0.5
    assert float(median(scene.near, params)) == pytest.approx(0.2)


@pytest.mark.parametrize("rule", RULES)
def test_a_padded_cell_that_points_at_a_liar_does_no_harm(rule: str) -> None:
    """Short lists are padded with position 0; there, NaN times a weight of 0 would be NaN."""
    graph = topology([[1], [0, 2, 3], [1, 3], [1, 2]])
    params = random(1, 4, 9)
    params[0] = math.nan
    near = Neighbourhood.of(graph, [1, 2, 3], [0, 1, 2, 3], CPU)
    assert not near.mask.all()
    found = combiner(AggregationConfig(robust=rule), False)(equal_weights(near), near, params[1:], params)
    assert torch.isfinite(found).all()


def test_large_models_are_sorted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    params = random(1, 7, 101)
    whole = trimmed_mean(ALL.near, params, 2)
    monkeypatch.setattr(robust, "_CELLS", 7 * 7 * 8)
    assert torch.equal(trimmed_mean(ALL.near, params, 2), whole)
    monkeypatch.setattr(robust, "_CELLS", 1)
    assert torch.equal(trimmed_mean(ALL.near, params, 2), whole)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_wherever_clients_are_placed(rule: str) -> None:
    """Neighbourhoods of 14 to 40 and of several lengths, one of the clients infinite."""
    ids = list(range(40))
    graph = topology([[j for j in ids if j != i and i * j % 3 == 0] for i in ids])
    everyone = Scene(graph, ids, ids)
    params, accuracy = random(1, 40, 1001), random(2, 40).sigmoid()
    params[9] = math.inf
    combine = combiner(AggregationConfig(robust=rule, trim=3), True)
    together = combine(adaptive_weights(accuracy, everyone.near), everyone.near, params, params)
    for i in [i for i in ids if i != 9]:
        alone = Scene(graph, [i], everyone.group(i))
        weights = adaptive_weights(accuracy[alone.seen], alone.near)
        found = combine(weights, alone.near, params[i : i + 1], params[alone.seen])
        assert torch.equal(found[0], together[i]), i


ROUNDED = {"exchange__dtype": "bf16", "exchange__generator_dtype": "int8", "exchange__generator_every": 2}
NOISE = {"attack__kind": "noise", "attack__count": 3}


@pytest.mark.parametrize(
    "values",
    [
        {"aggregation__robust": "clip", "aggregation__momentum": True, **ROUNDED, **NOISE},
        {"aggregation__robust": "trimmed-mean", "attack__kind": "label-flip", "attack__count": 2},
        {"aggregation__robust": "median", "exchange__dtype": "int8"},
    ],
    ids=lambda values: values["aggregation__robust"],
)
def test_a_run_gives_the_same_bits_in_one_cohort_and_in_three(values: dict[str, Any]) -> None:
    """With liars and rounded messages, too."""
    config = ten(compute__deterministic=True, rounds=3, **values)
    _, cohort, _ = rounds_of(config)
    spread = in_blocks(config, [[9, 0, 5], [7, 1], [2, 8, 3, 6, 4]])
    for client, tensors in rows_of(cohort).items():
        assert tensors.keys() == spread[client].keys()
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"


@pytest.mark.parametrize("rule", RULES)
def test_classifier_generator_and_momentum_are_all_protected(rule: str) -> None:
    """One client of fig1 sends NaN from the start; after some rounds its neighbours hold none."""
    config = ten(aggregation__robust=rule, aggregation__momentum=True, attack__kind="nan", attack__who="4", rounds=3)
    _, cohort, _ = rounds_of(config)
    assert cohort.generator is not None
    for x in (cohort.classifier.params, cohort.generator.params, cohort.classifier.optimiser["velocity"]):
        assert torch.isfinite(x).all()
    _, cohort, _ = rounds_of(replace(config, aggregation=AggregationConfig(momentum=True)))
    assert not torch.isfinite(cohort.classifier.params).all()
