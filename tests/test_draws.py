"""Random numbers: SplitMix64 as published, one sequence a client, round and purpose, and the right distributions."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations

import pytest
import torch
from helpers import CPU, draws_of
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from semidfl.draws import Draws

WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15
words_64 = st.integers(0, 2**63 - 1)


def finalise(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def splitmix64(state: int) -> Iterator[int]:
    """As in Steele, Lea and Flood (2014) and Vigna's splitmix64.c."""
    while True:
        state = (state + GAMMA) % WORD
        yield finalise(state)


def sequence(seed: int, client: int, t: int, purpose: str) -> Iterator[int]:
    """The key derivation of `Draws`, in whole numbers of Python."""
    key = finalise((finalise((seed + GAMMA) % WORD) + (client + 1) * GAMMA) % WORD)
    name = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    return splitmix64(finalise(finalise((key + (t + 1) * GAMMA) % WORD) ^ name))


def unsigned(words: Tensor) -> list[int]:
    return [w % WORD for w in words.tolist()]


def many(values: Tensor) -> list[float]:
    return values.flatten().tolist()


def test_the_reference_gives_the_published_numbers() -> None:
    assert list(islice(splitmix64(1234567), 5)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(words_64, st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.integers(0, 10**6), st.text(max_size=8))
def test_words_are_splitmix64(seed: int, clients: list[int], t: int, purpose: str) -> None:
    words = Draws.of([seed] * len(clients), clients, CPU).words(t, purpose, 6)
    for client, row in zip(clients, words, strict=True):
        assert unsigned(row) == list(islice(sequence(seed, client, t, purpose), 6))


def test_bits_are_the_halves_of_the_words() -> None:
    words = list(islice(sequence(7, 1, 3, "x"), 3))
    halves = [half for w in words for half in (w % 2**32, w >> 32)]
    assert draws_of(2).bits(3, "x", 5)[1].tolist() == halves[:5]
    assert draws_of(2).bits(3, "x", 2, 3)[1].flatten().tolist() == halves


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: d.words(2, "x", 5),
        lambda d: d.uniform(2, "x", 3, 5),
        lambda d: d.below(2, "x", 1000, 7),
        lambda d: d.normal(2, "x", 3, 3),
        lambda d: d.order(2, "x", 2, 9),
        lambda d: d.beta(2, "x", 0.5, 4),
    ],
    ids=["words", "uniform", "below", "normal", "order", "beta"],
)
def test_a_client_draws_the_same_in_any_company(draw) -> None:
    everyone = draw(draws_of(10))
    assert len({tuple(many(row)) for row in everyone}) == 10
    assert torch.equal(draw(Draws.of([7], [3], CPU))[0], everyone[3])
    assert torch.equal(draw(Draws.of([8, 7], [3, 9], CPU))[1], everyone[9])  # a sweep stacks several seeds
    assert torch.equal(draw(draws_of(10).rows([5, 2])), everyone[[5, 2]])
    assert torch.equal(draw(draws_of(10).rows(slice(4, 6))), everyone[4:6])


def test_below_with_a_bound_for_each_client_does_not_mix_them_up() -> None:
    bound = torch.tensor([3, 50, 7])
    together = draws_of(3).below(1, "x", bound, 40)
    for i in range(3):
        assert torch.equal(draws_of(3).rows([i]).below(1, "x", bound[i : i + 1], 40)[0], together[i])


def test_every_part_of_the_address_counts() -> None:
    """No two of these sequences share a word: with 64 bits that never happens by chance."""
    heads = [
        draws_of(4, seed).words(t, purpose, 50)
        for seed in (0, 1, 2**63 - 1)
        for t in (0, 1, 2)
        for purpose in ("level", "noise", "")
    ]
    words = torch.cat(heads).flatten().tolist()
    assert len(set(words)) == len(words) == 3 * 3 * 3 * 4 * 50


