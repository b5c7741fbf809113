"""Optimisers on stacked parameters against torch.optim, which gets one client at a time."""

import pytest
import torch
from helpers import assert_close, random
from torch import Tensor

from semidfl.learn.optimise import Optimiser, cosine

CLIENTS, SIZE, STEPS = 3, 20, 5

SGD = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.8, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
]


def gradient(params: Tensor, client: int, step: int) -> Tensor:
    """Of a bowl that is steeper for each client and moves with every step; the first number never has one."""
    grad = (client + 1) * (params - random(100 * client + step, SIZE))
    grad[0] = 0.0
    return grad


def by_torch(make, start: Tensor, client: int, steps: int) -> Tensor:
    params = start.clone().requires_grad_()
    optimiser = make([params])
    for step in range(steps):
        params.grad = gradient(params.detach(), client, step)
        optimiser.step()
    return params.detach()


def ours(optimiser: Optimiser, start: Tensor, scale: float = 1.0) -> Tensor:
    params, state = start.clone(), optimiser.start(start)
    for step in range(STEPS):
        grads = torch.stack([gradient(row, i, step) for i, row in enumerate(params)])
        optimiser.step(params, grads, state, optimiser.lr * scale)
    return params


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_is_torchs(options: dict[str, float]) -> None:
    start = random(1, CLIENTS, SIZE)
    trained = ours(Optimiser("sgd", lr=0.05, **options), start)
    for i in range(CLIENTS):
        expected = by_torch(lambda p: torch.optim.SGD(p, lr=0.05, **options), start[i], i, STEPS)
        assert_close(trained[i], expected, 1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(decay: float) -> None:
    start = random(1, CLIENTS, SIZE)
    trained = ours(Optimiser("adam", lr=0.1, weight_decay=decay), start)
    for i in range(CLIENTS):
        expected = by_torch(lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=decay), start[i], i, STEPS)
        assert_close(trained[i] - start[i], expected - start[i], 1e-4)  # 1 - 0.999 is good to 6e-5 in float32
        assert_close(trained[i], expected)


def test_adam_knows_how_many_steps_each_client_has_made() -> None:
    """A client that paused is corrected for its own steps, not for those of the others."""
    start, optimiser = random(1, 2, SIZE), Optimiser("adam", lr=0.1)
    params, state = start.clone(), optimiser.start(start)
    for step in range(STEPS):
        grads = torch.stack([gradient(row, i, step) for i, row in enumerate(params)])
        before, kept = params.clone(), {name: x.clone() for name, x in state.items()}
        optimiser.step(params, grads, state, optimiser.lr)
        if step >= 2:  # client 1 pauses from here on, as `descend` lets it
            params[1] = before[1]
            for name in state:
                state[name][1] = kept[name][1]
    optimiser.step(params, torch.stack([gradient(params[0], 0, STEPS), gradient(params[1], 1, 2)]), state, optimiser.lr)
    for i, steps in ((0, STEPS + 1), (1, 3)):
        assert_close(params[i], by_torch(lambda p: torch.optim.Adam(p, lr=0.1), start[i], i, steps))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_scale_multiplies_the_learning_rate(kind: str) -> None:
    start = random(1, CLIENTS, SIZE)
    make = torch.optim.Adam if kind == "adam" else lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)
    trained = ours(Optimiser(kind, lr=0.1), start, scale=0.3)
    for i in range(CLIENTS):
        assert_close(trained[i], by_torch(lambda p: make(p, lr=0.03), start[i], i, STEPS))


def test_the_cosine_schedule_is_torchs() -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=12)
    for t in range(1, 13):
        assert cosine(t, 12) == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
