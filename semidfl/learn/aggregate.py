"""Adaptive aggregation (Eq. 12) and the consensus update (Eq. 3)."""

from collections.abc import Callable

import torch
from torch import Tensor

from semidfl.errors import ConfigError, nearest
from semidfl.exchange.base import Neighbourhood, row_sum
from semidfl.models.stacked import fused
from semidfl.plugins import find_plugin

__all__ = ["adaptive_weights", "equal_weights", "find_rule", "mix", "say"]

Rule = Callable[[Tensor, Neighbourhood], Tensor]
"""(accuracy (M,), neighbourhood) -> weights (C, G), rows that sum to 1 and are 0 where the mask is."""


def equal_weights(near: Neighbourhood) -> Tensor:
    """(C, G): one over the size of the neighbourhood."""
    return near.mask / near.count[:, None].double()


def adaptive_weights(accuracy: Tensor, near: Neighbourhood) -> Tensor:
    """Eq. 12: w_ij = softmax over j in G_i of a_j - mean of a over G_i. accuracy (M,) -> (C, G)."""
    a = torch.where(near.mask, accuracy.double()[near.index], 0.0)
    centred = a - row_sum(a) / near.count[:, None]
    e = torch.where(near.mask, centred.exp(), 0.0)
    return e / row_sum(e)


def say(taught: Tensor | None, idle: float) -> Tensor | None:
    """(M,): factors of the weights, `idle` for who had nothing to learn from; None: all alike.

    taught: as neighbours claim, 1 for labels and up to 1 more for pseudo-labels.
    """
    return None if taught is None else idle + (1 - idle) * taught.nan_to_num(0.0).clamp(0, 2)


def mix(weights: Tensor, near: Neighbourhood, params: Tensor, ordered: bool) -> Tensor:
    """Eq. 3: theta_i = sum over j in G_i of w_ij theta_j. weights (C, G), params (M, D) -> (C, D).

    `ordered` sums neighbour by neighbour, the same bits wherever clients are placed. It also costs only
    (C G) D, less than the dense product's C M D on large sparse graphs. On a GPU products are not exact enough. And
    in the product a network that is no number any more would reach those who are no neighbours: 0 times NaN is NaN.
    """
    if fused(params):
        from semidfl.models import kernels

        return kernels.mixed(weights, near.index, params)
    clients, seen = near.index.shape[0], params.shape[0]
    if ordered or params.is_cuda or near.index.shape[1] * 8 < seen or not params.sum().isfinite():
        total = torch.zeros(clients, params.shape[1], device=params.device)
        for w, j in zip(weights.float().unbind(1), near.index.unbind(1), strict=True):
            total += w[:, None] * params[j]
        return total
    dense = torch.zeros(clients, seen, dtype=torch.float64, device=params.device)
    dense.scatter_add_(1, near.index, weights)
    return dense.float() @ params


RULES: dict[str, Rule] = {
    "constant": lambda accuracy, near: equal_weights(near),
    "adatest": adaptive_weights,  # the same rule; what differs is what the accuracy was measured on
    "adagen": adaptive_weights,
}


def find_rule(name: str) -> Rule:
    """The rule behind a name, of the package or of your own."""
    found: Rule | None = RULES.get(name) or find_plugin("weights", "aggregation.weights", name)
    if found is None:
        legal = ", ".join(RULES)
        raise ConfigError(
            f"aggregation.weights = {name!r} is not legal: {legal} or module:function{nearest(name, RULES)}"
        )
    return found
