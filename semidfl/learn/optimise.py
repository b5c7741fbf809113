"""Optimisers on stacked parameters: SGD with momentum and Adam, as in torch.optim, on one matrix (C, D).

State is a dict of tensors that belongs to the client: it is saved with it and never mixed. Parameters may lie in any
other order, all in one row; for Adam, which counts a client's steps, the state then tells the owner of each.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from semidfl.models.stacked import fused

__all__ = ["Optimiser", "cosine"]

_BETA2, _EPS = 0.999, 1e-8  # of Adam


@dataclass(frozen=True)
class Optimiser:
    kind: Literal["sgd", "adam"]
    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0  # the length of a client's gradient; who knows where its weights lie, cuts it
    beta1: float = 0.9  # of Adam

    def start(self, params: Tensor) -> dict[str, Tensor]:
        """Fresh state for parameters (C, D)."""
        if self.kind == "sgd":
            return {"velocity": torch.zeros_like(params)}
        steps = torch.zeros(params.shape[0], 1, device=params.device)
        return {"mean": torch.zeros_like(params), "square": torch.zeros_like(params), "steps": steps}

    def step(self, params: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float | Tensor) -> None:
        """One step in place; `rate` is the learning rate, as a tensor (1,) where the step is recorded and replayed."""
        if isinstance(rate, Tensor) and fused(params):
            return self._fused(params, grad, state, rate)
        grad = grad.to(params.dtype)
        if self.weight_decay:
            grad = grad.add(params, alpha=self.weight_decay)
        if self.kind == "adam":
            return self._adam(params, grad, state, rate)
        velocity = state["velocity"].mul_(self.momentum).add_(grad)
        change = grad.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        if isinstance(rate, Tensor):
            params.addcmul_(change, rate, value=-1)
        else:
            params.sub_(change, alpha=rate)

    def _adam(self, params: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float | Tensor) -> None:
        steps = state["steps"].add_(1)
        if "owner" in state:
            steps = steps[state["owner"].long(), 0]
        mean = state["mean"].lerp_(grad, 1 - self.beta1)
        square = state["square"].mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
        root = (square / (1 - _BETA2**steps)).sqrt_().add_(_EPS)
        params.sub_(mean / root * (rate / (1 - self.beta1**steps)))

    def _fused(self, params: Tensor, grad: Tensor, state: dict[str, Tensor], rate: Tensor) -> None:
        """The same in one pass over memory."""
        from semidfl.models import kernels

        if self.kind == "sgd":
            kernels.momentum(params, grad, state["velocity"], rate, self.momentum, self.weight_decay, self.nesterov)
        else:
            if self.weight_decay:
                grad = grad.to(params.dtype).add(params, alpha=self.weight_decay)
            steps = state["steps"].add_(1)
            moments, owner = (state["mean"], state["square"]), state.get("owner")
            kernels.adam(params, grad, *moments, steps, owner, rate, self.beta1, _BETA2, _EPS)


def cosine(t: int, rounds: int) -> float:
    """Factor of the learning rate in round t of 1..rounds: from 1 down to almost 0."""
    return 0.5 * (1 + math.cos(math.pi * (t - 1) / rounds))
