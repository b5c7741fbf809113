"""ResNet-18 for small colour images: 3x3 stem, no max-pool, GroupNorm(32) in place of every BatchNorm."""

from torch import Tensor, nn

from semidfl.models.stacked import Conv2d, GroupNorm, Linear, fold, unfold

__all__ = ["ResNet18"]


class _Block(nn.Module):
    def __init__(self, inp: int, out: int, stride: int, standard: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inp, out, 3, stride, standard), GroupNorm(32, out)
        self.conv2, self.norm2 = _conv(out, out, 3, 1, standard), GroupNorm(32, out)
        self.shortcut = None
        if stride != 1 or inp != out:
            self.shortcut = nn.Sequential(_conv(inp, out, 1, stride, standard), GroupNorm(32, out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(self.conv1(x), act="relu")
        y: Tensor = self.norm2(self.conv2(h), act="relu", extra=x if self.shortcut is None else self.shortcut(x))
        return y


def _conv(inp: int, out: int, kernel: int, stride: int, standard: bool) -> Conv2d:
    return Conv2d(inp, out, kernel, stride, bias=False, standard=standard)


class ResNet18(nn.Module):
    """`standard`: its filters are standardised, as a ResNet with GroupNorm in place of BatchNorm learns faster with."""

    def __init__(self, channels: int, classes: int, standard: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = _conv(channels, 64, 3, 1, standard), GroupNorm(32, 64)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        stages = [(_Block(i, o, s, standard), _Block(o, o, 1, standard)) for i, o, s in widths]
        self.blocks = nn.Sequential(*[block for stage in stages for block in stage])
        self.out = Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(C, B, ch, H, W) -> logits (C, B, K)."""
        x = self.blocks(self.norm(self.stem(fold(images)), act="relu"))
        logits: Tensor = self.out(unfold(x.mean((2, 3), keepdim=True), images.shape[0]).flatten(2))
        return logits
