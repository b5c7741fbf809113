"""Optimisers on stacked parameters: SGD with momentum and Adam, as in torch.optim, on one matrix (C, D).

State is a dict of tensors that belongs to the client: it is saved with it and never mixed.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Optimiser", "cosine"]


@dataclass(frozen=True)
class Optimiser:
    kind: Literal["sgd", "adam"]
    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9  # of Adam

    def start(self, params: Tensor) -> dict[str, Tensor]:
        """Fresh state for parameters (C, D)."""
        if self.kind == "sgd":
            return {"velocity": torch.zeros_like(params)}
        steps = torch.zeros(params.shape[0], 1, device=params.device)
        return {"mean": torch.zeros_like(params), "square": torch.zeros_like(params), "steps": steps}

    def step(self, params: Tensor, grad: Tensor, state: dict[str, Tensor], scale: float = 1.0) -> None:
        """One step in place; `scale` multiplies the learning rate."""
        if self.weight_decay:
            grad = grad.add(params, alpha=self.weight_decay)
        if self.kind == "sgd":
            velocity = state["velocity"].mul_(self.momentum).add_(grad)
            change = grad.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            params.sub_(change, alpha=self.lr * scale)
        else:
            self._adam(params, grad, state, self.lr * scale)

    def _adam(self, params: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        beta1, beta2, eps = self.beta1, 0.999, 1e-8
        steps = state["steps"].add_(1)
        mean = state["mean"].lerp_(grad, 1 - beta1)
        square = state["square"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(eps)
        params.sub_(mean / root * (lr / (1 - beta1**steps)))


def cosine(t: int, rounds: int) -> float:
    """Factor of the learning rate in round t of 1..rounds: from 1 down to almost 0."""
    return 0.5 * (1 + math.cos(math.pi * (t - 1) / rounds))
