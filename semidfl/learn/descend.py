"""Local training (Eq. 2): a number of gradient steps of all clients of a chunk at once."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.learn.optimise import Optimiser
from semidfl.learn.replay import recorded
from semidfl.models.stacked import Network

__all__ = ["descend"]

Outcome = tuple[Tensor, dict[str, Tensor], Tensor]
"""Parameters (C, D), optimiser state, mean loss (C,)."""


def descend(
    loss_of: Callable[..., Tensor],
    kind: Hashable,
    network: Network,
    optimiser: Optimiser,
    learner: Learner,
    trains: Tensor,
    stepped: Sequence[Tensor],
    fixed: Sequence[Tensor] = (),
    scale: float = 1.0,
) -> Outcome:
    """A step for each of the second axis of `stepped` (C, steps, …); a client stays as it is where `trains` is False.

    `loss_of(params, *stepped at the step, *fixed)` gives one loss a client (C,). They are summed for one backward
    pass: no client's weights touch another's loss. What the loss depends on besides must be told by `kind`: on a
    GPU the step of a kind is recorded once, then replayed on new tensors.
    """

    def step(params: Tensor, state: dict[str, Tensor], losses: Tensor, rate: float | Tensor, *now: Tensor) -> None:
        leaf = params.detach().to(network.dtype).requires_grad_()
        loss = loss_of(leaf, *now)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        with torch.no_grad():
            optimiser.step(params, grad, state, rate)
            losses += loss.detach()

    steps, rate = stepped[0].shape[1], optimiser.lr * scale
    if learner.params.is_cuda:
        make = recorded(network, (kind, optimiser), step, learner, stepped, fixed)
        params, state, losses = make.run(learner, stepped, fixed, rate)
    else:
        params, state = learner.params.clone(), {name: x.clone() for name, x in learner.optimiser.items()}
        losses = torch.zeros(len(params))
        for k in range(steps):
            step(params, state, losses, rate, *(x[:, k] for x in stepped), *fixed)
    # Without data the gradient is zero, but momentum would carry the weights on.
    idle = ~trains[:, None]
    params = torch.where(idle, learner.params, params)
    state = {name: torch.where(idle, learner.optimiser[name], x) for name, x in state.items()}
    return params, state, losses / steps
