"""GPU kernels in Triton: the convolutions of all clients in one launch, forwards and backwards.

A convolution is a matrix product per client over gathered pixels (implicit GEMM). cuDNN's grouped convolutions are
as fast for some shapes, but for others they work through the groups one by one, with a change of layout for each.
Images are (B, H, W, C*ch), weights (C, taps, in, out); products are summed in float32. Where only a client's first
samples are real (`filled`), no others are computed: what they become does not matter, as long as it is a number.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.home import home_of
from semidfl.models.launch import launched

__all__ = ["convolve"]

_FEW = 32
"""channels below which the taps of a kernel share a tile"""
_PROGRAMS = 264
"""two a processor: fewer of them, and smaller ones are faster"""


@triton.jit
def _moved(
    oy, ox, tap, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Where a tap looks from a place, and whether that is inside."""
    if BACKWARDS:  # which outputs a pixel went into
        up, left = oy + KERNEL // 2 - tap // KERNEL, ox + KERNEL // 2 - tap % KERNEL
        iy, ix = up // STRIDE, left // STRIDE
        there = (up >= 0) & (left >= 0) & (up % STRIDE == 0) & (left % STRIDE == 0)
    else:  # which pixels go into an output
        iy, ix = oy * STRIDE + tap // KERNEL - KERNEL // 2, ox * STRIDE + tap % KERNEL - KERNEL // 2
        there = (iy >= 0) & (ix >= 0)
    return iy, ix, there & (iy < HEIGHT) & (ix < WIDTH)


