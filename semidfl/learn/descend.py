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
            if optimiser.clip:
                grad = network.shortened(grad, optimiser.clip)
            optimiser.step(params, grad, state, rate)
            losses += loss.detach()

    steps, rate = stepped[0].shape[1], optimiser.lr * scale
    layered = _layered(network, learner.params)
    mine = _by_layer(network, learner) if layered else learner
    if mine.params.is_cuda:
        make = recorded(network, (kind, optimiser), step, mine, stepped, fixed)
        params, state, losses = make.run(mine, stepped, fixed, rate)
    else:
        params, state = mine.params.clone(), {name: x.clone() for name, x in mine.optimiser.items()}
        losses = torch.zeros(len(learner.params))
        for k in range(steps):
            step(params, state, losses, rate, *(x[:, k] for x in stepped), *fixed)
    if layered:
        params = network.by_client(params)
        state = {
            name: state[name] if x.shape != params.shape else network.by_client(state[name])
            for name, x in learner.optimiser.items()
        }
    # Without data the gradient is zero, but momentum would carry the weights on.
    idle = ~trains[:, None]
    params = torch.where(idle, learner.params, params)
    state = {name: torch.where(idle, learner.optimiser[name], x) for name, x in state.items()}
    return params, state, losses / steps


def _layered(network: Network, params: Tensor) -> bool:
    """Whether to work layer by layer: then no step needs to gather a layer's weights or to spread its gradients."""
    return params.is_cuda and network.heavy and params.shape[1] == network.size


def _by_layer(network: Network, learner: Learner) -> Learner:
    shape, state = learner.params.shape, learner.optimiser
    moved = {name: network.by_layer(x) if x.shape == shape else x for name, x in state.items()}
    if any(x.shape != shape for x in state.values()):  # something that a client has once
        moved["owner"] = network.owners(len(learner.params), learner.params.device)
    return Learner(network.by_layer(learner.params), moved)
