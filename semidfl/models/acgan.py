"""The networks of the AC-GAN (Odena, Olah, Shlens 2017), a convolution a resolution, GroupNorm for BatchNorm.

Statistics over a batch would tie a sample to those beside it, and could not be averaged over clients;
GroupNorm sees one sample. Labels enter as vectors, so that a soft pseudo-label conditions softly.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.models.stacked import Conv2d, GroupNorm, Linear, fold, unfold

__all__ = ["LATENT", "DiscriminatorNet", "GeneratorNet"]

LATENT = 64
"""numbers of noise behind an image"""


class GeneratorNet(nn.Module):
    def __init__(self, channels: int, height: int, width: int, classes: int, features: int, levels: int) -> None:
        super().__init__()
        widths = _widths(features, levels)[::-1]
        self.sizes = _sizes(height, width, levels)[::-1]
        self.bottom = (widths[0], *self.sizes[0])
        self.seed = Linear(LATENT + classes, widths[0] * self.sizes[0][0] * self.sizes[0][1])
        self.norms = nn.ModuleList(_norm(w) for w in widths)
        self.grow = nn.ModuleList(Conv2d(a, b, 3) for a, b in pairwise(widths))
        self.paint = Conv2d(widths[-1], channels, 3)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """noise (C, B, LATENT), label vectors (C, B, K) -> signals in [-1, 1] (C, B, ch, H, W)."""
        x = fold(self.seed(torch.cat([noise, labels], dim=2)).unflatten(2, self.bottom))
        x = self.norms[0](x, act="relu")
        for conv, norm, size in zip(self.grow, self.norms[1:], self.sizes[1:], strict=True):
            x = norm(conv(F.interpolate(x, size=size, mode="nearest")), act="relu")
        return unfold(torch.tanh(self.paint(x)), noise.shape[0])


class DiscriminatorNet(nn.Module):
    def __init__(self, channels: int, height: int, width: int, classes: int, features: int, levels: int) -> None:
        super().__init__()
        widths, bottom = _widths(features, levels), _sizes(height, width, levels)[-1]
        self.stem = Conv2d(channels, widths[0], 3)
        self.shrink = nn.ModuleList(Conv2d(a, b, 3, stride=2) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(_norm(w) for w in widths[1:])
        self.head = Linear(widths[-1] * bottom[0] * bottom[1], 1 + classes)

    def forward(self, signals: Tensor) -> Tensor:
        """(C, B, ch, H, W) -> (C, B, 1 + K): the logit of "real", then those of the classes."""
        x = F.leaky_relu(self.stem(fold(signals)), 0.2)
        for conv, norm in zip(self.shrink, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), 0.2)
        scores: Tensor = self.head(unfold(x, signals.shape[0]).flatten(2))
        return scores


def _widths(features: int, levels: int) -> list[int]:
    """Channels from full resolution downwards, as in the UNet."""
    return [features * min(2, level + 1) for level in range(levels)]


def _sizes(height: int, width: int, levels: int) -> list[tuple[int, int]]:
    """Resolutions downwards, halved and rounded up as a strided convolution does."""
    return [(-(-height // 2**level), -(-width // 2**level)) for level in range(levels)]


def _norm(channels: int) -> GroupNorm:
    """Groups of eight channels: a group of one would be wiped out where the image is down to one pixel."""
    return GroupNorm(channels // 8, channels)
