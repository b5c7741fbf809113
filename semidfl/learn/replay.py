"""Training steps on a GPU: recorded once as a CUDA graph, then replayed on whatever lies in its memory.

A step of a small network is hundreds of kernels of a few microseconds each; launched one by one from Python they
keep the GPU waiting. A recording has memory of its own for weights, state and a round's batches: a round copies its
tensors there, replays the step as often as there are batches, and takes the result out.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.models.stacked import fused

__all__ = ["recorded"]

_MOST = 8
"""recordings kept of an owner: each holds a batch's activations"""

_kept: WeakKeyDictionary[object, OrderedDict[Hashable, "Recording"]] = WeakKeyDictionary()


def recorded(
    owner: object,
    kind: Hashable,
    step: Callable[..., None],
    learner: Learner,
    stepped: Sequence[Tensor],
    fixed: Sequence[Tensor],
) -> "Recording":
    """The recording of `step` for tensors of these shapes; it lives as long as its owner."""
    tensors = [learner.params, *learner.optimiser.values(), *stepped, *fixed]
    key = (kind, tuple((tuple(x.shape), x.dtype, x.device) for x in tensors))
    mine = _kept.setdefault(owner, OrderedDict())
    if key not in mine:
        # An owner's recordings are played one after the other and leave nothing behind: they share their scratch
        # memory. Not with those of others: CUDA takes the memory back when the last recording in it goes.
        other = next(iter(mine.values()), None)
        pool = other.pool if other else torch.cuda.graph_pool_handle()
        mine[key] = Recording(step, learner, stepped, fixed, pool)
        if len(mine) > _MOST:
            mine.popitem(last=False)
    mine.move_to_end(key)
    return mine[key]


class Recording:
    def __init__(
        self,
        step: Callable[..., None],
        learner: Learner,
        stepped: Sequence[Tensor],
        fixed: Sequence[Tensor],
        pool: Any,
    ) -> None:
        device = learner.params.device
        self._params = torch.empty_like(learner.params)
        self._state = {name: torch.empty_like(x) for name, x in learner.optimiser.items()}
        self._losses = torch.zeros(len(stepped[0]), device=device)
        self._rate = torch.zeros(1, device=device)
        self._stepped = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in stepped]
        self._fixed = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in fixed]
        self._at = torch.zeros(1, dtype=torch.int64, device=device)

        def one() -> None:
            now = [x.index_select(1, self._at).squeeze(1) for x in self._stepped]
            step(self._params, self._state, self._losses, self._rate, *now, *self._fixed)
            self._at.add_(1)

        self._fill(learner, stepped, fixed, 0.0)
        if fused(self._params):
            from semidfl.models.launch import rehearse

            rehearse(one)
            self._fill(learner, stepped, fixed, 0.0)
        self._graph, self.pool = _record(one, device, pool), pool

    def run(
        self, learner: Learner, stepped: Sequence[Tensor], fixed: Sequence[Tensor], rate: float
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """A step for each of the second axis of `stepped`: parameters, optimiser state, summed loss (C,)."""
        self._fill(learner, stepped, fixed, rate)
        for _ in range(stepped[0].shape[1]):
            self._graph.replay()
        return self._params.clone(), {name: x.clone() for name, x in self._state.items()}, self._losses.clone()

    def _fill(self, learner: Learner, stepped: Sequence[Tensor], fixed: Sequence[Tensor], rate: float) -> None:
        self._params.copy_(learner.params)
        for name, x in learner.optimiser.items():
            self._state[name].copy_(x)
        for mine, x in zip((*self._stepped, *self._fixed), (*stepped, *fixed), strict=True):
            mine.copy_(x)
        self._losses.zero_()
        self._at.zero_()
        self._rate.fill_(rate)


def _record(work: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """Once in the open, so that libraries choose their kernels by trying them; then for the record."""
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(aside):
        work()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # a recording cannot take memory from what is only kept for later
        graph.capture_begin(pool)
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(aside)
    return graph
