"""Aggregation: Eq. 12 and Eq. 3 in plain Python, on any graph, with any of the neighbours missing."""

import math

import pytest
import torch
from helpers import CPU, Scene, assert_close, random, scenes, topology
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semidfl.exchange.base import Neighbourhood
from semidfl.learn.aggregate import adaptive_weights, equal_weights, mix

FIVE = topology([[1, 2, 3, 4], [0, 2], [0, 1], [0], [0]])

accuracies = st.lists(st.floats(0, 1), min_size=7, max_size=7)


def eq13(accuracy: dict[int, float], group: list[int]) -> dict[int, float]:
    mean = sum(accuracy[j] for j in group) / len(group)
    total = sum(math.exp(accuracy[j] - mean) for j in group)
    return {j: math.exp(accuracy[j] - mean) / total for j in group}


def by_id(scene: Scene, weights: Tensor) -> list[dict[int, float]]:
    """Row by row: client id -> weight, of all cells that count."""
    near = scene.near
    return [
        {scene.seen[p]: w for p, w, real in zip(places.tolist(), row.tolist(), mask.tolist(), strict=True) if real}
        for places, row, mask in zip(near.index, weights, near.mask, strict=True)
    ]


@given(scenes())
def test_a_neighbourhood_is_the_client_and_those_neighbours_that_answered(scene: Scene) -> None:
    near = scene.near
    for row, i in enumerate(scene.own):
        members = [scene.seen[p] for p in near.index[row][near.mask[row]].tolist()]
        assert members == scene.group(i)
        assert i in members
    assert near.count.tolist() == [len(scene.group(i)) for i in scene.own]


def test_a_missing_neighbour_is_left_out() -> None:
    near = Neighbourhood.of(FIVE, [0, 1], [0, 1, 4], CPU)
    assert near.index.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert near.mask.tolist() == [[True, True, True], [True, True, False]]


def test_alone_everyone_is_its_own_neighbourhood() -> None:
    near = Neighbourhood.alone(3, CPU)
    assert near.index.tolist() == [[0], [1], [2]]
    assert near.mask.all()


@given(scenes(), accuracies)
def test_adaptive_weights_are_those_of_eq_13(scene: Scene, values: list[float]) -> None:
    accuracy = dict(zip(scene.seen, values, strict=False))
    weights = adaptive_weights(torch.tensor(list(accuracy.values()), dtype=torch.float64), scene.near)
    for i, row in zip(scene.own, by_id(scene, weights), strict=True):
        assert row == pytest.approx(eq13(accuracy, scene.group(i)), rel=1e-12)
    assert weights.sum(1).tolist() == pytest.approx([1] * len(scene.own))
    assert not weights[~scene.near.mask].any()


@given(scenes())
def test_equal_weights_are_one_over_the_size(scene: Scene) -> None:
    for i, row in zip(scene.own, by_id(scene, equal_weights(scene.near)), strict=True):
        group = scene.group(i)
        assert row == pytest.approx({j: 1 / len(group) for j in group})
    assert not equal_weights(scene.near)[~scene.near.mask].any()


@given(scenes(), accuracies)
def test_mixing_is_the_weighted_sum_of_eq_3_both_ways(scene: Scene, values: list[float]) -> None:
    params = random(1, len(scene.seen), 11)
    accuracy = dict(zip(scene.seen, values, strict=False))
    weights = adaptive_weights(torch.tensor(list(accuracy.values())), scene.near)
    expected = torch.zeros(len(scene.own), 11)
    for row, i in enumerate(scene.own):
        for j, w in eq13(accuracy, scene.group(i)).items():
            expected[row] += w * params[scene.seen.index(j)]
    for ordered in (True, False):
        assert_close(mix(weights, scene.near, params, ordered), expected, 1e-6)


def test_mixing_a_large_sparse_graph() -> None:
    """The ring of 40: neighbourhoods of 3 are summed one by one here, without being asked to."""
    ring = topology([[(i - 1) % 40, (i + 1) % 40] for i in range(40)])
    scene = Scene(ring, list(range(40)), list(range(40)))
    params = random(1, 40, 9)
    expected = (params.roll(1, 0) + params + params.roll(-1, 0)) / 3
    for ordered in (True, False):
        assert_close(mix(equal_weights(scene.near), scene.near, params, ordered), expected, 1e-6)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_broken_network_reaches_its_neighbours_only(ordered: bool) -> None:
    """In a line of five, mixed as a product or not, client 0 is next to client 1 and to nobody else."""
    line = topology([[1], [0, 2], [1, 3], [2, 4], [3]])
    scene = Scene(line, list(range(5)), list(range(5)))
    params = random(1, 5, 7)
    params[0, 3] = torch.nan
    mixed = mix(equal_weights(scene.near), scene.near, params, ordered)
    assert mixed.isnan().any(1).tolist() == [True, True, False, False, False]


def test_ordered_mixing_gives_the_same_bits_wherever_clients_are_placed() -> None:
    """Neighbourhoods of 14 to 40: long enough that a sum over padded rows would take another order."""
    ids = list(range(40))
    graph = topology([[j for j in ids if j != i and i * j % 3 == 0] for i in ids])
    everyone = Scene(graph, ids, ids)
    params, accuracy = random(1, 40, 30), random(2, 40).sigmoid()
    all_weights = adaptive_weights(accuracy, everyone.near)
    together = mix(all_weights, everyone.near, params, ordered=True)
    for i in ids:
        alone = Scene(graph, [i], everyone.group(i))
        weights = adaptive_weights(accuracy[alone.seen], alone.near)
        assert torch.equal(weights[0], all_weights[i][everyone.near.mask[i]])
        assert torch.equal(mix(weights, alone.near, params[alone.seen], ordered=True)[0], together[i])


def test_who_agrees_stays() -> None:
    """A consensus is a fixed point: rows that sum to 1 leave equal models as they are."""
    scene = Scene(FIVE, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    params = random(1, 1, 30).expand(5, 30)
    weights = adaptive_weights(torch.tensor([0.1, 0.9, 0.4, 1.0, 0.0]), scene.near)
    assert_close(mix(weights, scene.near, params, ordered=False), params, 1e-6)
