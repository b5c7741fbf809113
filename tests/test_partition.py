"""The split of the data: nothing lost, nothing twice, nobody short, skew by alpha, the same for the same seed."""

import hashlib
import time
import warnings
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from semidfl.data import partition as module
from semidfl.data.partition import Split, class_counts, partition
from semidfl.errors import DataError

FIG1 = "LLMMUUUUUU"
LABELS = np.arange(1000) % 10

roles_of_some = st.text("LMU", min_size=1, max_size=12).filter(lambda roles: set(roles) & set("LM"))
alphas = st.sampled_from([1e-9, 0.01, 0.1, 1.0, 10.0, 100.0, 1e6])
seeds = st.integers(0, 2**63 - 1)


def flat(arrays: tuple[np.ndarray, ...]) -> list[int]:
    return sorted(np.concatenate(arrays).tolist())


def checksum(split: Split) -> str:
    parts = [part for arrays in (split.labelled, split.unlabelled) for a in arrays for part in ([len(a)], a)]
    return hashlib.sha256(np.concatenate(parts).astype("<i8").tobytes()).hexdigest()[:16]


def same(one: Split, other: Split) -> bool:
    return checksum(one) == checksum(other)


def check(split: Split, labels: np.ndarray, roles: str, ratio: float) -> None:
    """What holds for every split with enough samples for everyone."""
    count = max(1, round(ratio * len(labels) / 100))
    labelled, unlabelled = flat(split.labelled), flat(split.unlabelled)
    assert len(labelled) == count
    rest = set(range(len(labels))) - set(labelled)
    assert sorted(labelled + unlabelled) == (list(range(len(labels))) if set(roles) & set("MU") else labelled)
    for arrays, kinds, n in ((split.labelled, "LM", count), (split.unlabelled, "MU", len(rest))):
        holders = sum(role in kinds for role in roles)
        for role, array in zip(roles, arrays, strict=True):
            assert array.dtype == np.int64
            assert len(array) >= (ceil(n / holders / 2) if role in kinds else 0)
            assert role in kinds or not len(array)
    assert len(set(labelled)) == count


