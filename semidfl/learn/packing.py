"""A stack of clients without its empty slots.

A batch has a block of slots for every source that some client of the stack has, and most clients lack one: with two
labelled, two mixed and six unlabelled clients two of five slots of a generator's batch are empty. So a light network
runs on the blocks that there are: each client's first beside its weights, every further one beside a copy of them. A
heavy one, whose weights take long to copy, runs on all of them, the empty ones last, and its layers stop before those.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from semidfl.models.stacked import Network

__all__ = ["Held", "pack", "run_packed"]

Held = tuple[tuple[bool, ...], ...]
"""for every block of slots, which clients have its source"""


def pack(network: Network, held: Held, device: torch.device) -> tuple[Tensor, ...]:
    """How to run the network without empty slots; nothing if all are full."""
    if all(map(all, held)):
        return ()
    return _order(held, device) if network.heavy else _copies(held, device)


@cache
def _copies(held: Held, device: torch.device) -> tuple[Tensor, ...]:
    """Where the blocks to run are, client by block (C + R,), and whose the last R of them."""
    clients = range(len(held[0]))
    own = [[block for block, has in enumerate(held) if has[i]] or [0] for i in clients]
    further = [(i, block) for i in clients for block in own[i][1:]]
    blocks = [(i, own[i][0]) for i in clients] + further
    place, owner = [i * len(held) + block for i, block in blocks], [i for i, _ in further]
    return tuple(torch.tensor(x, dtype=torch.int64, device=device) for x in (place, owner))


@cache
def _order(held: Held, device: torch.device) -> tuple[Tensor, ...]:
    """Every client's blocks, full ones first: where they are (C x blocks,), and how many are full (C,)."""
    clients, blocks = range(len(held[0])), len(held)
    place = [i * blocks + k for i in clients for k in sorted(range(blocks), key=lambda k: not held[k][i])]
    full = [sum(has[i] for has in held) for i in clients]
    return tuple(torch.tensor(x, dtype=torch.int64, device=device) for x in (place, full))


def run_packed(network: Network, packing: tuple[Tensor, ...], blocks: int, params: Tensor, *inputs: Tensor) -> Tensor:
    """The whole of network(params, *inputs); in the slots of blocks that `packing` leaves out may be any number."""
    if not packing:
        return network(params, *inputs, whole=True)
    (place, who), clients = packing, len(inputs[0])
    rows = [x.unflatten(1, (blocks, -1)).flatten(0, 1).index_select(0, place) for x in inputs]
    if network.heavy:
        size = rows[0].shape[1]
        full = [x.unflatten(0, (-1, blocks)).flatten(1, 2) for x in rows]
        y = network(params, *full, filled=who * size, whole=True).unflatten(1, (blocks, size)).flatten(0, 1)
    else:
        y = network(cast(Tensor, _Copied.apply(params, who)), *rows, whole=True)  # type: ignore[no-untyped-call]
    spread = y.new_zeros(clients * blocks, *y.shape[1:]).index_copy(0, place, y)
    return cast(Tensor, spread.unflatten(0, (clients, blocks))).flatten(1, 2)


class _Copied(Function):
    """params (C, D) with copies of the owners' rows behind them."""

    @staticmethod
    def forward(ctx: Any, params: Tensor, owner: Tensor) -> Tensor:
        ctx.save_for_backward(owner)
        return torch.cat([params, params.index_select(0, owner)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (owner,) = ctx.saved_tensors
        mine, copies = grad[: len(grad) - len(owner)], grad[len(grad) - len(owner) :]
        return mine.index_add(0, owner, copies), None
