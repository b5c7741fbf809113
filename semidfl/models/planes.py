"""The CNN's layer on a CPU: 3x3 convolution, 2x2 max-pooling and ReLU of all clients as one batched matrix product.

Libraries go through a grouped convolution of a few channels group by group, far below the speed of the cores. Here
the four outputs that a pooled cell is chosen from come out of one product: together they see a window of 4x4 pixels,
so the weights (out, in, 3, 3) are set into (4 out, in, 4, 4), at four places, and multiplied with the 16 pixels of each
window. That is 16/9 of the operations and less than half of the memory of the usual columns. Rows and columns of
the image are kept by parity (planes), samples last, so that windows are copied in long runs.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["convolve_and_pool"]

_CORNERS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def convolve_and_pool(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(max-pool(conv)): x (C, B, in, H, W), weight (C, out, in, 3, 3), bias (C, out) -> (C, B, out, H/2, W/2)."""
    if min(x.shape[3:]) < 2:
        raise ValueError(f"images of {x.shape[3]}x{x.shape[4]} leave nothing to pool")
    out: Tensor = _Layer.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (clients, batch), (height, width) = x.shape[:2], x.shape[3:]
        windows, big = _windows(x), _at_corners(weight)
        a, b, c, d = torch.bmm(big, windows).unflatten(1, (4, -1)).unbind(1)  # (C, out, P) for each corner
        # Of equal ones the first counts, as in max_pool2d.
        upper, lower = torch.maximum(a, b), torch.maximum(c, d)
        y = torch.maximum(upper, lower).add_(bias[:, :, None]).relu_()
        if any(ctx.needs_input_grad):
            ctx.shape = x.shape
            ctx.save_for_backward(windows, big, y, b - a, d - c, lower - upper)
        return y.view(clients, -1, height // 2, width // 2, batch).permute(0, 4, 1, 2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        windows, big, y, right_above, right_below, below = ctx.saved_tensors
        g = _where(y, grads[0].permute(0, 2, 3, 4, 1).reshape(y.shape))
        corners = g.new_empty(g.shape[0], 4, *g.shape[1:])
        a, b, c, d = corners.unbind(1)
        lower = _where(below, g)
        upper = g - lower
        torch.sub(upper, b.copy_(_where(right_above, upper)), out=a)
        torch.sub(lower, d.copy_(_where(right_below, lower)), out=c)
        corners = corners.flatten(1, 2)
        dx = _to_pixels(torch.bmm(big.mT, corners), ctx.shape) if ctx.needs_input_grad[0] else None
        return dx, _from_corners(torch.bmm(corners, windows.mT), y.shape[1]), g.sum(2)


def _where(positive: Tensor, g: Tensor) -> Tensor:
    """g where `positive` is above 0, else 0: one pass, several times as fast as through a mask."""
    return cast(Tensor, torch.ops.aten.threshold_backward(g, positive, 0))


def _at_corners(weight: Tensor) -> Tensor:
    """(C, out, in, 3, 3) -> (C, 4 out, in 16): a window's product with each of its four 3x3 parts."""
    clients, out, inp = weight.shape[:3]
    spread = weight.reshape(-1, 9) @ _places(weight.dtype)  # (C out in, 4 16)
    return spread.view(clients, out, inp, 4, 16).permute(0, 3, 1, 2, 4).reshape(clients, 4 * out, -1)


def _from_corners(big: Tensor, out: int) -> Tensor:
    """The gradient of the weights from that of `_at_corners`."""
    clients = big.shape[0]
    spread = big.view(clients, 4, out, -1, 16).permute(0, 2, 3, 1, 4).reshape(-1, 64)
    return (spread @ _places(big.dtype).mT).view(clients, out, -1, 3, 3)


@cache
def _places(dtype: torch.dtype) -> Tensor:
    """(9, 4 16): where each tap stands in the window, for each corner."""
    places = torch.zeros(3, 3, 4, 4, 4, dtype=dtype)
    for k, (i, j) in enumerate(_CORNERS):
        for tap in range(9):
            places[tap // 3, tap % 3, k, tap // 3 + i, tap % 3 + j] = 1
    return places.view(9, 64)


def _windows(x: Tensor) -> Tensor:
    """(C, B, in, H, W) -> (C, in 16, H/2 W/2 B): every window of 4x4, two apart, one beyond the edge."""
    planes, (h, w) = _planes(x), (n // 2 for n in x.shape[3:])
    client, channel, row, column, down, right, one = planes.stride()
    # Pixel 2i + a of a window lies in plane a, i further on.
    size = (*planes.shape[:2], 2, 2, 2, 2, h, w, planes.shape[6])
    step = (client, channel, down, row, right, column, down, right, one)
    return planes.as_strided(size, step).reshape(planes.shape[0], -1, h * w * planes.shape[6])


def _planes(x: Tensor) -> Tensor:
    """(C, B, in, H, W) -> (C, in, 2, 2, H/2 + 1, W/2 + 1, B): by parity of row and column, after padding by one."""
    clients, batch, channels, height, width = x.shape
    planes = x.new_zeros(clients, channels, 2, 2, height // 2 + 1, width // 2 + 1, batch)
    for mine, its in zip(_parities(planes), _pixels_by_parity(x.permute(0, 2, 3, 4, 1)), strict=True):
        mine[:, :, : its.shape[2], : its.shape[3]] = its
    return planes


def _to_pixels(windows: Tensor, shape: torch.Size) -> Tensor:
    """A gradient of `_windows`, back to that of the pixels: what several windows have seen is summed."""
    clients, batch, channels, height, width = shape
    h, w = height // 2, width // 2
    planes = windows.new_zeros(clients, channels, 2, 2, h + 1, w + 1, batch)
    seen = windows.view(clients, channels, 2, 2, 2, 2, h, w, batch)
    for i, j in _CORNERS:
        planes[:, :, :, :, i : i + h, j : j + w] += seen[:, :, i, :, j]
    dx = windows.new_empty(clients, channels, height, width, batch)
    for mine, its in zip(_parities(planes), _pixels_by_parity(dx), strict=True):
        its.copy_(mine[:, :, : its.shape[2], : its.shape[3]])
    return dx.permute(0, 4, 1, 2, 3)


def _parities(planes: Tensor) -> list[Tensor]:
    """Even rows of the image are odd ones after padding; odd rows are even ones, from the second on."""
    return [planes[:, :, 1 - i, 1 - j, i:, j:] for i, j in _CORNERS]


def _pixels_by_parity(x: Tensor) -> list[Tensor]:
    return [x[:, :, i::2, j::2] for i, j in _CORNERS]
