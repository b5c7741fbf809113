"""Local training (Eq. 2): a number of gradient steps of all clients of a chunk at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.learn.optimise import Optimiser

__all__ = ["descend"]

Outcome = tuple[Tensor, dict[str, Tensor], Tensor]
"""Parameters (C, D), optimiser state, mean loss (C,)."""


def descend(
    loss_of: Callable[[Tensor, int], Tensor],
    optimiser: Optimiser,
    learner: Learner,
    steps: int,
    trains: Tensor,
    scale: float = 1.0,
) -> Outcome:
    """`loss_of(params, step)` gives one loss a client (C,); clients where `trains` is False stay as they are.

    The clients' losses are summed for one backward pass: no client's weights touch another's loss.
    """
    params, state = learner.params.clone(), {name: x.clone() for name, x in learner.optimiser.items()}
    losses = torch.zeros(params.shape[0], device=params.device)
    for step in range(steps):
        leaf = params.detach().requires_grad_()
        loss = loss_of(leaf, step)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        with torch.no_grad():
            optimiser.step(params, grad, state, scale)
            losses += loss.detach()
    # Without data the gradient is zero, but momentum would carry the weights on.
    idle = ~trains[:, None]
    params = torch.where(idle, learner.params, params)
    state = {name: torch.where(idle, learner.optimiser[name], x) for name, x in state.items()}
    return params, state, losses / max(steps, 1)
