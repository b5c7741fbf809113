"""Layers cut from one row of weights, whose gradients need not be put together again.

The gradient of a cut is a concatenation: with ten ResNets, 450 MB are moved in a step for nothing else. But whoever
makes the gradient of a layer can write it at once where it belongs in the row's: at the layer's home.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["apart", "home_of"]


def apart(row: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The layers that lie in a row one after the other. Their gradients are asked for once, not again and again."""
    sizes, room = [prod(shape) for shape in shapes], torch.empty_like(row)
    parts = cast(tuple[Tensor, ...], _Apart.apply(row, room, sizes))  # type: ignore[no-untyped-call]
    layers = [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]
    for layer, home in zip(layers, room.split(sizes), strict=True):
        cast(Any, layer).home = home.view(layer.shape)
    return layers


def home_of(layer: Tensor) -> Tensor | None:
    """Where its gradient may be written: once. What runs twice has two gradients, and the second needs other room."""
    home: Tensor | None = layer.__dict__.pop("home", None)
    return home


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, room: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.room, ctx.sizes = room, sizes
        parts: tuple[Tensor, ...] = row.split(sizes)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        room: Tensor = ctx.room
        here, there = [], []
        for part, grad in zip(room.split(ctx.sizes), grads, strict=True):
            if grad is None:
                part.zero_()
            elif grad.data_ptr() != part.data_ptr() or not grad.is_contiguous():
                here.append(part)
                there.append(grad)
        if here:
            torch._foreach_copy_(here, there)  # in one kernel: there are dozens of small layers
        return room, None, None
