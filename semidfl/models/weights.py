"""GPU kernels on the weights of all clients, wherever those lie: filters standardised, gradients shortened.

A ResNet has twenty layers of filters and sixty of weights; layer by layer, in PyTorch's operations, a step would launch
hundreds of kernels for them. Here a table says where everything is, and one kernel goes through it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from semidfl.models.launch import launched
from semidfl.models.stacked import EPS, Part

__all__ = ["pieces", "shorten", "standardise", "strips"]

_COLUMNS, _ROWS = 64, 64
_PIECE = 1 << 16

# --- filters ----------------------------------------------------------------------------------------------------------


def strips(parts: list[Part], device: torch.device) -> Tensor:
    """The table for `standardise`: every part in strips of columns, the longest first; what is no filter is copied."""
    found = []
    for part in parts:
        if part.filters:
            for first in range(0, part.columns, _COLUMNS):
                width = min(_COLUMNS, part.columns - first)
                found.append((part.start + first, part.rows, part.columns, width, 1))
            continue
        whole, rest = divmod(part.rows * part.columns, _COLUMNS)
        if whole:
            found.append((part.start, whole, _COLUMNS, _COLUMNS, 0))
        if rest:
            found.append((part.start + whole * _COLUMNS, 1, rest, rest, 0))
    return torch.tensor(sorted(found, key=lambda strip: -strip[1]), dtype=torch.int64, device=device)


@triton.jit
def _strip(table, COLUMNS: tl.constexpr):
    """Where a program's strip begins, its rows, from row to row, which columns there are, whether they are filters."""
    at = table + tl.program_id(0).to(tl.int64) * 5
    j = tl.arange(0, COLUMNS)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), j, j < tl.load(at + 3), tl.load(at + 4)


@launched
@triton.jit
def _standardise(x, y, kept, table, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    start, rows, stride, j, there, filters = _strip(table, COLUMNS)
    mean = tl.zeros((COLUMNS,), tl.float32)
    scale = tl.full((COLUMNS,), 1.0, tl.float32)
    if filters != 0:
        total = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, rows, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = (i < rows)[:, None] & there[None, :]
            total += tl.sum(tl.load(x + start + i[:, None] * stride + j[None, :], inside, 0.0).to(tl.float32), 0)
        mean = total / rows
        square = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, rows, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = (i < rows)[:, None] & there[None, :]
            v = tl.load(x + start + i[:, None] * stride + j[None, :], inside, 0.0).to(tl.float32) - mean[None, :]
            square += tl.sum(tl.where(inside, v * v, 0.0), 0)
        scale = tl.rsqrt(square + eps)
    for first in range(0, rows, ROWS):
        i = first + tl.arange(0, ROWS)
        inside = (i < rows)[:, None] & there[None, :]
        at = start + i[:, None] * stride + j[None, :]
        v = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        tl.store(y + at, v.to(y.dtype.element_ty), inside)
    place = kept + tl.program_id(0) * (2 * COLUMNS) + j
    tl.store(place, mean)
    tl.store(place + COLUMNS, scale)


@launched
@triton.jit
def _standardise_back(x, g, dx, kept, table, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = (x - mean) scale: dx = scale (g - mean of g - y times the sum of g y)."""
    start, rows, stride, j, there, filters = _strip(table, COLUMNS)
    place = kept + tl.program_id(0) * (2 * COLUMNS) + j
    mean, scale = tl.load(place), tl.load(place + COLUMNS)
    total, along = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    if filters != 0:
        for first in range(0, rows, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = (i < rows)[:, None] & there[None, :]
            at = start + i[:, None] * stride + j[None, :]
            grad = tl.load(g + at, inside, 0.0).to(tl.float32)
            y = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            total += tl.sum(grad, 0)
            along += tl.sum(grad * y, 0)
        total = total / rows
    for first in range(0, rows, ROWS):
        i = first + tl.arange(0, ROWS)
        inside = (i < rows)[:, None] & there[None, :]
        at = start + i[:, None] * stride + j[None, :]
        y = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        grad = tl.load(g + at, inside, 0.0).to(tl.float32) - total[None, :] - y * along[None, :]
        tl.store(dx + at, (grad * scale[None, :]).to(dx.dtype.element_ty), inside)


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        y, kept = torch.empty_like(x), torch.empty(len(table), 2, _COLUMNS, device=x.device)
        _standardise[(len(table),)](x, y, kept, table, EPS, _ROWS, _COLUMNS, num_warps=8)
        ctx.save_for_backward(x, kept, table)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, kept, table = ctx.saved_tensors
        dx = torch.empty_like(x)
        _standardise_back[(len(table),)](x, grads[0].contiguous(), dx, kept, table, _ROWS, _COLUMNS, num_warps=8)
        return dx, None


def standardise(x: Tensor, table: Tensor) -> Tensor:
    """Every filter less its mean and at length 1, as `stacked.standardised`; all else as it is."""
    y: Tensor = _Standardise.apply(x.contiguous(), table)
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
