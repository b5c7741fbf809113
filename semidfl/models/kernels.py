"""GPU kernels in Triton: optimisers' steps, neighbours mixed, random numbers, images moved and scaled, a UNet's joints.

Each is one pass over memory where PyTorch would make several.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.launch import launched

__all__ = ["adam", "join", "mixed", "momentum", "scaled", "shift", "splitmix"]


@launched
@triton.jit
def _adam(p, g, m, v, steps, owner, rate, size, beta1, beta2, eps, OWNED: tl.constexpr, BLOCK: tl.constexpr):
    client = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = client.to(tl.int64) * size + i
    step = tl.load(steps + (tl.load(owner + i, mask=inside, other=0) if OWNED else client))
    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(m + at, mask=inside, other=0.0)
    mean += (grad - mean) * (1 - beta1)
    square = tl.load(v + at, mask=inside, other=0.0) * beta2 + grad * grad * (1 - beta2)
    root = tl.sqrt(square / (1 - tl.exp(step * tl.log(beta2)))) + eps
    change = mean / root * (tl.load(rate) / (1 - tl.exp(step * tl.log(beta1))))
    tl.store(p + at, tl.load(p + at, mask=inside, other=0.0) - change, mask=inside)
    tl.store(m + at, mean, mask=inside)
    tl.store(v + at, square, mask=inside)


def adam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: Tensor, owner: Tensor | None, rate: Tensor, beta1: float,
    beta2: float, eps: float,
) -> None:  # fmt: skip
    """One step of Adam in place; p, g, m, v (C, D), or in any order with their owners; steps (C, 1) counted up."""
    rows, size = p.shape if owner is None else (1, p.numel())
    tensors = (p, g, m, v, steps, steps if owner is None else owner)
    _adam[triton.cdiv(size, 1024), rows](*tensors, rate, size, beta1, beta2, eps, owner is not None, 1024)


@launched
@triton.jit
def _momentum(p, g, v, rate, size, mu, decay, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    weight = tl.load(p + i, mask=inside, other=0.0)
    grad = tl.load(g + i, mask=inside, other=0.0).to(tl.float32) + decay * weight
    velocity = tl.load(v + i, mask=inside, other=0.0) * mu + grad
    change = grad + mu * velocity if NESTEROV else velocity
    tl.store(p + i, weight - tl.load(rate) * change, mask=inside)
    tl.store(v + i, velocity, mask=inside)


def momentum(p: Tensor, g: Tensor, v: Tensor, rate: Tensor, mu: float, decay: float, nesterov: bool) -> None:
    """One step of SGD with momentum in place; p, g, v (C, D)."""
    _momentum[(triton.cdiv(p.numel(), 1024),)](p, g, v, rate, p.numel(), mu, decay, nesterov, 1024)


@launched
@triton.jit
def _mixed(p, weights, index, out, clients, near, size, BLOCK: tl.constexpr):  # Triton's own launcher has a `params`
    # A block of all clients, one after the other: most of the rows they read are the same.
    client = (tl.program_id(0) % clients).to(tl.int64)
    i = (tl.program_id(0) // clients).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(near):
        row = tl.load(index + client * near + k)
        weight = tl.load(weights + client * near + k)
        total += weight * tl.load(p + row * size + i, mask=inside, other=0.0)
    tl.store(out + client * size + i, total, mask=inside)


def mixed(weights: Tensor, index: Tensor, params: Tensor) -> Tensor:
    """The sum of each client's neighbours: weights and index (C, G), params (M, D) -> (C, D), in the order of G."""
    (clients, near), size = index.shape, params.shape[1]
    out = params.new_empty(clients, size)
    rows = (params.contiguous(), weights.float().expand(index.shape).contiguous(), index.contiguous())
    _mixed[(clients * triton.cdiv(size, 1024),)](*rows, out, clients, near, size, 1024)
    return out


@triton.jit
def _mix(z, MIX1, MIX2):
    z = z ^ ((z >> 30) & 0x3FFFFFFFF)
    z = z * MIX1
    z = z ^ ((z >> 27) & 0x1FFFFFFFFF)
    z = z * MIX2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@launched
