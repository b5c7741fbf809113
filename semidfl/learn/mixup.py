"""Consensus MixUp (Eq. 10): every sample of a batch is blended with another of the same batch.

Labelled, pseudo-labelled and generated samples stand side by side in one batch, so the blend carries
labels from one source to the others.
"""

import torch
from torch import Tensor

__all__ = ["mixup", "partners"]


def mixup(images: Tensor, targets: Tensor, share: Tensor, partner: Tensor) -> tuple[Tensor, Tensor]:
    """x' = lambda x_m + (1 - lambda) x_n, y' likewise, with lambda folded to at least one half.

    images (C, E, S, …), targets (C, E, S, K), partner (C, E, S) is n; share is lambda, one a batch (C, E)
    or one a sample (C, E, S).
    """
    share = torch.maximum(share, 1 - share)
    if share.dim() == 2:
        share = share[:, :, None]
    return _blend(images, share, partner), _blend(targets, share, partner)


def _blend(x: Tensor, share: Tensor, partner: Tensor) -> Tensor:
    clients, steps = partner.shape[:2]
    c = torch.arange(clients, device=x.device)[:, None, None]
    e = torch.arange(steps, device=x.device)[None, :, None]
    return torch.lerp(x[c, e, partner], x, share.reshape(*share.shape, *(1 for _ in x.shape[3:])))


def partners(bits: Tensor, valid: Tensor) -> Tensor:
    """(C, E, S): a random permutation of each client's valid slots; the others only meet each other.

    `bits` (C, E, S) are random numbers below 2^32 that order the slots.
    """
    late = (~valid).long()[:, None, :] << 32
    shuffled = (bits + late).argsort(dim=2, stable=True)  # valid slots first, in random order
    in_place = late.expand_as(bits).argsort(dim=2, stable=True)  # valid slots first, in their order
    return torch.empty_like(shuffled).scatter_(2, in_place, shuffled)