@given(roles_of_some, st.integers(30, 300), st.integers(1, 12), st.floats(1, 100), alphas, seeds)
def test_every_sample_goes_to_one_client_and_nobody_is_short(
    roles: str, n: int, classes: int, ratio: float, alpha: float, seed: int
) -> None:
    count = round(ratio * n / 100)
    assume(count >= len(roles) and (n - count >= len(roles) or not set(roles) & set("MU")))
    labels = np.random.default_rng(0).integers(classes, size=n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(partition(labels, roles, ratio, alpha, seed), labels, roles, ratio)


@pytest.mark.parametrize("alpha", [100.0, 10.0, 1.0, 0.1, 0.01])
@pytest.mark.parametrize(
    ("n", "ratio"), [(60000, 0.5), (60000, 0.1), (50000, 5.0), (50000, 1.0), (1437, 5.0), (1437, 2.0)]
)
def test_the_settings_of_the_paper(n: int, ratio: float, alpha: float) -> None:
    labels = np.random.default_rng(0).integers(10, size=n)
    check(partition(labels, FIG1, ratio, alpha, 0), labels, FIG1, ratio)


@pytest.mark.parametrize(("n", "ratio", "count"), [(60000, 0.5, 300), (60000, 0.1, 60), (1437, 5, 72), (50, 0.5, 1)])
def test_the_number_of_labels(n: int, ratio: float, count: int) -> None:
    assert len(flat(partition(np.arange(n) % 10, "MU", ratio, 1.0, 0).labelled)) == count


def test_an_unlucky_draw_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first client given everything in every draw, only the repair can feed the others."""
    monkeypatch.setattr(module, "_draw", lambda sizes, n, alpha, random: np.stack([sizes] + [sizes * 0] * (n - 1)))
    split = partition(LABELS, FIG1, 5.0, 1.0, 0)
    check(split, LABELS, FIG1, 5.0)
    assert len(split.unlabelled[2]) == 950 - 7 * ceil(950 / 8 / 2)
    assert same(split, partition(LABELS, FIG1, 5.0, 1.0, 0))


def test_a_giver_keeps_the_fair_share() -> None:
    """No client of the largest is emptied where two can share the giving."""
    counts = np.array([[1, 3], [4, 0], [2, 2], [0, 0]])
    assert module._repair(counts, 2).tolist() == [[1, 2], [3, 0], [2, 2], [1, 1]]


def test_full_clients_get_no_more() -> None:
    """Classes come one after the other: before its last one, nobody had more than 1.1 of the fair share."""
    for seed in range(20):
        counts = class_counts(partition(LABELS, "U" * 8 + "M", 10.0, 0.1, seed).unlabelled, LABELS, 10)
        for row in counts:
            last = np.flatnonzero(row)[-1]
            assert row[:last].sum() <= 1.1 * 900 / 9


def test_rounding_favours_nobody() -> None:
    """Near IID and with few samples a class, clients come out equal on average, the first like the last."""
    labels = np.arange(60) % 10
    sizes = np.mean([[len(a) for a in partition(labels, "LLLL", 100.0, 1e6, s).labelled] for s in range(200)], axis=0)
    assert sizes == pytest.approx(np.full(4, 15), abs=0.5)


# --- the seed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "expected"), [(100.0, "190840e6618f2a8a"), (0.1, "f9ceea96d393d2b9"), (0.01, "be31bde5236bcc14")]
)
def test_the_split_of_a_seed_is_frozen(alpha: float, expected: str) -> None:
    """A change here makes every published number a number of another split."""
    assert checksum(partition(LABELS, FIG1, 5.0, alpha, 7)) == expected


@given(seeds, alphas)
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_split_and_another_another(seed: int, alpha: float) -> None:
    np.random.seed(seed % 2**32)  # no draw may come from the global state
    one = partition(LABELS, FIG1, 5.0, alpha, seed)
    np.random.seed(1)
    assert same(one, partition(LABELS, FIG1, 5.0, alpha, seed))
    assert not same(one, partition(LABELS, FIG1, 5.0, alpha, seed + 1))


def test_labels_are_the_same_samples_for_every_alpha() -> None:
    drawn = {tuple(flat(partition(LABELS, FIG1, 5.0, alpha, 3).labelled)) for alpha in (100.0, 1.0, 0.01)}
    assert len(drawn) == 1


# --- skew ----------------------------------------------------------------------------------------


def skew(alpha: float) -> float:
    """Mean share of a client's largest class among its unlabelled samples, over ten seeds."""
    counts = [class_counts(partition(LABELS, FIG1, 5.0, alpha, s).unlabelled[2:], LABELS, 10) for s in range(10)]
    return float(np.mean([c.max(1) / c.sum(1) for c in counts]))


def test_skew_grows_as_alpha_falls() -> None:
    values = [skew(alpha) for alpha in (100.0, 10.0, 1.0, 0.1, 0.01)]
    assert all(high > low for low, high in pairwise(values))
    assert values[0] < 0.16  # near a tenth
    assert values[-1] > 0.6


# --- who has what --------------------------------------------------------------------------------


def test_all_labelled_over_all_clients() -> None:
    split = partition(LABELS, "L" * 10, 100.0, 1.0, 0)
    assert flat(split.labelled) == list(range(1000))
    assert not any(map(len, split.unlabelled))


def test_without_unlabelled_clients_the_rest_is_unused() -> None:
    split = partition(LABELS, "LL", 10.0, 1.0, 0)
    assert len(flat(split.labelled)) == 100
    assert not any(map(len, split.unlabelled))


def test_one_client_takes_all() -> None:
    split = partition(LABELS, "M", 10.0, 0.01, 0)
    assert len(split.labelled[0]) == 100
    assert flat(split.labelled + split.unlabelled) == list(range(1000))


@pytest.mark.parametrize("alpha", [100.0, 0.01])
def test_too_few_labels_are_drawn_with_replacement(alpha: float) -> None:
    with pytest.warns(UserWarning, match="^2 labels for 5 L- and M-clients: drawn with replacement"):
        split = partition(np.arange(100) % 10, "LLLMMUU", 2.0, alpha, 0)
    assert [len(a) for a in split.labelled] == [1, 1, 1, 1, 1, 0, 0]
    assert len(set(flat(split.labelled))) == 2
    assert not set(flat(split.labelled)) & set(flat(split.unlabelled))
    assert len(flat(split.unlabelled)) == len(set(flat(split.unlabelled))) == 98


def test_too_few_unlabelled_samples_leave_some_without() -> None:
    with pytest.warns(UserWarning, match="^2 unlabelled samples for 4 M- and U-clients"):
        split = partition(np.arange(10) % 5, "LUUUU", 80.0, 1.0, 0)
    assert len(flat(split.unlabelled)) == 2


@pytest.mark.parametrize("alpha", [100.0, 0.01])
def test_a_thousand_clients(alpha: float) -> None:
    """1437 samples: 72 labels for 400 clients, 1365 others for 800. Takes 0.8 s on one core of a server."""
    labels = np.random.default_rng(0).integers(10, size=1437)
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="^72 labels for 400"):
        split = partition(labels, "L" * 200 + "M" * 200 + "U" * 600, 5.0, alpha, 0)
    assert time.perf_counter() - start < 20
    assert all(len(a) == 1 for a in split.labelled[:400])
    assert min(map(len, split.unlabelled[200:])) == 1
    assert len(set(flat(split.unlabelled))) == 1365


