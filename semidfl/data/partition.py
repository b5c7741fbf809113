"""Which client holds which training samples (section 1 of `PAPER.md`).

A share of the samples, drawn at random, is labelled and split over the L- and M-clients; the others are
split over the M- and U-clients. Both splits are a Dirichlet draw for each class over the clients: a high
alpha gives everyone the same mix of classes, a low one gives each client few classes.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from semidfl.errors import DataError

__all__ = ["Split", "by_owner", "class_counts", "partition"]

Indices = npt.NDArray[np.int64]

_PURPOSE = 0x73706C69  # "spli": keeps these draws apart from all others of the same seed
_TRIES = 300  # of the paper's settings alpha = 0.01 on MNIST is hardest: one draw in 40 will do
_EVEN = 1e6  # an alpha so large that all get the same
_FULL = 1.1  # of the fair share: who has more gets nothing of the classes still to come


@dataclass(frozen=True)
class Split:
    """Indices into the training set: an ascending array a client, empty where it has none."""

    labelled: tuple[Indices, ...]
    unlabelled: tuple[Indices, ...]


def partition(labels: npt.NDArray[np.integer], roles: str, ratio: float, alpha: float, seed: int) -> Split:
    """Split the training set over clients of these roles, `ratio` percent of it labelled.

    With fewer labels than clients that need one, labels are drawn with replacement. Where all clients
    are L, what is not labelled stays unused. Where some samples have no label (-1), all others are labelled,
    whatever the ratio, and those without are dealt out evenly: their classes are not known.
    """
    _check(labels, roles, ratio, alpha)
    random = _random(seed)
    order = random.permutation(len(labels)).astype(np.int64)
    if complete := labels.min() >= 0:
        count = max(1, round(ratio * len(labels) / 100))
        labelled, unlabelled = order[:count], order[count:]
    else:
        labelled, unlabelled = order[labels[order] >= 0], order[labels[order] < 0]
    with_labels, without = _clients(roles, "LM"), _clients(roles, "MU")
    labelled = _enough(labelled, len(with_labels), random)
    if len(unlabelled) < len(without):
        text = f"{len(unlabelled)} unlabelled samples for {len(without)} M- and U-clients: not all get one"
        warnings.warn(text, stacklevel=2)
    return Split(
        _spread(labelled, labels, with_labels, len(roles), alpha, random),
        _spread(unlabelled, labels, without, len(roles), alpha if complete else _EVEN, random),
    )


def by_owner(labels: npt.NDArray[np.integer], owners: npt.NDArray[np.integer], clients: int) -> Split:
    """The split of data that already lies with its clients: labelled is what has a label."""
    own = [np.flatnonzero(owners == client).astype(np.int64) for client in range(clients)]
    return Split(tuple(i[labels[i] >= 0] for i in own), tuple(i[labels[i] < 0] for i in own))


def class_counts(indices: Sequence[Indices], labels: npt.NDArray[np.integer], classes: int) -> npt.NDArray[np.int64]:
    """How many samples of each class every client has, (N, K); those of unknown class are left out."""
    rows = [np.bincount(labels[i][labels[i] >= 0], minlength=classes) for i in indices]
    return np.array(rows, dtype=np.int64).reshape(len(indices), classes)


def _check(labels: npt.NDArray[np.integer], roles: str, ratio: float, alpha: float) -> None:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels must be whole numbers, one a sample, not {labels.dtype} of shape {labels.shape}")
    if not len(labels):
        raise DataError("the training set is empty: there is nothing to split")
    if labels.min() < -1 or labels.max() < 0:
        raise DataError(f"labels hold {labels.min()}: classes are counted from 0, -1 means that there is no label")
    if not 0 < ratio <= 100:
        raise DataError(f"data.ratio = {ratio} is not legal: it must be a percentage above 0 and at most 100")
    if not 1e-9 <= alpha < np.inf:
        raise DataError(f"data.alpha = {alpha} is not legal: it must be above 0 (at least 1e-9) and finite")
    if set(roles) - set("LMU") or not set(roles) & set("LM"):
        raise DataError(f"roles {roles!r} cannot share labels: the letters are L, M and U, at least one L or M")


def _random(seed: int) -> np.random.RandomState:
    # RandomState, not Generator: numpy has frozen its streams for good, so that a seed gives the same
    # split on every machine and with every version.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, _PURPOSE))))


def _clients(roles: str, kinds: str) -> Indices:
    return np.array([i for i, role in enumerate(roles) if role in kinds], dtype=np.int64)


def _enough(pool: Indices, clients: int, random: np.random.RandomState) -> Indices:
    """The labelled samples, some of them more than once where there are fewer than clients."""
    if len(pool) >= clients:
        return pool
    # From where the user called: past this function and `partition`.
    warnings.warn(f"{len(pool)} labels for {clients} L- and M-clients: drawn with replacement, one each", stacklevel=3)
    return np.concatenate([pool, pool[random.randint(len(pool), size=clients - len(pool), dtype=np.int64)]])


def _spread(
    pool: Indices,
    labels: npt.NDArray[np.integer],
    holders: Indices,
    n: int,
    alpha: float,
    random: np.random.RandomState,
) -> tuple[Indices, ...]:
    """The pool, which comes in random order, dealt to the holders among the n clients."""
    shares: list[Indices] = [np.empty(0, dtype=np.int64)] * n
    if len(pool) and len(holders):
        sizes = np.unique(labels[pool], return_counts=True)[1]
        counts = _deal(sizes, len(holders), alpha, random)  # (C, K)
        by_class = pool[np.argsort(labels[pool], kind="stable")]
        # Class by class, each holder takes its number from the random order within the class.
        owners = np.repeat(np.tile(np.arange(len(holders)), len(sizes)), counts.T.ravel())
        dealt = by_class[np.argsort(owners, kind="stable")]
        for holder, share in zip(holders, np.split(dealt, np.cumsum(counts.sum(1))[:-1]), strict=True):
            shares[holder] = np.sort(share)
    return tuple(shares)


def _deal(sizes: Indices, clients: int, alpha: float, random: np.random.RandomState) -> Indices:
    """Counts (C, K) of a draw that leaves no client short, else of the last draw, repaired."""
    least = _least(int(sizes.sum()), clients)
    for _ in range(_TRIES):
        counts = _draw(sizes, clients, alpha, random)
        if counts.sum(1).min() >= least:
            return counts
    return _repair(counts, least)


def _least(samples: int, clients: int) -> int:
    """Half a fair share, so at least one; nothing can be promised where samples are fewer than clients."""
    return ceil(samples / clients / 2) if samples >= clients else 0


def _draw(sizes: Indices, clients: int, alpha: float, random: np.random.RandomState) -> Indices:
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    weights = _log_gamma(alpha, (len(sizes), clients), random)
    held = np.zeros(clients, dtype=np.int64)
    full = _FULL * sizes.sum() / clients
    for k, size in enumerate(sizes):
        # Cuts between whole samples are rounded down, in favour of who comes last: so the order is random.
        order = random.permutation(clients)
        order = order[held[order] <= full]  # never empty: not all can have more than the mean
        counts[order, k] = _cut(weights[k, order], size)
        held += counts[:, k]
    return counts


def _log_gamma(alpha: float, shape: tuple[int, int], random: np.random.RandomState) -> npt.NDArray[np.float64]:
    """Logarithms of Gamma(alpha) draws; divided by their sum, such draws are Dirichlet(alpha).

    Gamma(a) is Gamma(a + 1) * U^(1/a). In logarithms nothing underflows: with alpha = 0.01 whole rows of
    plain draws are 0 once the full clients are left out, and 0/0 is no share.
    """
    uniform = 1 - random.random_sample(shape)  # in (0, 1]
    draws: npt.NDArray[np.float64] = np.log(random.standard_gamma(alpha + 1, shape)) + np.log(uniform) / alpha
    return draws


def _cut(weights: npt.NDArray[np.float64], size: int) -> Indices:
    """Whole numbers that add up to `size`, in proportion to weights given by their logarithms."""
    ends = np.cumsum(np.exp(weights - weights.max()))
    # Divided by the last end, not by the sum: the last is then exactly 1 and no sample is lost to rounding.
    cuts: Indices = np.floor(ends / ends[-1] * size).astype(np.int64)
    return np.diff(cuts, prepend=np.int64(0))


def _repair(counts: Indices, least: int) -> Indices:
    """Move samples from the largest client to the smallest, of its largest class, until none is short.

    The giver keeps the fair share, which the largest client always exceeds while another is short.
    """
    counts, held = counts.copy(), counts.sum(1)
    fair = int(held.sum()) // len(held)
    while held.min() < least:
        giver, taker = int(held.argmax()), int(held.argmin())
        k = int(counts[giver].argmax())
        moved = min(least - held[taker], held[giver] - fair, counts[giver, k])
        counts[giver, k] -= moved
        counts[taker, k] += moved
        held[giver] -= moved
        held[taker] += moved
    return counts
