"""The diffusion model's network: a residual UNet that knows the noise level and the class.

Labels enter as vectors, so that a soft pseudo-label conditions softly and the zero vector means "any
class". Both conditions scale and shift the second normalisation of every block.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.models.stacked import Conv2d, GroupNorm, Linear, concat, fold, per_channel, unfold

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
        scale, shift = (per_channel(v) for v in self.condition(condition).chunk(2, dim=2))
        h = self.norm2(self.conv1(F.silu(self.norm1(x)))) * (1 + scale) + shift
        out: Tensor = self.shortcut(x) + self.conv2(F.silu(h))
        return out


class UNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int, levels: int) -> None:
        super().__init__()
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
        x, skips = self.stem(fold(noisy)), []
        for depth, block in enumerate(self.down):
            x = block(self.shrink[depth - 1](x) if depth else x, condition)
            skips.append(x)
        x = self.middle(x, condition)
        for block in self.up:
            skip = skips.pop()
            if x.shape[2:] != skip.shape[2:]:
                x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = block(concat(x, skip, clients), condition)
        return unfold(self.out(F.silu(self.norm(x))), clients)


def _waves(level: Tensor, width: int) -> Tensor:
    """Sines and cosines of the noise level at geometric frequencies: (C, B) -> (C, B, width)."""
    steps = torch.arange(width // 2, device=level.device)
    frequency = torch.exp(steps * (-math.log(10_000) / (width // 2)))
    angle = level[:, :, None].float() * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=2)
