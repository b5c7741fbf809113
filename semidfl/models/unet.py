"""The diffusion model's network: a residual UNet that knows the noise level and the class.

Labels enter as vectors, so that a soft pseudo-label conditions softly and the zero vector means "any
class". Both conditions scale and shift the second normalisation of every block.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.models.stacked import Conv2d, GroupNorm, Linear, fold, join, unfold

__all__ = ["UNet"]

_GROUPS = 8


class _Block(nn.Module):
    def __init__(self, inp: int, out: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = GroupNorm(_GROUPS, inp), Conv2d(inp, out, 3)
        self.condition = Linear(condition, 2 * out)
        # Zero at the start: each block begins as the identity.
        self.norm2, self.conv2 = GroupNorm(_GROUPS, out), Conv2d(out, out, 3, zero=True)
        self.shortcut = Conv2d(inp, out, 1) if inp != out else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.norm2(self.conv1(self.norm1(x, act="silu")), self.condition(condition), "silu")
        out: Tensor = self.conv2(h, self.shortcut(x))
        return out


class UNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int, levels: int, patch: int = 1) -> None:
        super().__init__()
        self.patch, channels = patch, channels * patch**2
        widths = [width * min(2, level + 1) for level in range(levels)]
        self.width, condition = width, 4 * width
        self.time1, self.time2 = Linear(width, condition), Linear(condition, condition)
        self.label = Linear(classes, condition, bias=False)
        self.stem = Conv2d(channels, width, 3)
        self.down = nn.ModuleList(_Block(w, w, condition) for w in widths)
        self.shrink = nn.ModuleList(Conv2d(a, b, 3, stride=2) for a, b in pairwise(widths))
        self.middle = _Block(widths[-1], widths[-1], condition)
        above = [widths[-1], *reversed(widths[1:])]
        self.up = nn.ModuleList(_Block(a + w, w, condition) for a, w in zip(above, reversed(widths), strict=True))
        self.norm, self.out = GroupNorm(_GROUPS, width), Conv2d(width, channels, 3, zero=True)

    def forward(self, noisy: Tensor, level: Tensor, labels: Tensor) -> Tensor:
        """noisy (C, B, ch, H, W), level (C, B) in 0..T-1, label vectors (C, B, K) -> noise, as noisy."""
        clients = noisy.shape[0]
        time = self.time2(F.silu(self.time1(_waves(level, self.width).to(noisy.dtype))))
        condition = F.silu(time + self.label(labels))
        x, skips = self.stem(fold(_squares(noisy, self.patch))), []
        for depth, block in enumerate(self.down):
            x = block(self.shrink[depth - 1](x) if depth else x, condition)
            skips.append(x)
        x = self.middle(x, condition)
        for block in self.up:
            x = block(join(x, skips.pop(), clients), condition)
        out = unfold(self.out(self.norm(x, act="silu")), clients)
        return _pixels(out, self.patch, *noisy.shape[3:])


def _squares(x: Tensor, side: int) -> Tensor:
    """Squares of pixels as channels: (C, B, ch, H, W) -> (C, B, ch * side^2, H / side, W / side), rounded up."""
    if side == 1:
        return x
    height, width = (-n % side for n in x.shape[3:])
    x = F.pad(x, (0, width, 0, height)).unflatten(4, (-1, side)).unflatten(3, (-1, side))
    return x.permute(0, 1, 2, 4, 6, 3, 5).flatten(2, 4)


def _pixels(x: Tensor, side: int, height: int, width: int) -> Tensor:
    """What `_squares` did, undone."""
    if side == 1:
        return x
    x = x.unflatten(2, (-1, side, side)).permute(0, 1, 2, 5, 3, 6, 4)
    return x.flatten(5, 6).flatten(3, 4)[:, :, :, :height, :width]


def _waves(level: Tensor, width: int) -> Tensor:
    """Sines and cosines of the noise level at geometric frequencies: (C, B) -> (C, B, width)."""
    steps = torch.arange(width // 2, device=level.device)
    frequency = torch.exp(steps * (-math.log(10_000) / (width // 2)))
    angle = level[:, :, None].float() * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=2)
