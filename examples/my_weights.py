"""An aggregation rule of one's own: listen only to the best half of the neighbourhood."""

import torch
from torch import Tensor

from semidfl.exchange.base import Neighbourhood


def best_half(accuracy: Tensor, near: Neighbourhood) -> Tensor:
    """accuracy (M,) of all that answered -> weights (C, G); rows sum to 1."""
    a = torch.where(near.mask, accuracy[near.index], -torch.inf)
    rank = a.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0 is the best
    chosen = near.mask & (rank < (near.count[:, None] + 1) // 2)
    return chosen / chosen.sum(1, keepdim=True).double()
