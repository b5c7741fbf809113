"""The three networks as anyone would write them: plain torch.nn, one client, float32.

Their parameters carry the names of ours (`Network.named`), so weights go from one to the other and the tests hold
one against the other.
"""

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.config import Config
from semidfl.data.shards import Space

__all__ = ["PlainCNN", "PlainResNet18", "PlainUNet", "plain_classifier", "plain_generator"]

_GROUPS = 8


def plain_classifier(config: Config, space: Space) -> nn.Module:
    if config.classifier.model == "resnet18":
        return PlainResNet18(space.channels, space.classes)
    return PlainCNN(space.channels, space.height, space.width, space.classes)


def plain_generator(config: Config, space: Space) -> nn.Module:
    g = config.generator
    return PlainUNet(space.channels, space.classes, g.width, g.levels, g.patch)


class PlainCNN(nn.Module):
    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 6, 3, padding=1), nn.Conv2d(6, 25, 3, padding=1)
        self.hidden, self.out = nn.Linear(25 * (height // 4) * (width // 4), 50), nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return cast(Tensor, self.out(F.relu(self.hidden(x.flatten(1)))))


class _Residual(nn.Module):
    def __init__(self, inp: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False), nn.GroupNorm(32, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(32, out)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or inp != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.GroupNorm(32, out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + (x if self.shortcut is None else self.shortcut(x)))


class PlainResNet18(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nn.Sequential(*[b for i, o, s in widths for b in (_Residual(i, o, s), _Residual(o, o, 1))])
        self.out = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return cast(Tensor, self.out(x.mean((2, 3))))


class _Block(nn.Module):
    def __init__(self, inp: int, out: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(_GROUPS, inp), nn.Conv2d(inp, out, 3, padding=1)
        self.condition = nn.Linear(condition, 2 * out)
        self.norm2, self.conv2 = nn.GroupNorm(_GROUPS, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(inp, out, 1) if inp != out else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return cast(Tensor, h + self.shortcut(x))


class PlainUNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int, levels: int, patch: int = 1) -> None:
        super().__init__()
        self.patch, channels = patch, channels * patch**2
        widths = [width * min(2, level + 1) for level in range(levels)]
        self.width, condition = width, 4 * width
        self.time1, self.time2 = nn.Linear(width, condition), nn.Linear(condition, condition)
        self.label = nn.Linear(classes, condition, bias=False)
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(_Block(w, w, condition) for w in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))
        self.middle = _Block(widths[-1], widths[-1], condition)
        above = [widths[-1], *reversed(widths[1:])]
        self.up = nn.ModuleList(_Block(a + w, w, condition) for a, w in zip(above, reversed(widths), strict=True))
        self.norm, self.out = nn.GroupNorm(_GROUPS, width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noisy: Tensor, level: Tensor, labels: Tensor) -> Tensor:
        """noisy (B, ch, H, W), level (B,), label vectors (B, K) -> noise, as noisy."""
        height, width = noisy.shape[2:]
        x = F.pad(noisy, (0, -width % self.patch, 0, -height % self.patch))
        time = self.time2(F.silu(self.time1(_waves(level, self.width))))
        condition = F.silu(time + self.label(labels))
        x, skips = self.stem(F.pixel_unshuffle(x, self.patch)), []
        for depth, block in enumerate(self.down):
            x = block(self.shrink[depth - 1](x) if depth else x, condition)
            skips.append(x)
        x = self.middle(x, condition)
        for block in self.up:
            skip = skips.pop()
            if x.shape[2:] != skip.shape[2:]:
                x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1), condition)
        return F.pixel_shuffle(self.out(F.silu(self.norm(x))), self.patch)[:, :, :height, :width]


def _waves(level: Tensor, width: int) -> Tensor:
    frequency = torch.exp(torch.arange(width // 2, device=level.device) * (-math.log(10_000) / (width // 2)))
    angle = level[:, None].float() * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1)
