"""GPU kernels in Triton: group normalisation with the condition, the sum and the activation that follow it.

A program takes one sample and some groups. Where a client's sample is not real (`filled`), its pixels count as zero
and are not read.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.launch import launched

__all__ = ["normalise"]

ACTIVATIONS = {"none": 0, "silu": 1, "relu": 2}


@triton.jit
def _act(v, ACT: tl.constexpr):
    if ACT == 1:
        v = v * tl.sigmoid(v)
    elif ACT == 2:
        v = tl.maximum(v, 0.0)
    return v


@triton.jit
def _through_act(v, g, ACT: tl.constexpr):
    if ACT == 1:
        s = tl.sigmoid(v)
        g = g * s * (1 + v * (1 - s))
    elif ACT == 2:
        g = tl.where(v > 0, g, 0.0)
    return g


@triton.jit
def _mine(channels, PER: tl.constexpr, GROUPS: tl.constexpr):
    """A program's sample and first group. A sample's programs run side by side: they share what memory hands out."""
    blocks = channels // (PER * GROUPS)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * GROUPS


@triton.jit
def _lanes(first, PER: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr):
    """Channels of GROUPS groups of PER, each on WIDE lanes (a power of two), and which lanes are real."""
    lane = tl.arange(0, GROUPS * WIDE)
    if WIDE == PER:  # one beside the other, which a compiler sees only like this: it then reads eight at a time
        c, real = first * PER + lane, tl.full((GROUPS * WIDE,), 1, tl.int1)
    else:
        c, real = (first + lane // WIDE) * PER + lane % WIDE, lane % WIDE < PER
    return c, real


@triton.jit
def _by_group(v, WIDE: tl.constexpr, GROUPS: tl.constexpr):
    """The sum over each group, on all of its lanes."""
    total = tl.sum(tl.reshape(v, (GROUPS, WIDE)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, WIDE)), (GROUPS * WIDE,))


@triton.jit
def _affine(
    weight, bias, cond, sample, batch, c, real, w_c, b_c, CH: tl.constexpr, COND: tl.constexpr,
):  # fmt: skip
    """weight, bias, 1 + scale and shift of the channels c of one sample."""
    client, j = c // CH, c % CH
    w = tl.load(weight + client.to(tl.int64) * w_c + j, mask=real, other=0.0).to(tl.float32)
    b = tl.load(bias + client.to(tl.int64) * b_c + j, mask=real, other=0.0).to(tl.float32)
    if COND:
        at = cond + (client * batch + sample) * (2 * CH) + j
        scale = 1 + tl.load(at, mask=real, other=0.0).to(tl.float32)
        shift = tl.load(at + CH, mask=real, other=0.0).to(tl.float32)
    else:
        scale, shift = tl.full(w.shape, 1.0, tl.float32), tl.zeros(w.shape, tl.float32)
    return w * scale, b * scale + shift


@triton.jit
def _seen(filled, sample, first, area, CH: tl.constexpr, PER: tl.constexpr, FILLED: tl.constexpr):
    """How many pixels to read of a sample, from its first group on: those of one client, which has it or not."""
    seen = area
    if FILLED:
        seen = tl.where(sample < tl.load(filled + first * PER // CH), area, 0)
    return seen


@launched
@triton.jit
def _norm(
    x, weight, bias, cond, extra, filled, y, stats, batch, area, channels, w_c, b_c, eps, CH: tl.constexpr,
    PER: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, COND: tl.constexpr, EXTRA: tl.constexpr,
    FILLED: tl.constexpr, ACT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y = act(a x^ + b + extra), x^ normalised over each group of PER channels; one sample, GROUPS groups a program."""
    sample, first = _mine(channels, PER, GROUPS)
    c, real = _lanes(first, PER, WIDE, GROUPS)
    seen = _seen(filled, sample, first, area, CH, PER, FILLED)
    far = sample.to(tl.int64) * area * channels
    total = tl.zeros((GROUPS * WIDE,), tl.float32)
    square = tl.zeros((GROUPS * WIDE,), tl.float32)
    for start in range(0, seen, BP):
        p = start + tl.arange(0, BP)
        inside = (p < area)[:, None] & real[None, :]
        v = tl.load(x + far + p[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(v, 0)
        square += tl.sum(v * v, 0)
    mean = _by_group(total, WIDE, GROUPS) / (area * PER)
    spread = _by_group(square, WIDE, GROUPS) / (area * PER) - mean * mean
    rstd = 1 / tl.sqrt(tl.maximum(spread, 0.0) + eps)
    at = sample * channels + c
    tl.store(stats + 2 * at, mean, mask=real)
    tl.store(stats + 2 * at + 1, rstd, mask=real)
    scale, shift = _affine(weight, bias, cond, sample, batch, c, real, w_c, b_c, CH, COND)
    scale *= rstd
    shift -= mean * scale
    for start in range(0, area, BP):
        p = start + tl.arange(0, BP)
        inside = (p < area)[:, None] & real[None, :]
        there = (p < seen)[:, None] & real[None, :]
        place = far + p[:, None] * channels + c[None, :]
        v = tl.load(x + place, mask=there, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if EXTRA:
            v += tl.load(extra + place, mask=there, other=0.0).to(tl.float32)
        tl.store(y + place, _act(v, ACT).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _before_act(
    x, extra, g, place, there, mean, rstd, scale, shift, EXTRA: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """x^ and the gradient d before the activation."""
    hat = (tl.load(x + place, mask=there, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    v = hat * scale[None, :] + shift[None, :]
    if EXTRA:
        v += tl.load(extra + place, mask=there, other=0.0).to(tl.float32)
    return hat, _through_act(v, tl.load(g + place, mask=there, other=0.0).to(tl.float32), ACT)


@launched
@triton.jit
def _norm_back(
    x, weight, bias, cond, extra, filled, g, stats, dx, d_extra, sums, batch, area, channels, w_c, b_c,
    CH: tl.constexpr, PER: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, COND: tl.constexpr,
    EXTRA: tl.constexpr, FILLED: tl.constexpr, ACT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dx, the gradient d before the activation, and over the pixels of each channel the sums of d and d x^."""
    sample, first = _mine(channels, PER, GROUPS)
    c, real = _lanes(first, PER, WIDE, GROUPS)
    seen = _seen(filled, sample, first, area, CH, PER, FILLED)
    far = sample.to(tl.int64) * area * channels
    at = sample * channels + c
    mean = tl.load(stats + 2 * at, mask=real, other=0.0)
    rstd = tl.load(stats + 2 * at + 1, mask=real, other=0.0)
    scale, shift = _affine(weight, bias, cond, sample, batch, c, real, w_c, b_c, CH, COND)
    sum_d = tl.zeros((GROUPS * WIDE,), tl.float32)
    sum_dx = tl.zeros((GROUPS * WIDE,), tl.float32)
    for start in range(0, seen, BP):
        p = start + tl.arange(0, BP)
        inside = (p < area)[:, None] & real[None, :]
        place = far + p[:, None] * channels + c[None, :]
        hat, d = _before_act(x, extra, g, place, inside, mean, rstd, scale, shift, EXTRA, ACT)
        sum_d += tl.sum(d, 0)
        sum_dx += tl.sum(d * hat, 0)
    tl.store(sums + 2 * at, sum_dx, mask=real)
    tl.store(sums + 2 * at + 1, sum_d, mask=real)
    mean_d = _by_group(sum_d * scale, WIDE, GROUPS) / (area * PER)
    mean_dx = _by_group(sum_dx * scale, WIDE, GROUPS) / (area * PER)
    for start in range(0, area, BP):
        p = start + tl.arange(0, BP)
        inside = (p < area)[:, None] & real[None, :]
        there = (p < seen)[:, None] & real[None, :]
        place = far + p[:, None] * channels + c[None, :]
        hat, d = _before_act(x, extra, g, place, there, mean, rstd, scale, shift, EXTRA, ACT)
        if EXTRA:
            tl.store(d_extra + place, d.to(d_extra.dtype.element_ty), mask=inside)
        v = (d * scale[None, :] - mean_d[None, :] - hat * mean_dx[None, :]) * rstd[None, :]
        tl.store(dx + place, v.to(dx.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _norm_sums(
    sums, weight, bias, cond, d_weight, d_bias, d_cond, batch, channels, w_c, b_c, CH: tl.constexpr,
    COND: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From a sample's and channel's sums to the gradients of weight and bias, scale and shift."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    client, j = c // CH, c % CH
    known = c < channels
    w = tl.load(weight + client.to(tl.int64) * w_c + j, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + client.to(tl.int64) * b_c + j, mask=known, other=0.0).to(tl.float32)
    to_w = tl.zeros((BC,), tl.float32)
    to_b = tl.zeros((BC,), tl.float32)
    for start in range(0, batch, BB):
        sample = start + tl.arange(0, BB)
        inside = (sample < batch)[:, None] & known[None, :]
        at = sample[:, None] * channels + c[None, :]
        d_x = tl.load(sums + 2 * at, mask=inside, other=0.0)
        d = tl.load(sums + 2 * at + 1, mask=inside, other=0.0)
        if COND:
            there = (client[None, :] * batch + sample[:, None]) * (2 * CH) + j[None, :]
            scale = 1 + tl.load(cond + there, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_cond + there, (d_x * w[None, :] + d * b[None, :]).to(d_cond.dtype.element_ty), mask=inside)
            tl.store(d_cond + there + CH, d.to(d_cond.dtype.element_ty), mask=inside)
            d_x *= scale
            d *= scale
        to_w += tl.sum(d_x, 0)
        to_b += tl.sum(d, 0)
    tl.store(d_weight + c, to_w.to(d_weight.dtype.element_ty), mask=known)
    tl.store(d_bias + c, to_b.to(d_bias.dtype.element_ty), mask=known)


class _Tiles(NamedTuple):
    """How the work is cut up, as was fastest for a ResNet's layers (docs/log.md)."""

    blocks: int  # programs a sample
    wide: int  # lanes of a group
    groups: int  # of a program
    pixels: int  # that it reads at a time
    warps: int


def _tiles(channels: int, per: int, area: int, alike: int) -> _Tiles:
    """32 lanes or more, where there are as many; a program stays within `alike` channels.

    A thread holds up to 64 numbers: with more, those of wide groups did not fit into its registers.
    """
    wide, some, about = triton.next_power_of_2(per), 1, max(16, triton.next_power_of_2(area))
    while some * wide < (32 if about > 64 else 64) and alike // per % (2 * some) == 0:
        some *= 2
    sides = (about.bit_length() - 1) // 2  # how often an image's side can be halved
    warps = 1 << min(3, max(0, sides - 2))
    pixels = min(about, 512, max(64, about // 2), max(16, 64 * 32 * warps // (wide * some)))
    return _Tiles(channels // per // some, wide, some, pixels, warps)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, cond: Tensor | None, extra: Tensor | None,
        filled: Tensor | None, per: int, act: int, eps: float,
    ) -> Tensor:  # fmt: skip
        samples, height, width, channels = x.shape
        y, stats = torch.empty_like(x), x.new_empty(samples, channels, 2, dtype=torch.float32)
        alike = channels if filled is None else weight.shape[1]
        tiles = _tiles(channels, per, height * width, alike)
        some = (cond, extra, filled)
        _norm[(samples * tiles.blocks,)](
            x, weight, bias, *(x if v is None else v for v in some), y, stats, samples, height * width, channels,
            weight.stride(0), bias.stride(0), eps, weight.shape[1], per, tiles.wide, tiles.groups,
            *(v is not None for v in some), act, tiles.pixels, num_warps=tiles.warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, stats, *some)
        ctx.per, ctx.act = per, act
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, cond, extra, filled = ctx.saved_tensors
        samples, height, width, channels = x.shape
        some = (cond, extra, filled)
        dx, d_cond, d_extra = (None if v is None else torch.empty_like(v) for v in (x, cond, extra))
        sums, strides, ch = torch.empty_like(stats), (weight.stride(0), bias.stride(0)), weight.shape[1]
        alike = channels if filled is None else ch
        tiles = _tiles(channels, ctx.per, height * width, alike)
        _norm_back[(samples * tiles.blocks,)](
            x, weight, bias, *(x if v is None else v for v in some), grads[0].contiguous(), stats, dx,
            x if d_extra is None else d_extra, sums, samples, height * width, channels, *strides, ch, ctx.per,
            tiles.wide, tiles.groups, *(v is not None for v in some), ctx.act, tiles.pixels, num_warps=tiles.warps,
        )  # fmt: skip
        d_weight, d_bias = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (weight, bias))
        _norm_sums[(triton.cdiv(channels, 32),)](
            sums, weight, bias, x if cond is None else cond, d_weight, d_bias,
            x if d_cond is None else d_cond, samples, channels, *strides, ch, cond is not None, 32, 32,
        )  # fmt: skip
        return dx, d_weight, d_bias, d_cond, d_extra, None, None, None, None


def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    condition: Tensor | None,
    per: int,
    act: str,
    eps: float,
    extra: Tensor | None = None,
    filled: Tensor | None = None,
) -> Tensor:
    """act(norm(x) (1 + scale) + shift + extra): x (B, H, W, C*ch) normalised in groups of `per` channels.

    weight and bias (C, ch); condition (C, B, 2 ch), scale before shift, or None; extra as x, or None; filled (C,): how
    many of a client's samples are real, or None.
    """
    cond = None if condition is None else condition.contiguous()
    out: Tensor = _Normalise.apply(x, weight, bias, cond, extra, filled, per, ACTIVATIONS[act], eps)
    return out
