"""Mixing that withstands a minority of neighbours who lie. The paper trusts everybody: `none` is its Eq. 3.

- clip: a neighbour's distance to the own model is cut to a radius before it is mixed in (centred clipping, Karimireddy
  et al. 2021, around the own model, He et al. 2022). The radius is a share of the own model's length, so no neighbour
  has a say in it. A median of the distances, which adapts by itself, was tried: where most neighbours have no labels
  and so stand still, it is 0, and nobody ever listens to those who learn.
- trimmed-mean: of every weight, the largest and smallest `trim` values of the neighbourhood are dropped, the others
  averaged (Yin et al. 2018).
- median: as many dropped as can be.

The last two count all neighbours alike: Eq. 12 weighs them by an accuracy which is each one's own claim, and would let
two liars outvote three others. In clip the claim stays bounded, for the weights are; with any of them, how much
a neighbour claims to have learnt from (`aggregation.idle`) does not count. All three leave out models that are not
finite. A neighbourhood takes in whoever answered; of a short one fewer values are dropped, never all.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from semidfl.cohort import each
from semidfl.config import AggregationConfig
from semidfl.exchange.base import Neighbourhood
from semidfl.learn.aggregate import mix

__all__ = ["Combine", "clip", "combiner", "median", "trimmed_mean"]

Combine = Callable[[Tensor, Neighbourhood, Tensor, Tensor], Tensor]
"""(weights (C, G), neighbourhood, own models (C, D), models of all that answered (M, D)) -> mixed models (C, D)"""

_CELLS = 1 << 24
"""numbers that are sorted at a time: bounds the memory where neighbourhoods or networks are large"""


def combiner(config: AggregationConfig, ordered: bool) -> Combine:
    """The rule that the config names; `ordered`: the same bits wherever clients are placed."""
    if config.robust == "clip":
        return lambda weights, near, own, params: clip(weights, near, own, params, config.clip, ordered)
    if config.robust == "trimmed-mean":
        return lambda weights, near, own, params: trimmed_mean(near, params, config.trim)
    if config.robust == "median":
        return lambda weights, near, own, params: median(near, params)
    return lambda weights, near, own, params: mix(weights, near, params, ordered)


def clip(weights: Tensor, near: Neighbourhood, own: Tensor, params: Tensor, radius: float, ordered: bool) -> Tensor:
    """theta_i + sum over j in G_i of w_ij times theta_j - theta_i, cut to `radius` |theta_i|. -> (C, D)."""
    near = _finite(near, params)

    def work(weights: Tensor, index: Tensor, mask: Tensor, own: Tensor) -> Tensor:
        total, limit = own.clone(), radius * own.norm(dim=1)
        for w, j, there in zip(weights.float().unbind(1), index.unbind(1), mask.unbind(1), strict=True):
            apart = params[j] - own
            far = apart.norm(dim=1)
            scale = torch.where(far > limit, limit / far, 1.0)
            # Chosen, not multiplied by 0: what is left out may be infinite.
            total += torch.where((there & far.isfinite())[:, None], (w * scale)[:, None] * apart, 0.0)
        return total

    # The length of a vector is a sum whose order, and so its last bits, may depend on how many are summed at once.
    return each(work, 1 if ordered else len(own), weights, near.index, near.mask, own)


def median(near: Neighbourhood, params: Tensor) -> Tensor:
    """Of every weight the median of the neighbourhood, or the mean of the middle two. params (M, D) -> (C, D)."""
    return trimmed_mean(near, params, near.index.shape[1])


def trimmed_mean(near: Neighbourhood, params: Tensor, trim: int) -> Tensor:
    """Of every weight the mean of the neighbourhood without its `trim` largest and smallest. (M, D) -> (C, D)."""
    near = _finite(near, params)
    count = near.count
    drop = ((count - 1) // 2).clamp(max=trim)
    place = torch.arange(near.index.shape[1], device=params.device)
    kept = (drop[:, None] <= place) & (place < (count - drop)[:, None])  # (C, G), by rank
    parts = []
    for some in params.split(max(1, _CELLS // near.index.numel()), dim=1):
        values = torch.where(near.mask[:, :, None], some[near.index], torch.inf)  # (C, G, d): what is not there, last
        ranked = values.sort(1).values
        total = torch.zeros_like(ranked[:, 0])
        for rank, keep in enumerate(kept.unbind(1)):  # one by one: padding then changes no bit
            total += torch.where(keep[:, None], ranked[:, rank], 0.0)
        parts.append(total / (count - 2 * drop)[:, None])
    return torch.cat(parts, dim=1)


def _finite(near: Neighbourhood, params: Tensor) -> Neighbourhood:
    """Without those whose model holds a number that is not one."""
    low, high = params.aminmax(dim=1)
    return replace(near, mask=near.mask & (low.isfinite() & high.isfinite())[near.index])
