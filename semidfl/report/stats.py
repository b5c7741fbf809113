"""Statistics of accuracies that come in pairs: the same client, the same seed, two ways of training.

The clients of one run share their models and are not independent, so a p-value over clients is too small;
several seeds are the remedy. `semidfl compare` says so under its table.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from semidfl.report.extras import need

__all__ = ["bootstrap", "holm", "wilcoxon"]

Values = npt.NDArray[np.float64]

_RESAMPLES = 10_000
_CHUNK = 2**22
"""numbers drawn at a time: memory stays small for thousands of clients"""


def wilcoxon(one: Values, two: Values) -> float:
    """The two-sided p-value of the signed-rank test that the paired differences are symmetric about zero."""
    differences = one - two
    if not differences.any():
        return 1.0  # nothing to rank: not the least sign of a difference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties and small samples, where scipy itself picks another way
        return float(need("scipy.stats").wilcoxon(differences).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction for several tests at once, in the order of the input."""
    order = np.argsort(p_values, kind="stable")
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def bootstrap(values: Values, level: float = 0.95, resamples: int = _RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The percentile interval of the mean; the same seed gives the same interval."""
    random, means = np.random.default_rng(seed), []
    at_once = max(1, _CHUNK // len(values))
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        means.append(values[random.integers(len(values), size=(rows, len(values)))].mean(1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
