"""ResNet-18 for small colour images: 3x3 stem, no max-pool, GroupNorm(32) in place of every BatchNorm."""

from torch import Tensor, nn

from semidfl.models.stacked import Conv2d, GroupNorm, Linear, fold, unfold

__all__ = ["ResNet18"]


class _Block(nn.Module):
    def __init__(self, inp: int, out: int, standard: bool, groups: int) -> None:
        super().__init__()
        stride = 1 if inp == out else 2
        self.conv1, self.norm1 = _conv(inp, out, 3, stride, standard), GroupNorm(groups, out)
        self.conv2, self.norm2 = _conv(out, out, 3, 1, standard), GroupNorm(groups, out)
        self.shortcut = None
        if inp != out:
            self.shortcut = nn.Sequential(_conv(inp, out, 1, stride, standard), GroupNorm(groups, out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.conv1(x), act="relu")
        y: Tensor = self.norm2(self.conv2(h), act="relu", extra=x if self.shortcut is None else self.shortcut(x))
        return y


def _conv(inp: int, out: int, kernel: int, stride: int, standard: bool) -> Conv2d:
    return Conv2d(inp, out, kernel, stride, bias=False, standard=standard)


class ResNet18(nn.Module):
    """`standard`: its filters are standardised, as a ResNet with GroupNorm in place of BatchNorm learns faster with."""

    widths, depth, groups = (64, 128, 256, 512), 2, 32
    """channels of each stage, its blocks, and groups of a norm"""

    def __init__(self, channels: int, classes: int, standard: bool = False) -> None:
        super().__init__()
        first, last = self.widths[0], self.widths[-1]
        self.stem, self.norm = _conv(channels, first, 3, 1, standard), GroupNorm(self.groups, first)
        outs = [width for width in self.widths for _ in range(self.depth)]
        self.blocks = nn.Sequential(
            *[_Block(i, o, standard, self.groups) for i, o in zip([first, *outs], outs, strict=False)]
        )
        self.out = Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(C, B, ch, H, W) -> logits (C, B, K)."""
        x = self.blocks(self.norm(self.stem(fold(images)), act="relu"))
        logits: Tensor = self.out(unfold(x.mean((2, 3), keepdim=True), images.shape[0]).flatten(2))
        return logits
