"""GPU kernels in Triton: the CNN's two layers with gradients, which go back the way that pooling.py came.

A cell's gradient belongs to the one corner that won, so it is set at that corner's place among four, and the rest is
products again: with the windows of 4x4 pixels for the weights, with the weights for the pixels. Gradients may be tiny,
so factors are float32, which tensor cores take as TF32. No sum depends on which program is first: what programs share
is written in parts, and added up in order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.launch import launched
from semidfl.models.pooling import SHUT, from_border, inner, place, pooled, wide, windows

__all__ = ["features"]

_FIRST, _SECOND = (32, 4, 1056), (32, 4, 264)
"""a layer's weights: cells of a tile, warps that work on it, programs (eight, two a processor) that share all cells"""
_BLOCKS, _WARPS = 64, 4
"""the second layer's pixels: blocks of 2x2 of a program, and its warps"""


@triton.jit
def _gradient(
    g, code, b, py, px, there, y_b, Y_N: tl.constexpr, Y_Y: tl.constexpr, Y_X: tl.constexpr, KEPT: tl.constexpr,
    BO: tl.constexpr,
):  # fmt: skip
    """The gradient of one client's cells, (BO, cells), and their corners: where those are SHUT, it may be anything."""
    o = tl.arange(0, BO)
    at = o[:, None] * Y_N + (b * y_b + py * Y_Y + px * Y_X)[None, :]
    known = (o < KEPT)[:, None] & there[None, :]
    return tl.load(g + at, mask=known, other=0.0), tl.load(code + at, mask=known, other=SHUT)


