"""Augmentation on the device, each sample with its own draw: weak (crop, flip) and strong (affine, colour, cut-out).

A crop after padding by p is a shift of up to p pixels with zeros coming in, so the weak augmentation
is one gather from the pool.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.draws import Draws
from semidfl.models.stacked import fused

__all__ = ["Augment", "Augmentation", "Strong"]


class Augmentation(Protocol):
    def __call__(self, pool: Tensor, index: Tensor, draws: Draws, t: int, purpose: str) -> Tensor:
        """Pool (n, ch, H, W), positions (C, …) -> augmented uint8 images (C, …, ch, H, W)."""
        ...


@dataclass(frozen=True)
class Augment:
    """Weak: shifted by up to `pad` pixels each way, mirrored half the time if `flip`."""

    pad: int
    flip: bool

    def __call__(self, pool: Tensor, index: Tensor, draws: Draws, t: int, purpose: str) -> Tensor:
        side = 2 * self.pad + 1
        down = draws.below(t, f"{purpose} down", side, *index.shape[1:]) - self.pad
        right = draws.below(t, f"{purpose} right", side, *index.shape[1:]) - self.pad
        mirror = draws.below(t, f"{purpose} mirror", 2, *index.shape[1:]) * int(self.flip)
        images = _shifted(pool, index.flatten(), down.flatten(), right.flatten(), mirror.flatten().bool())
        return images.reshape(*index.shape, *pool.shape[1:])


def _shifted(pool: Tensor, index: Tensor, down: Tensor, right: Tensor, mirror: Tensor) -> Tensor:
    if fused(pool):
        from semidfl.models.kernels import shift

        return shift(pool, index, down, right, mirror)
    height, width = pool.shape[2:]
    rows = torch.arange(height, device=pool.device) - down[:, None]  # (n, H)
    columns = torch.arange(width, device=pool.device) - right[:, None]  # (n, W)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    columns = torch.where(mirror[:, None], width - 1 - columns, columns)
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    # The slice between two indices puts the channels last: (n, H, W, ch).
    pixels = pool[index[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return (pixels * inside[..., None]).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Strong:
    """Strong: the weak one's shift and flip, with rotation, scale and shear, and a square cut out.

    Images of three channels change in brightness, contrast and saturation, too.
    """

    pad: int
    flip: bool
    strength: float = 1.0  # of all below
    rotation: float = 20.0  # degrees either way
    scale: float = 0.15
    shear: float = 0.2
    colour: float = 0.5  # of brightness, contrast and saturation, as factors from 1 - colour to 1 + colour
    cutout: float = 0.35  # side of the square, as a share of the image's

    def __call__(self, pool: Tensor, index: Tensor, draws: Draws, t: int, purpose: str) -> Tensor:
        u = draws.uniform(t, f"{purpose} strong", *index.shape[1:], 9).flatten(0, -2)  # (n, 9)
        images = pool[index.flatten()].float()
        grid = F.affine_grid(self._maps(2 * u - 1, images.shape), list(images.shape), align_corners=False)
        turned = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        if images.shape[1] == 3:
            factors = draws.uniform(t, f"{purpose} colour", *index.shape[1:], 3).flatten(0, -2)
            turned = _recoloured(turned, 1 + (2 * factors - 1) * self.colour * self.strength)
        kept = turned * ~self._hole(u[:, 7:], images.shape)
        return kept.round().to(torch.uint8).reshape(*index.shape, *pool.shape[1:])

    def _maps(self, v: Tensor, shape: torch.Size) -> Tensor:
        """(n, 2, 3): where each pixel of the new image is taken from; v (n, 9) in [-1, 1)."""
        angle = v[:, 0] * math.radians(self.rotation) * self.strength
        zoom = 1 + v[:, 1] * self.scale * self.strength
        mirror = torch.where((v[:, 2] < 0) & self.flip, -1.0, 1.0)
        cos, sin = angle.cos() * zoom, angle.sin() * zoom
        shear = v[:, 3] * self.shear * self.strength
        right, down = v[:, 4] * 2 * self.pad / shape[3], v[:, 5] * 2 * self.pad / shape[2]
        first = torch.stack([mirror * cos, mirror * (cos * shear - sin), right], dim=1)
        second = torch.stack([sin, sin * shear + cos, down], dim=1)
        return torch.stack([first, second], dim=1)

    def _hole(self, centre: Tensor, shape: torch.Size) -> Tensor:
        """(n, 1, H, W): a square around a random centre, partly outside at times."""
        masks = []
        for axis, size in enumerate(shape[2:]):
            at = torch.arange(size, device=centre.device) + 0.5
            masks.append((at - centre[:, axis : axis + 1] * size).abs() < self.cutout * self.strength * size / 2)
        return (masks[0][:, :, None] & masks[1][:, None, :])[:, None]


def _recoloured(images: Tensor, factors: Tensor) -> Tensor:
    """(n, 3, H, W) in 0..255; factors (n, 3) of brightness, contrast (about the mean grey) and saturation."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    luma = torch.tensor([0.299, 0.587, 0.114], device=images.device)[:, None, None]  # BT.601
    images = (images * brightness).clamp(0, 255)
    mean = (images * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * contrast).clamp(0, 255)
    grey = (images * luma).sum(1, keepdim=True)
    return (grey + (images - grey) * saturation).clamp(0, 255)
