"""GPU kernel in Triton: the CNN's two layers, each convolution 3x3, ReLU and 2x2 max-pooling in one.

Labelling and testing are most of a baseline's work. With so few channels it is not the products that take the time,
but finding the pixels. So a pooled cell is one row of one product: the 4x4 pixels that it looks at, times the kernel at
each of the four corners' places among them. Between the layers images have a border of zeros and channels that are a
power of two, so that a row is four runs of memory with nothing to check. Factors are float16, which has as many digits
as TF32, and sums float32. For training, each cell also remembers which of its corners won (unpooling.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.launch import launched

__all__ = ["SHUT", "features", "from_border", "inner", "place", "pooled", "wide", "windows"]

_CELLS, _WARPS, _STAGES = 64, 4, 1
"""cells of a tile, warps that work on it, tiles under way"""
_TILES = 16
"""that a program takes at most, one after the other, with the same weights"""
_PROGRAMS = 1056
"""eight a processor: so many run before one takes more than a tile"""


MOST = tl.constexpr(65504.0)
"""the largest number in float16: a network that diverges does not become one with infinities"""
SHUT = tl.constexpr(4)
"""in place of the corner that won, where the ReLU lets nothing through"""


@triton.jit
def place(p, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The sample, row and column of one client's cells, which are counted through all of its samples."""
    return (p // (HIGH * WIDE)).to(tl.int64), p % (HIGH * WIDE) // WIDE, p % WIDE


@triton.jit
def windows(
    x, p, cells, x_b, X_K: tl.constexpr, X_Y: tl.constexpr, X_X: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, CI: tl.constexpr, BORDER: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """The pixels that the cells p of one client look at: (p, 4 4 BI); HEIGHT and WIDTH without the border."""
    b, py, px = place(p, HEIGHT // 2, WIDTH // 2)
    k = tl.arange(0, 16 * BI)
    row, column, channel = k // BI // 4, k // BI % 4, k % BI
    first = x + b * x_b + 2 * py * X_Y + 2 * px * X_X
    there = (p < cells)[:, None]
    if not BORDER:
        first -= X_Y + X_X
        iy, ix = (2 * py - 1)[:, None] + row[None, :], (2 * px - 1)[:, None] + column[None, :]
        there &= (iy >= 0) & (iy < HEIGHT) & (ix >= 0) & (ix < WIDTH) & (channel < CI)[None, :]
    away = row * X_Y + column * X_X + channel * X_K
    return tl.load(first[:, None] + away[None, :], mask=there, other=0.0)


@launched
@triton.jit
def _pooled(
    x, w, bias, y, code, cells, tiles, x_c, x_b, w_c, w_t, w_k, w_n, b_c, y_c, y_b, X_K: tl.constexpr,
    X_Y: tl.constexpr, X_X: tl.constexpr, Y_N: tl.constexpr, Y_Y: tl.constexpr, Y_X: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KEPT: tl.constexpr,
    BORDER: tl.constexpr, CODED: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One client's layer; KEPT channels are written. Where CODED, so is each cell's corner, of equal ones the first."""
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
    for tile in range(tiles):
        p = (tl.program_id(0) * tiles + tile) * BM + tl.arange(0, BM)
        seen = windows(x + client * x_c, p, cells, x_b, X_K, X_Y, X_X, HEIGHT, WIDTH, CI, BORDER, BI)
        four = tl.reshape(tl.dot(seen.to(tl.float16), v), (BM, 4, BO))
        best = tl.max(four, 1)
        value = tl.clamp(best + shift[None, :], 0.0, MOST, tl.PropagateNan.ALL)
        b, py, px = place(p, HEIGHT // 2, WIDTH // 2)
        to = client * y_c + out[None, :] * Y_N + (b * y_b + py * Y_Y + px * Y_X)[:, None]
        kept = (out < KEPT)[None, :] & (p < cells)[:, None]
        tl.store(y + to, value.to(y.dtype.element_ty), mask=kept)
        if CODED:
            first = tl.min(tl.where(four == best[:, None, :], tl.arange(0, 4)[None, :, None], SHUT), 1)
            tl.store(code + to, tl.where(value > 0, first, SHUT).to(tl.uint8), mask=kept)


def _layer(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, code: Tensor | None, border: bool) -> None:
    """From x to y, both (C, B, ch, H, W) however they lie in memory; weights (C, taps, in, out); code as y."""
    clients, batch, inp, height, width = x.shape
    cells = batch * y.shape[3] * y.shape[4]
    tiles = max(1, min(_TILES, cells * clients // (_CELLS * _PROGRAMS)))
    _pooled[(triton.cdiv(cells, _CELLS * tiles), clients)](
        x, w, bias, y, y if code is None else code, cells, tiles, *x.stride()[:2], *w.stride(), bias.stride(0),
        *y.stride()[:2], *x.stride()[2:], *y.stride()[2:], height, width, w.shape[2], w.shape[3], y.shape[2], border,
        code is not None, triton.next_power_of_2(inp), wide(w.shape[3]), _CELLS, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def wide(channels: int) -> int:
    """Channels as they are computed and, between the layers, stored."""
    return max(4, triton.next_power_of_2(channels))


def pooled(
    images: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, coded: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The features, the first layer's output in its border, and, where coded, the corners that won in either layer."""
    clients, batch, _, height, width = images.shape
    size = (clients, batch, height // 2 + 2, width // 2 + 2, wide(w1.shape[3]))
    hidden = images.new_empty(size, dtype=torch.float16).permute(0, 1, 4, 2, 3)
    hidden[:, :, :, :: height // 2 + 1] = 0  # the first row and the last
    hidden[..., :: width // 2 + 1] = 0
    y = images.new_empty(clients, batch, w2.shape[3], height // 4, width // 4)
    code1 = inner(torch.empty_like(hidden, dtype=torch.uint8)) if coded else None
    code2 = torch.empty_like(y, dtype=torch.uint8) if coded else None
    _layer(images, w1, b1, inner(hidden), code1, border=False)
    _layer(from_border(hidden), w2, b2, y, code2, border=True)
    return y, hidden, code1, code2


def inner(bordered: Tensor) -> Tensor:
    return bordered[..., 1:-1, 1:-1]


def from_border(bordered: Tensor) -> Tensor:
    """As large as without the border, but begun in it, as the first window is: one pixel before its cell."""
    return bordered[..., :-2, :-2]


def features(images: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """images (C, B, in, H, W), weights (C, 9, in, out), bias (C, out) -> (C, B, out2, H // 4, W // 4)."""
    return pooled(images, w1, b1, w2, b2, coded=False)[0]