@triton.jit
def _splitmix(
    keys, bound, out, count, bounds, shift, word, gamma, mix1, mix2, HALVES: tl.constexpr, BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = _mix(_mix(tl.load(keys + client) + shift, mix1, mix2) ^ word, mix1, mix2)
    if HALVES:
        value = _mix(start + (place // 2 + 1) * gamma, mix1, mix2)
        value = (value >> (place % 2 * 32)) & 0xFFFFFFFF
        if BOUND:
            value = (value * tl.load(bound + client * bounds)) >> 32
    else:
        value = _mix(start + (place + 1) * gamma, mix1, mix2)
    tl.store(out + client.to(tl.int64) * count + place, value, mask=place < count)


def splitmix(
    keys: Tensor, count: int, shift: int, word: int, gamma: int, mix1: int, mix2: int, halves: bool = False,
    bound: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """keys (C,) int64 -> (C, count): what `draws.Draws` calls words, or bits (`halves`), or those below (C or 1,)."""
    out = keys.new_empty(len(keys), count)
    limits = keys if bound is None else bound.long()
    _splitmix[(triton.cdiv(count, 1024), len(keys))](
        keys, limits, out, count, int(len(limits) > 1), shift, word, gamma, mix1, mix2, halves, bound is not None, 1024,
    )  # fmt: skip
    return out


@launched
@triton.jit
def _shift(
    pool, index, down, right, mirror, out, size, CH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n, channel = i // (CH * HEIGHT * WIDTH), i // (HEIGHT * WIDTH) % CH
    inside = i < size
    row = i // WIDTH % HEIGHT - tl.load(down + n, mask=inside, other=0)
    column = i % WIDTH - tl.load(right + n, mask=inside, other=0)
    seen = inside & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    column = tl.where(tl.load(mirror + n, mask=inside, other=0) != 0, WIDTH - 1 - column, column)
    place = tl.load(index + n, mask=inside, other=0)
    pixel = tl.load(pool + ((place * CH + channel) * HEIGHT + row) * WIDTH + column, mask=seen, other=0)
    tl.store(out + i, pixel, mask=inside)


def shift(pool: Tensor, index: Tensor, down: Tensor, right: Tensor, mirror: Tensor) -> Tensor:
    """Images of the pool (N, ch, H, W) at `index` (n,), moved and mirrored, as `augment._shifted` does."""
    out = pool.new_empty(len(index), *pool.shape[1:])
    tensors = (x.contiguous() for x in (index, down, right, mirror))
    _shift[(triton.cdiv(out.numel(), 1024),)](pool, *tensors, out, out.numel(), *pool.shape[1:], 1024)
    return out


@launched
@triton.jit
def _scaled(x, scale, shift, y, size, CH: tl.constexpr, AREA: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, channel = i < size, i // AREA % CH
    value = tl.load(x + i, mask=inside, other=0).to(tl.float32) * tl.load(scale + channel) + tl.load(shift + channel)
    tl.store(y + i, value, mask=inside)


def scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 (…, ch, H, W), each channel times its scale plus its shift, in float32."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=torch.float32)
    channels, area = x.shape[-3], x.shape[-2] * x.shape[-1]
    _scaled[(triton.cdiv(x.numel(), 1024),)](x, scale, shift, y, x.numel(), channels, area, 1024)
    return y


@launched
@triton.jit
def _join(
    x, skip, y, pixels, height, width, low_h, low_w, clients, CX: tl.constexpr, CS: tl.constexpr,
    SCALE: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y = (x, each pixel SCALE times in a row and SCALE rows; skip), of one client."""
    client = tl.program_id(1)
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    sample, row, column = p // (height * width), p // width % height, p % width
    source = (sample * low_h + row // SCALE) * low_w + column // SCALE
    j, known = tl.arange(0, BX), (p < pixels)[:, None]
    inside, to = known & (j < CX)[None, :], y + (p * clients + client)[:, None] * (CX + CS)
    tl.store(to + j[None, :], tl.load(x + (source * clients + client)[:, None] * CX + j[None, :], mask=inside), inside)
    j = tl.arange(0, BS)
    inside = known & (j < CS)[None, :]
    kept = tl.load(skip + (p * clients + client)[:, None] * CS + j[None, :], mask=inside)
    tl.store(to + CX + j[None, :], kept, mask=inside)


@launched
@triton.jit
def _part(
    g, dx, pixels, height, width, low_h, low_w, clients, first, CX: tl.constexpr, CY: tl.constexpr,
    SCALE: tl.constexpr, BX: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradient of CX of the CY joined channels, from `first` on: summed over the pixels that one went to."""
    client = tl.program_id(1)
    p = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    sample, row, column = p // (low_h * low_w), p // low_w % low_h * SCALE, p % low_w * SCALE
    j = tl.arange(0, BX)
    inside = (p < pixels)[:, None] & (j < CX)[None, :]
    total = tl.zeros((BP, BX), tl.float32)
    for k in tl.static_range(SCALE * SCALE):
        oy, ox = row + k // SCALE, column + k % SCALE
        there = inside & ((oy < height) & (ox < width))[:, None]
        place = (((sample * height + oy) * width + ox) * clients + client)[:, None] * CY + first + j[None, :]
        total += tl.load(g + place, mask=there, other=0.0).to(tl.float32)
    tl.store(dx + (p * clients + client)[:, None] * CX + j[None, :], total.to(dx.dtype.element_ty), mask=inside)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor, clients: int) -> Tensor:
        ctx.low, ctx.shape, ctx.clients = x.shape, skip.shape, clients
        (_, height, width, _), cx, cs = skip.shape, x.shape[3] // clients, skip.shape[3] // clients
        y = x.new_empty(*skip.shape[:3], x.shape[3] + skip.shape[3])
        pixels = skip.shape[0] * height * width
        _join[(triton.cdiv(pixels, 32), clients)](
            x, skip, y, pixels, height, width, x.shape[1], x.shape[2], clients, cx, cs, _scale(x, height, width),
            triton.next_power_of_2(cx), triton.next_power_of_2(cs), 32,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, (_, height, width, _) = grads[0].contiguous(), ctx.shape
        per, at, out = g.shape[3] // ctx.clients, 0, []
        for shape in (ctx.low, ctx.shape):
            d, own = g.new_empty(shape), shape[3] // ctx.clients
            pixels = shape[0] * shape[1] * shape[2]
            _part[(triton.cdiv(pixels, 32), ctx.clients)](
                g, d, pixels, height, width, shape[1], shape[2], ctx.clients, at, own, per,
                _scale(d, height, width), triton.next_power_of_2(own), 32,
            )  # fmt: skip
            out.append(d)
            at += own
        return out[0], out[1], None


def _scale(x: Tensor, height: int, width: int) -> int:
    return 1 if x.shape[1:3] == (height, width) else 2


def join(x: Tensor, skip: Tensor, clients: int) -> Tensor:
    """x (B, h, w, C*a), brought to skip's size by nearest pixels, and skip (B, H, W, C*b) -> (B, H, W, C*(a + b)).

    H is h, 2 h or 2 h - 1.
    """
    out: Tensor = _Join.apply(x, skip, clients)
    return out