def test_class_counts() -> None:
    labels = np.array([0, 2, 2, 1, 0])
    indices = (np.array([0, 1, 2]), np.array([], dtype=np.int64), np.array([3, 4, 4]))
    counts = class_counts(indices, labels, 4)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [2, 1, 0, 0]]


def test_gaps_between_the_class_numbers_do_no_harm() -> None:
    labels = np.where(LABELS > 4, 10**12, 3)
    check(partition(labels, FIG1, 10.0, 1.0, 0), labels, FIG1, 10.0)


@pytest.mark.parametrize(
    ("labels", "roles", "ratio", "alpha", "message"),
    [
        (LABELS[:0], FIG1, 5.0, 1.0, "empty"),
        (LABELS / 2, FIG1, 5.0, 1.0, "whole numbers, one a sample, not float64"),
        (LABELS.reshape(-1, 2), FIG1, 5.0, 1.0, r"of shape \(500, 2\)"),
        (LABELS - 2, FIG1, 5.0, 1.0, "labels hold -2"),
        (LABELS * 0 - 1, FIG1, 5.0, 1.0, "labels hold -1"),
        (LABELS, FIG1, 0.0, 1.0, "data.ratio = 0.0 is not legal"),
        (LABELS, FIG1, 100.5, 1.0, "data.ratio = 100.5 is not legal"),
        (LABELS, FIG1, float("nan"), 1.0, "data.ratio = nan"),
        (LABELS, FIG1, 5.0, 0.0, "data.alpha = 0.0 is not legal"),
        (LABELS, FIG1, 5.0, -1.0, "data.alpha = -1.0 is not legal"),
        (LABELS, FIG1, 5.0, float("inf"), "data.alpha = inf"),
        (LABELS, "UU", 5.0, 1.0, "at least one L or M"),
        (LABELS, "", 5.0, 1.0, "at least one L or M"),
        (LABELS, "LX", 5.0, 1.0, "the letters are L, M and U"),
    ],
)
def test_what_is_refused(labels: np.ndarray, roles: str, ratio: float, alpha: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        partition(labels, roles, ratio, alpha, 0)