def test_clients_rounds_and_neighbouring_draws_are_not_correlated() -> None:
    n = 20_000
    here, there = draws_of(2).normal(1, "x", n)
    later = draws_of(1).normal(2, "x", n)[0]
    half = n // 2  # Box and Muller give the two halves from the same words
    pairs = [(here, there), (here, later), (here[:-1], here[1:]), (here[:half], here[half:])]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 4 / len(a) ** 0.5


# --- distributions -----------------------------------------------------------------------------------------
# The seeds are fixed, so these never fail by chance; wrong distributions give p-values of 1e-10 and less.


def fits(sample: Tensor, distribution) -> bool:
    return stats.kstest(many(sample), distribution.cdf).pvalue > 0.001


def test_uniform() -> None:
    sample = draws_of(4).uniform(1, "x", 100, 100)
    assert sample.shape == (4, 100, 100)
    assert sample.dtype == torch.float32
    assert 0 <= sample.min().item() < 1e-3
    assert 0.999 < sample.max().item() < 1
    assert all(fits(row, stats.uniform) for row in sample)


@pytest.mark.parametrize("shape", [(20_000,), (3, 6667)])  # an even and an odd number of draws
def test_normal(shape: tuple[int, ...]) -> None:
    sample = draws_of(3).normal(1, "x", *shape)
    assert sample.shape == (3, *shape)
    for row in sample:
        assert abs(row.mean().item()) < 0.03
        assert abs(row.var().item() - 1) < 0.04
        assert fits(row, stats.norm)


@pytest.mark.parametrize("beta", [0.5, 0.75, 1.0, 2.0, 8.0])
def test_beta(beta: float) -> None:
    sample = draws_of(3).beta(1, "x", beta, 100, 200)
    assert sample.shape == (3, 100, 200)
    assert 0 <= sample.min().item() < sample.max().item() <= 1
    assert abs(sample.mean().item() - 0.5) < 0.01
    assert abs(sample.var().item() - 1 / (4 * (2 * beta + 1))) < 0.003
    assert all(fits(row, stats.beta(beta, beta)) for row in sample)


@pytest.mark.parametrize("beta", [0.1, 0.25, 0.5, 0.75, 2.0, 8.0, 100.0])
def test_beta_inverts_the_distribution_function(beta: float) -> None:
    """Sharper than a test of samples: each draw against its own probability."""
    p, x = draws_of(1).uniform(1, "x", 20_000), draws_of(1).beta(1, "x", beta, 20_000)
    error = abs(stats.beta(beta, beta).cdf(x.double().numpy()) - p.double().numpy())[0]
    low = p[0].numpy() < 0.5  # near 1, float32 is too coarse to tell
    inner = low & (p[0].numpy() > 0.01)
    assert error[low].max() < 1e-3
    assert error[inner].max() < 5e-5  # within a cell of the table, too


def test_below_is_uniform() -> None:
    sample = draws_of(2).below(1, "x", 7, 7000)
    for row in sample:
        assert stats.chisquare([Counter(row.tolist())[k] for k in range(7)]).pvalue > 0.001
        assert 0 <= int(row.min()) <= int(row.max()) < 7


def test_below_a_bound_for_each_client() -> None:
    bound = torch.tensor([0, 1, 3, 2**31 - 1])
    sample = draws_of(4).below(1, "x", bound, 30, 40)
    assert sample.shape == (4, 30, 40)
    assert not sample[:2].any()
    assert set(sample[2].flatten().tolist()) == {0, 1, 2}
    assert sample[3].min() >= 0
    assert (sample[3].double() / (2**31)).mean().item() == pytest.approx(0.5, abs=0.03)
    assert draws_of(4).below(1, "x", bound).shape == (4,)


def test_order_is_a_permutation_of_the_last_axis_and_all_are_as_likely() -> None:
    orders = draws_of(2).order(1, "x", 3000, 3)
    found = Counter(map(tuple, orders[0].tolist()))
    assert set(found) == set(permutations(range(3)))
    assert stats.chisquare(list(found.values())).pvalue > 0.001
    long = draws_of(2).order(1, "x", 1000)
    assert torch.equal(long.sort(1).values, torch.arange(1000).expand(2, -1))