@launched
@triton.jit
def _conv(
    x, w, bias, extra, filled, y, pixels, clients, w_c, w_k, w_n, b_c, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, BACKWARDS: tl.constexpr, BIAS: tl.constexpr, EXTRA: tl.constexpr, FILLED: tl.constexpr,
    PACKED: tl.constexpr, HALVED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[p, n] = sum over taps and k of x[p moved by the tap, k] w[tap, k, n], of one client; plus bias, plus extra."""
    client, block = tl.program_id(2), tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x += client * CI
    w += client.to(tl.int64) * w_c
    TAPS: tl.constexpr = KERNEL * KERNEL
    PARTS: tl.constexpr = (CI + BK - 1) // BK
    ROWS: tl.constexpr = (OUT_H + 1) // 2 if HALVED else OUT_H
    COLUMNS: tl.constexpr = (OUT_W + 1) // 2 if HALVED else OUT_W
    if HALVED:  # every second row and column: where they begin tells which of the taps can lead there
        down, right, block = block % 4 // 2, block % 2, block // 4
        top, left = (down + KERNEL // 2) % 2, (right + KERNEL // 2) % 2
        across = (KERNEL + 1 - left) // 2
        steps = (KERNEL + 1 - top) // 2 * across * PARTS
    else:
        steps = (TAPS * CI + BK - 1) // BK if PACKED else TAPS * PARTS
    if FILLED:
        steps = tl.where(block * BM < tl.load(filled + client) * (ROWS * COLUMNS), steps, 0)
    p = block * BM + tl.arange(0, BM)
    b, oy, ox = p // (ROWS * COLUMNS), p % (ROWS * COLUMNS) // COLUMNS, p % COLUMNS
    exists = p < pixels
    if HALVED:
        oy, ox = oy * 2 + down, ox * 2 + right
        exists = exists & (oy < OUT_H) & (ox < OUT_W)
        p = (b * OUT_H + oy) * OUT_W + ox
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        if PACKED:  # few channels: a step takes several taps at once
            j = step * BK + tl.arange(0, BK)
            tap, k, real = j // CI, j % CI, j < TAPS * CI
            iy, ix, there = _moved(oy[:, None], ox[:, None], tap[None, :], HEIGHT, WIDTH, KERNEL, STRIDE, BACKWARDS)
            at = ((b[:, None] * HEIGHT + iy) * WIDTH + ix).to(tl.int64) * (clients * CI) + k[None, :]
            inside = there & exists[:, None] & real[None, :]
        else:
            tap, k = step // PARTS, step % PARTS * BK + tl.arange(0, BK)
            if HALVED:
                tap = (top + tap // across * 2) * KERNEL + left + tap % across * 2
            real = k < CI
            iy, ix, there = _moved(oy, ox, tap, HEIGHT, WIDTH, KERNEL, STRIDE, BACKWARDS)
            at = (((b * HEIGHT + iy) * WIDTH + ix).to(tl.int64) * (clients * CI))[:, None] + k[None, :]
            inside = (there & exists)[:, None] & real[None, :]
        a = tl.load(x + at, mask=inside, other=0.0)
        weight = w + (tap * (CI * CO) + k * w_k)[:, None] + n[None, :] * w_n
        v = tl.load(weight, mask=real[:, None] & (n < CO)[None, :], other=0.0)
        total = tl.dot(a, v, total)
    if BIAS:
        total += tl.load(bias + client * b_c + n, mask=n < CO, other=0.0).to(tl.float32)[None, :]
    inside = exists[:, None] & (n < CO)[None, :]
    out = p.to(tl.int64)[:, None] * (clients * CO) + client * CO + n[None, :]
    if EXTRA:
        total += tl.load(extra + out, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + out, total.to(y.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _to_weights(
    x, g, filled, dw, db, pixels, clients, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    BIAS: tl.constexpr, FILLED: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """dw[split, client, tap, m, n] = sum over the split's pixels of x[p moved by the tap, m] g[p, n]."""
    TAPS: tl.constexpr = KERNEL * KERNEL
    TILES: tl.constexpr = (CI + BM - 1) // BM
    if PACKED:  # few channels: a tile takes several taps at once
        j = tl.program_id(0) * BM + tl.arange(0, BM)
        tap, m, real = j // CI, j % CI, j < TAPS * CI
    else:
        tap = tl.program_id(0) // TILES
        m = tl.program_id(0) % TILES * BM + tl.arange(0, BM)
        real = m < CI
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    client, split = tl.program_id(2) % clients, tl.program_id(2) // clients
    if FILLED:
        pixels = tl.load(filled + client).to(tl.int32) * (OUT_H * OUT_W)  # places are divided faster in 32 bits
    per_split = tl.cdiv(tl.cdiv(pixels, tl.num_programs(2) // clients), BK) * BK
    total = tl.zeros((BM, BN), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    first = BIAS and tl.program_id(0) == 0
    for start in range(split * per_split, (split + 1) * per_split, BK):
        p = start + tl.arange(0, BK)
        b, oy, ox = p // (OUT_H * OUT_W), p % (OUT_H * OUT_W) // OUT_W, p % OUT_W
        if PACKED:
            iy, ix, there = _moved(oy[:, None], ox[:, None], tap[None, :], HEIGHT, WIDTH, KERNEL, STRIDE, False)
            at = ((b[:, None] * HEIGHT + iy) * WIDTH + ix).to(tl.int64) * (clients * CI) + m[None, :]
            inside = there & (p < pixels)[:, None] & real[None, :]
        else:
            iy, ix, there = _moved(oy, ox, tap, HEIGHT, WIDTH, KERNEL, STRIDE, False)
            at = (((b * HEIGHT + iy) * WIDTH + ix).to(tl.int64) * (clients * CI))[:, None] + m[None, :]
            inside = (there & (p < pixels))[:, None] & real[None, :]
        a = tl.load(x + client * CI + at, mask=inside, other=0.0)
        out = p.to(tl.int64)[:, None] * (clients * CO) + client * CO + n[None, :]
        v = tl.load(g + out, mask=(p < pixels)[:, None] & (n < CO)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), v, total)
        if first:
            bias += tl.sum(v.to(tl.float32), 0)
    row = (split * clients + client).to(tl.int64)
    at_w = dw + ((row * TAPS + tap) * CI + m)[:, None] * CO + n[None, :]
    tl.store(at_w, total.to(dw.dtype.element_ty), mask=real[:, None] & (n < CO)[None, :])
    if first:
        tl.store(db + row * CO + n, bias.to(db.dtype.element_ty), mask=n < CO)


@launched
@triton.jit
def _summed(parts, total, splits, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        value += tl.load(parts + i, mask=i < size, other=0.0)
        parts += size
    tl.store(total + i, value.to(total.dtype.element_ty), mask=i < size)


def _block(size: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _product(
    x: Tensor, w: Tensor, bias: Tensor | None, extra: Tensor | None, filled: Tensor | None, shape: torch.Size,
    kernel: int, stride: int, backwards: bool,
) -> Tensor:  # fmt: skip
    """x (B, H, W, C*in) -> (B, H', W', C*out); backwards: from the gradient of the output to that of the input."""
    clients, _, inp, out = w.shape
    w_k, w_n = out, 1
    if backwards:
        inp, out, w_k, w_n = out, inp, 1, out
    y = x.new_empty(*shape, clients * out)
    pixels = y.numel() // (clients * out)
    bm, bn, warps = 128, _block(out, 128), 8
    if triton.cdiv(pixels, bm) * triton.cdiv(out, bn) * clients < _PROGRAMS:
        bm, warps = 64, 4
    deep = 64 if x.dtype != torch.float32 else 32  # float32 must fit into the shared memory of smaller GPUs, too
    packed, bk = inp < _FEW, deep if inp >= _FEW else _block(kernel * kernel * inp, 64)
    halved, quarters = backwards and stride == 2 and not packed, 1
    if halved:
        pixels, quarters = shape[0] * ((shape[1] + 1) // 2) * ((shape[2] + 1) // 2), 4
    grid = (quarters * triton.cdiv(pixels, bm), triton.cdiv(out, bn), clients)
    _conv[grid](
        x, w, *(x if v is None else v for v in (bias, extra, filled)), y, pixels, clients,
        w.stride(0), w_k, w_n, 0 if bias is None else bias.stride(0),
        x.shape[1], x.shape[2], shape[1], shape[2], inp, out, kernel, stride,
        backwards, *(v is not None for v in (bias, extra, filled)), packed, halved, bm, bn, bk,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y


def _weights(
    x: Tensor, g: Tensor, w: Tensor, home: Tensor | None, filled: Tensor | None, kernel: int, stride: int, bias: bool
) -> tuple[Tensor, Tensor]:
    """x (B, H, W, C*in), g (B, H', W', C*out) -> the gradients of the weights, as w, and of the bias (C, out)."""
    clients, _, inp, out = w.shape
    pixels = g.numel() // (clients * out)
    packed, bn, bk = inp < _FEW, _block(out, 128), 64 if x.dtype != torch.float32 else 32
    bm = _block(kernel * kernel * inp, 64) if packed else _block(inp, bn)
    rows = triton.cdiv(kernel * kernel * inp, bm) if packed else kernel * kernel * triton.cdiv(inp, bm)
    tiles = rows * triton.cdiv(out, bn) * clients
    programs = _PROGRAMS if bm * bn > 64 * 64 else 2 * _PROGRAMS
    splits = max(1, min(triton.cdiv(pixels, 4 * bk), triton.cdiv(programs, tiles)))
    done = torch.empty_like(w) if home is None else home, w.new_empty(clients, out)
    dw, db = done if splits == 1 else (w.new_empty(splits * x.numel(), dtype=torch.float32) for x in done)
    grid = (rows, triton.cdiv(out, bn), clients * splits)
    _to_weights[grid](
        x, g, x if filled is None else filled, dw, db, pixels, clients, *x.shape[1:3], *g.shape[1:3],
        inp, out, kernel, stride, bias, filled is not None, packed, bm, bn, bk, num_warps=4, num_stages=3,
    )  # fmt: skip
    for parts, total in zip((dw, db), done, strict=True):
        if splits > 1 and (bias or total is done[0]):
            _summed[(triton.cdiv(total.numel(), 512),)](parts, total, splits, total.numel(), 512)
    return done


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, extra: Tensor | None, filled: Tensor | None, stride: int,
        home: Tensor | None,
    ) -> Tensor:  # fmt: skip
        w = w.contiguous()  # a client's row may begin anywhere; loads of eight numbers at a time want even places
        ctx.kernel, ctx.stride, ctx.bias = 3 if w.shape[1] == 9 else 1, stride, bias is not None
        shape = torch.Size([x.shape[0], *((n - 1) // stride + 1 for n in x.shape[1:3])])
        ctx.save_for_backward(x, w, filled)
        ctx.home = home
        return _product(x, w, bias, extra, filled, shape, ctx.kernel, stride, backwards=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, filled = ctx.saved_tensors
        g, dx = grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:
            dx = _product(g, w, None, None, filled, x.shape[:3], ctx.kernel, ctx.stride, backwards=True)
        dw, db = _weights(x, g, w, ctx.home, filled, ctx.kernel, ctx.stride, ctx.bias)
        return dx, dw, db if ctx.bias else None, g if ctx.needs_input_grad[3] else None, None, None, None


def convolve(
    x: Tensor, w: Tensor, bias: Tensor | None, extra: Tensor | None, stride: int, filled: Tensor | None = None
) -> Tensor:
    """x (B, H, W, C*in), w (C, 9 or 1, in, out), bias (C, out), extra as the result -> (B, H', W', C*out).

    filled (C,): how many of a client's samples are real; None: all.
    """
    out: Tensor = _Convolve.apply(x, w, bias, extra, filled, stride, home_of(w))
    return out
