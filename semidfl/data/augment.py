"""Weak augmentation, batched on the device, each sample with its own draw: random crop and flip.

A crop after padding by p is a shift of up to p pixels with zeros coming in, so the whole augmentation
is one gather from the pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from semidfl.draws import Draws

__all__ = ["Augment"]


@dataclass(frozen=True)
class Augment:
    pad: int
    flip: bool

    def __call__(self, pool: Tensor, index: Tensor, draws: Draws, t: int, purpose: str) -> Tensor:
        """Pool (n, ch, H, W), positions (C, …) -> augmented uint8 images (C, …, ch, H, W)."""
        side = 2 * self.pad + 1
        down = draws.below(t, f"{purpose} down", side, *index.shape[1:]) - self.pad
        right = draws.below(t, f"{purpose} right", side, *index.shape[1:]) - self.pad
        mirror = draws.below(t, f"{purpose} mirror", 2, *index.shape[1:]) * int(self.flip)
        images = _shifted(pool, index.flatten(), down.flatten(), right.flatten(), mirror.flatten().bool())
        return images.reshape(*index.shape, *pool.shape[1:])


def _shifted(pool: Tensor, index: Tensor, down: Tensor, right: Tensor, mirror: Tensor) -> Tensor:
    height, width = pool.shape[2:]
    rows = torch.arange(height, device=pool.device) - down[:, None]  # (n, H)
    columns = torch.arange(width, device=pool.device) - right[:, None]  # (n, W)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    columns = torch.where(mirror[:, None], width - 1 - columns, columns)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    # The slice between two indices puts the channels last: (n, H, W, ch).
    pixels = pool[index[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return (pixels * inside[..., None]).permute(0, 3, 1, 2)