@launched
@triton.jit
def _to_weights(
    x, g, code, parts, cells, tiles, x_c, x_b, y_c, y_b, X_K: tl.constexpr, X_Y: tl.constexpr, X_X: tl.constexpr,
    Y_N: tl.constexpr, Y_Y: tl.constexpr, Y_X: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CI: tl.constexpr, KEPT: tl.constexpr, BORDER: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Of some of a client's cells: what each corner's weights get in the window, (4 4 BI, 4 BO), and the bias."""
    client = tl.program_id(1).to(tl.int64)
    total = tl.zeros((4 * BO, 16 * BI), tl.float32)
    shift = tl.zeros((BO, BM), tl.float32)
    for tile in range(tiles):
        p = (tl.program_id(0) * tiles + tile) * BM + tl.arange(0, BM)
        b, py, px = place(p, HEIGHT // 2, WIDTH // 2)
        d, won = _gradient(g + client * y_c, code + client * y_c, b, py, px, p < cells, y_b, Y_N, Y_Y, Y_X, KEPT, BO)
        corners = tl.where(won[None, :, :] == tl.arange(0, 4)[:, None, None], d[None, :, :], 0.0)
        seen = windows(x + client * x_c, p, cells, x_b, X_K, X_Y, X_X, HEIGHT, WIDTH, CI, BORDER, BI)
        total = tl.dot(tl.reshape(corners, (4 * BO, BM)), seen.to(tl.float32), total)
        shift += tl.where(won < SHUT, d, 0.0)
    n, k, o = tl.arange(0, 4 * BO)[:, None], tl.arange(0, 16 * BI)[None, :], tl.arange(0, BO)
    dy, dx = k // BI // 4 - n // BO // 2, k // BI % 4 - n // BO % 2
    touched = (dy >= 0) & (dy < 3) & (dx >= 0) & (dx < 3) & (k % BI < CI)
    parts += (tl.program_id(0) * tl.num_programs(1) + client) * (64 * BI * BO + BO)
    tl.store(parts + k * (4 * BO) + n, total, mask=touched)
    tl.store(parts + 64 * BI * BO + o, tl.sum(shift, 1))


@launched
@triton.jit
def _folded(
    parts, dw, db, splits, CI: tl.constexpr, CO: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One client's tap: the sum over the parts, and over the four places in the window that it stood at."""
    client, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, o = tl.arange(0, BI), tl.arange(0, BO)
    parts += client * (64 * BI * BO + BO)
    total = tl.zeros((BI, BO), tl.float32)
    shift = tl.zeros((BO,), tl.float32)
    for _ in range(splits):
        for corner in tl.static_range(4):
            pixel = (tap // 3 + corner // 2) * 4 + tap % 3 + corner % 2
            k, n = pixel * BI + i, corner * BO + o
            total += tl.load(parts + k[:, None] * (4 * BO) + n[None, :], mask=(i < CI)[:, None], other=0.0)
        shift += tl.load(parts + 64 * BI * BO + o)
        parts += tl.num_programs(0).to(tl.int64) * (64 * BI * BO + BO)
    to = dw + ((client * 9 + tap) * CI + i)[:, None] * CO + o[None, :]
    tl.store(to, total, mask=(i < CI)[:, None] & (o < CO)[None, :])
    if tap == 0:
        tl.store(db + client * CO + o, shift, mask=o < CO)


@launched
@triton.jit
def _to_input(
    g, code, w, dx, blocks, w_c, w_t, w_k, w_n, y_c, y_b, x_c, x_b, Y_N: tl.constexpr, Y_Y: tl.constexpr,
    Y_X: tl.constexpr, X_K: tl.constexpr, X_Y: tl.constexpr, X_X: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gradient of one client's pixels, in blocks of 2x2 that begin at odd ones: four windows see all of a block."""
    client = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    b, qy, qx = place(p, HEIGHT // 2 + 1, WIDTH // 2 + 1)
    n, o = tl.arange(0, 4 * BI), tl.arange(0, BO)
    row, column, channel = n // BI // 2, n // BI % 2, n % BI
    real = (o < CO)[:, None] & (channel < CI)[None, :]
    weight = w + client * w_c + o[:, None] * w_n + channel[None, :] * w_k
    total = tl.zeros((BM, 4 * BI), tl.float32)
    for cell in range(4):
        py, px = qy - cell // 2, qx - cell % 2
        there = (py >= 0) & (py < HEIGHT // 2) & (px >= 0) & (px < WIDTH // 2) & (p < blocks)
        d, won = _gradient(g + client * y_c, code + client * y_c, b, py, px, there, y_b, Y_N, Y_Y, Y_X, CO, BO)
        for corner in tl.static_range(4):
            ty, tx = cell // 2 * 2 + row - corner // 2, cell % 2 * 2 + column - corner % 2
            touched = real & ((ty >= 0) & (ty < 3) & (tx >= 0) & (tx < 3))[None, :]
            v = tl.load(weight + (ty * 3 + tx)[None, :] * w_t, mask=touched, other=0.0)
            total = tl.dot(tl.trans(tl.where(won == corner, d, 0.0)), v, total)
    iy, ix = 2 * qy[:, None] - 1 + row[None, :], 2 * qx[:, None] - 1 + column[None, :]
    inside = (iy >= 0) & (iy < HEIGHT) & (ix >= 0) & (ix < WIDTH) & (p < blocks)[:, None]
    to = dx + client * x_c + b[:, None] * x_b + iy * X_Y + ix * X_X + channel[None, :] * X_K
    tl.store(to, total, mask=inside)


def _weights(
    x: Tensor, g: Tensor, code: Tensor, w: Tensor, border: bool, work: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """The gradients of the weights (C, 9, in, out) and the bias (C, out) of a layer with input x; g lies as code."""
    clients, batch, stored, height, width = x.shape
    inp, out = w.shape[2:]
    bi, bo = triton.next_power_of_2(stored), wide(out)
    bm, warps, programs = work
    cells = batch * (height // 2) * (width // 2)
    tiles = triton.cdiv(triton.cdiv(cells, bm), triton.cdiv(programs, clients))
    splits = triton.cdiv(cells, bm * tiles)
    parts = x.new_empty(splits, clients, 64 * bi * bo + bo, dtype=torch.float32)
    _to_weights[(splits, clients)](
        x, g, code, parts, cells, tiles, *x.stride()[:2], *g.stride()[:2], *x.stride()[2:], *g.stride()[2:], height,
        width, inp, g.shape[2], border, bi, bo, bm, num_warps=warps, num_stages=1,
    )  # fmt: skip
    dw, db = w.new_empty(clients, 9, inp, out), w.new_empty(clients, out)
    _folded[(clients, 9)](parts, dw, db, splits, inp, out, bi, bo, num_warps=1)
    return dw, db


def _input(g: Tensor, code: Tensor, w: Tensor, dx: Tensor) -> None:
    """Writes the gradient of a layer's input; g lies as code."""
    clients, batch, stored, height, width = dx.shape
    inp, out = w.shape[2:]
    blocks = batch * (height // 2 + 1) * (width // 2 + 1)
    _to_input[(triton.cdiv(blocks, _BLOCKS), clients)](
        g, code, w, dx, blocks, *w.stride(), *g.stride()[:2], *dx.stride()[:2], *g.stride()[2:], *dx.stride()[2:],
        height, width, inp, out, stored, wide(out), _BLOCKS, num_warps=_WARPS, num_stages=1,
    )  # fmt: skip


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        y, *rest = pooled(images, w1, b1, w2, b2, coded=True)
        ctx.save_for_backward(images, w1, w2, *rest)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, w1, w2, hidden, code1, code2 = ctx.saved_tensors
        g = grads[0].contiguous()
        to_hidden = inner(torch.empty_like(hidden, dtype=torch.float32))
        _input(g, code2, w2, to_hidden)
        first = _weights(images, to_hidden, code1, w1, False, _FIRST)
        return None, *first, *_weights(from_border(hidden), g, code2, w2, True, _SECOND)


def features(images: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """As in pooling.py, with gradients of weights and biases; images have none."""
    y: Tensor = _Features.apply(images, w1, b1, w2, b2)
    return y
