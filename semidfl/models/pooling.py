"""GPU kernel in Triton: the CNN's two layers without gradients, each convolution 3x3, ReLU and 2x2 max-pooling in one.

Labelling and testing are most of a baseline's work. With so few channels it is not the products that take the time,
but finding the pixels. So a pooled cell is one row of one product: the 4x4 pixels that it looks at, times the kernel at
each of the four corners' places among them. Between the layers images have a border of zeros and channels that are a
power of two, so that a row is four runs of memory with nothing to check. Factors are float16, which has as many digits
as TF32, and sums float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["features"]

_CELLS, _WARPS, _STAGES = 64, 4, 1
"""cells of a tile, warps that work on it, tiles under way"""
_TILES = 16
"""that a program takes at most, one after the other, with the same weights"""
_PROGRAMS = 1056
"""eight a processor: so many run before one takes more than a tile"""


MOST = tl.constexpr(65504.0)
"""the largest number in float16: a network that diverges does not become one with infinities"""


@triton.jit
def _pooled(
    x, w, bias, y, cells, tiles, x_c, x_b, w_c, w_t, w_k, w_n, b_c, y_c, y_b, y_n, y_y, y_x, X_K: tl.constexpr,
    X_Y: tl.constexpr, X_X: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CI: tl.constexpr,
    CO: tl.constexpr, KEPT: tl.constexpr, BORDER: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One client's layer; HEIGHT and WIDTH of its input without the border. KEPT channels are written."""
    client = tl.program_id(1).to(tl.int64)
    k, n = tl.arange(0, 16 * BI), tl.arange(0, 4 * BO)
    row, column, channel = k // BI // 4, k // BI % 4, k % BI
    corner, o = n // BO, n % BO
    dy, dx = row[:, None] - (corner // 2)[None, :], column[:, None] - (corner % 2)[None, :]
    touched = (dy >= 0) & (dy < 3) & (dx >= 0) & (dx < 3) & (channel < CI)[:, None] & (o < CO)[None, :]
    weight = w + client * w_c + (dy * 3 + dx) * w_t + channel[:, None] * w_k + o[None, :] * w_n
    v = tl.load(weight, mask=touched, other=0.0).to(tl.float16)
    out = tl.arange(0, BO)
    shift = tl.load(bias + client * b_c + out, mask=out < CO, other=0.0)
    high: tl.constexpr = HEIGHT // 2
    wide: tl.constexpr = WIDTH // 2
    for tile in range(tiles):
        p = (tl.program_id(0) * tiles + tile) * BM + tl.arange(0, BM)
        b, py, px = (p // (high * wide)).to(tl.int64), p % (high * wide) // wide, p % wide
        first = x + client * x_c + b * x_b + 2 * py * X_Y + 2 * px * X_X
        there = (p < cells)[:, None]
        if not BORDER:
            first -= X_Y + X_X
            iy, ix = (2 * py - 1)[:, None] + row[None, :], (2 * px - 1)[:, None] + column[None, :]
            there &= (iy >= 0) & (iy < HEIGHT) & (ix >= 0) & (ix < WIDTH) & (channel < CI)[None, :]
        away = row * X_Y + column * X_X + channel * X_K
        four = tl.dot(tl.load(first[:, None] + away[None, :], mask=there, other=0.0).to(tl.float16), v)
        best = tl.max(tl.reshape(four, (BM, 4, BO)), 1) + shift[None, :]
        to = y + client * y_c + (b * y_b + py * y_y + px * y_x)[:, None] + out[None, :] * y_n
        best = tl.minimum(tl.maximum(best, 0.0), MOST).to(y.dtype.element_ty)
        tl.store(to, best, mask=(p < cells)[:, None] & (out < KEPT)[None, :])


def _layer(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, border: bool) -> None:
    """From x to y, both (C, B, ch, H, W) however they lie in memory; weights (C, taps, in, out)."""
    clients, batch, inp, height, width = x.shape
    cells = batch * y.shape[3] * y.shape[4]
    tiles = max(1, min(_TILES, cells * clients // (_CELLS * _PROGRAMS)))
    _pooled[(triton.cdiv(cells, _CELLS * tiles), clients)](
        x, w, bias, y, cells, tiles, *x.stride()[:2], *w.stride(), bias.stride(0), *y.stride(), *x.stride()[2:],
        height, width, w.shape[2], w.shape[3], y.shape[2], border, triton.next_power_of_2(inp), _wide(w.shape[3]),
        _CELLS, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def _wide(channels: int) -> int:
    """Channels as they are computed and, between the layers, stored."""
    return max(4, triton.next_power_of_2(channels))


def features(images: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """images (C, B, in, H, W), weights (C, 9, in, out), bias (C, out) -> (C, B, out2, H // 4, W // 4)."""
    clients, batch, _, height, width = images.shape
    size = (clients, batch, height // 2 + 2, width // 2 + 2, _wide(w1.shape[3]))
    bordered = images.new_empty(size, dtype=torch.float16).permute(0, 1, 4, 2, 3)
    for edge in (0, -1):
        bordered[:, :, :, edge] = 0
        bordered[..., edge] = 0
    _layer(images, w1, b1, bordered[:, :, :, 1:-1, 1:-1], border=False)
    y = images.new_empty(clients, batch, w2.shape[3], height // 4, width // 4)
    start = bordered[:, :, :, : height // 2, : width // 2]  # a window begins one pixel before its cell: in the border
    _layer(start, w2, b2, y, border=True)
    return y
