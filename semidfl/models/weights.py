"""GPU kernels on the weights of all clients, wherever those lie: filters standardised, gradients shortened.

A ResNet has twenty layers of filters and sixty of weights; layer by layer, in PyTorch's operations, a step would launch
hundreds of kernels for them. Here a table says where everything is, and one kernel goes through it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.launch import launched
from semidfl.models.stacked import EPS, Part

__all__ = ["pieces", "shorten", "standardise", "tiles"]

_COLUMNS, _ROWS = 64, 256
"""of a tile, which a program holds as a whole"""
_EVEN = 8
"""numbers that are read at a time, where a tile begins at a multiple of them"""
_PIECE = 1 << 16

# --- filters ----------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Tables for `standardise`, of tiles that are full and begin at a multiple of _EVEN, and of all others.

    Of a tile: where its strip begins, the strip's rows, from row to row, the strip's width, the number of the strip's
    first tile, and whether these are filters.
    """

    even: Tensor
    odd: Tensor


def tiles(parts: list[Part], device: torch.device) -> Tiles:
    """Every part in strips of columns, each in tiles one below the other; what is no filter is to be copied."""
    found: tuple[list[tuple[int, ...]], ...] = ([], [])
    for part in parts:
        size, columns = part.rows * part.columns, part.columns if part.filters else _COLUMNS
        rows, rest = divmod(size, columns)
        strips = [(part.start + j, rows, columns, min(_COLUMNS, columns - j)) for j in range(0, columns, _COLUMNS)]
        if rest:
            strips.append((part.start + size - rest, 1, rest, rest))
        for start, rows, stride, width in strips:
            table = found[width < _COLUMNS or start % _EVEN > 0 or stride % _EVEN > 0]
            table += [(start, rows, stride, width, len(table), int(part.filters))] * -(-rows // _ROWS)
    return Tiles(*(torch.tensor(table, dtype=torch.int64, device=device).view(-1, 6) for table in found))


@triton.jit
def _tile(table, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a program's numbers are, which of them there are, and its strip: rows, first tile, whether of filters."""
    at = table + tl.program_id(0).to(tl.int64) * 6
    start, rows, stride, width, first = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    i = (tl.program_id(0) - first) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None]
    if EVEN:  # said aloud, so that eight numbers are read at a time: what a table holds, a compiler does not know
        start, stride = tl.multiple_of(start, 8), tl.multiple_of(stride, 8)
    else:
        inside = inside & (j < width)[None, :]
    return start + i[:, None] * stride + j[None, :], inside, rows, first, tl.load(at + 5) != 0


@launched
@triton.jit
def _spread(x, parts, table, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and squared distance from it of every column of a tile."""
    at, inside, rows, first, filters = _tile(table, EVEN, ROWS, COLUMNS)
    if filters:
        v = tl.load(x + at, inside, 0.0).to(tl.float32)
        count = tl.minimum(rows - (tl.program_id(0) - first) * ROWS, ROWS).to(tl.float32)
        mean = tl.sum(v, 0) / count
        off = tl.where(inside, v - mean[None, :], 0.0)
        place = parts + tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, COLUMNS)
        tl.store(place, mean)
        tl.store(place + COLUMNS, tl.sum(off * off, 0))


@launched
@triton.jit
def _scaled(x, y, parts, kept, table, eps, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = (x - mean) scale, of filters; kept: mean and scale, with a strip's first tile."""
    at, inside, rows, first, filters = _tile(table, EVEN, ROWS, COLUMNS)
    j = tl.arange(0, COLUMNS)
    mean = tl.zeros((COLUMNS,), tl.float32)
    scale = tl.full((COLUMNS,), 1.0, tl.float32)
    if filters:
        square = tl.zeros((COLUMNS,), tl.float32)
        for k in range(tl.cdiv(rows, ROWS)):  # the tiles of a strip put together, as Chan et al. (1979) do it
            place = parts + (first + k) * (2 * COLUMNS) + j
            count, before = tl.minimum(rows - k * ROWS, ROWS).to(tl.float32), k * (ROWS * 1.0)
            off = tl.load(place) - mean
            mean += off * (count / (before + count))
            square += tl.load(place + COLUMNS) + off * off * (before * count / (before + count))
        scale = tl.rsqrt(square + eps)
        if tl.program_id(0) == first:
            tl.store(kept + first * (2 * COLUMNS) + j, mean)
            tl.store(kept + first * (2 * COLUMNS) + COLUMNS + j, scale)
    v = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    tl.store(y + at, v.to(y.dtype.element_ty), inside)


@launched
@triton.jit
def _along(x, g, kept, parts, table, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of g and of g y over every column of a tile."""
    at, inside, _, first, filters = _tile(table, EVEN, ROWS, COLUMNS)
    if filters:
        place = kept + first * (2 * COLUMNS) + tl.arange(0, COLUMNS)
        mean, scale = tl.load(place), tl.load(place + COLUMNS)
        grad = tl.load(g + at, inside, 0.0).to(tl.float32)
        y = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        place = parts + tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, COLUMNS)
        tl.store(place, tl.sum(grad, 0))
        tl.store(place + COLUMNS, tl.sum(grad * y, 0))


@launched
@triton.jit
def _back(x, g, dx, kept, parts, table, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = (x - mean) scale: dx = scale (g - mean of g - y times the sum of g y)."""
    at, inside, rows, first, filters = _tile(table, EVEN, ROWS, COLUMNS)
    j = tl.arange(0, COLUMNS)
    mean = tl.zeros((COLUMNS,), tl.float32)
    total, along = mean, mean
    scale = tl.full((COLUMNS,), 1.0, tl.float32)
    if filters:
        mean = tl.load(kept + first * (2 * COLUMNS) + j)
        scale = tl.load(kept + first * (2 * COLUMNS) + COLUMNS + j)
        for k in range(tl.cdiv(rows, ROWS)):
            place = parts + (first + k) * (2 * COLUMNS) + j
            total += tl.load(place)
            along += tl.load(place + COLUMNS)
        total = total / rows
    y = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    grad = tl.load(g + at, inside, 0.0).to(tl.float32) - total[None, :] - y * along[None, :]
    tl.store(dx + at, (grad * scale[None, :]).to(dx.dtype.element_ty), inside)


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tables: Tensor) -> Tensor:
        y, parts, kept = torch.empty_like(x), _per_tile(tables), _per_tile(tables)
        for (table, *how), part, mine in zip(_each(tables), parts, kept, strict=True):
            _spread[(len(table),)](x, part, table, *how, num_warps=8)
            _scaled[(len(table),)](x, y, part, mine, table, EPS, *how, num_warps=8)
        ctx.save_for_backward(x, *kept)
        ctx.tables = tables
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        g, dx, parts = grads[0].contiguous(), torch.empty_like(x), _per_tile(ctx.tables)
        for (table, *how), part, mine in zip(_each(ctx.tables), parts, kept, strict=True):
            _along[(len(table),)](x, g, mine, part, table, *how, num_warps=8)
            _back[(len(table),)](x, g, dx, mine, part, table, *how, num_warps=8)
        return dx, *(None for _ in ctx.tables)


def _each(tables: Sequence[Tensor]) -> list[tuple[Tensor, bool, int, int]]:
    """Those that are not empty, with what a kernel must know of them: whether they are even, and a tile's sizes."""
    return [(table, even, _ROWS, _COLUMNS) for table, even in zip(tables, (True, False), strict=True) if len(table)]


def _per_tile(tables: Sequence[Tensor]) -> list[Tensor]:
    """Room for two numbers of each column of every tile."""
    return [torch.empty(len(table), 2, _COLUMNS, device=table.device) for table, *_ in _each(tables)]


def standardise(x: Tensor, where: Tiles) -> Tensor:
    """Every filter less its mean and at length 1, as `stacked.standardised`; all else as it is."""
    y: Tensor = _Standardise.apply(x.contiguous(), *where)
    return y


# --- gradients --------------------------------------------------------------------------------------------------------


def pieces(parts: list[Part], device: torch.device) -> Tensor:
    """The table for `shorten`: every part in short pieces, client by client; each client has as many."""
    found = []
    for part in sorted(parts):
        end = part.start + part.rows * part.columns
        found += [(part.client, first, min(_PIECE, end - first)) for first in range(part.start, end, _PIECE)]
    return torch.tensor(found, dtype=torch.int64, device=device)


@launched
@triton.jit
def _squares(g, out, table, BLOCK: tl.constexpr):
    at = table + tl.program_id(0).to(tl.int64) * 3
    start, size = tl.load(at + 1), tl.load(at + 2)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        v = tl.load(g + start + i, i < size, 0.0).to(tl.float32)
        total += v * v
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@launched
@triton.jit
def _times(g, factor, table, BLOCK: tl.constexpr):
    at = table + tl.program_id(0).to(tl.int64) * 3
    client, start, size = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    by = tl.load(factor + client)
    if by != 1.0:
        for first in range(0, size, BLOCK):
            i = first + tl.arange(0, BLOCK)
            v = tl.load(g + start + i, i < size, 0.0).to(tl.float32) * by
            tl.store(g + start + i, v.to(g.dtype.element_ty), i < size)


def shorten(grad: Tensor, table: Tensor, clients: int, limit: float) -> None:
    """Every client's gradient to no more than `limit`, in place."""
    squares = torch.empty(len(table), device=grad.device)
    _squares[(len(table),)](grad, squares, table, 2048)
    lengths = squares.view(clients, -1).double().sum(1).sqrt()
    _times[(len(table),)](grad, (limit / lengths).clamp(max=1.0).float(), table, 2048)
