"""Gradients that are cut to a length: against torch, for a row a client and layer by layer, and what it is for."""

from pathlib import Path

import pytest
import torch
from helpers import network_of, params_of, random
from small import tiny
from test_stacked import CASES
from torch import Tensor, nn

from semidfl import experiment
from semidfl.cohort import Learner
from semidfl.config import override
from semidfl.learn.descend import descend
from semidfl.learn.optimise import Optimiser
from semidfl.models.stacked import Network

NETWORK = network_of(CASES["cnn 8x8"][0])
LIMIT = 2.0


def gradients(network: Network) -> Tensor:
    """Much too long, just too long, short, none."""
    g = random(1, 4, network.size)
    return g / g.norm(dim=1, keepdim=True) * torch.tensor([1e4, 2.001, 1.5, 0.0])[:, None]


def by_torch(network: Network, grad: Tensor) -> Tensor:
    """One client's, spread over parameters of the layers' sizes."""
    params = [nn.Parameter(torch.zeros(size)) for size in network.sizes]
    for p, part in zip(params, grad.split(network.sizes), strict=True):
        p.grad = part.clone()
    nn.utils.clip_grad_norm_(params, LIMIT)
    return torch.cat([p.grad for p in params if p.grad is not None])


def test_it_is_torchs_for_each_client() -> None:
    grads = gradients(NETWORK)
    cut = NETWORK.shortened(grads, LIMIT)
    for ours, before in zip(cut, grads, strict=True):
        torch.testing.assert_close(ours, by_torch(NETWORK, before), rtol=2e-6, atol=1e-9)
    assert torch.equal(cut[2:], grads[2:])  # what is short enough stays as it is
    assert cut[:2].norm(dim=1).tolist() == pytest.approx([LIMIT, LIMIT])


def test_layer_by_layer_it_is_the_same() -> None:
    grads = gradients(NETWORK)
    layered = NETWORK.shortened(NETWORK.by_layer(grads), LIMIT)
    torch.testing.assert_close(NETWORK.by_client(layered), NETWORK.shortened(grads, LIMIT), rtol=1e-6, atol=1e-9)


def test_a_client_alone_gets_the_same_bits() -> None:
    grads = gradients(NETWORK)
    cut = NETWORK.shortened(grads, LIMIT)
    assert all(torch.equal(NETWORK.shortened(grads[i : i + 1], LIMIT)[0], cut[i]) for i in range(len(grads)))


def test_it_comes_before_weight_decay_and_momentum() -> None:
    """A step of `descend` against torch's own, on a loss that is a thousand times too steep."""
    options = {"momentum": 0.9, "weight_decay": 0.1}
    start = params_of(NETWORK, 2)
    goals = 1000 * random(2, 2, 3, NETWORK.size)  # (C, steps, D)
    optimiser = Optimiser("sgd", 0.05, clip=LIMIT, **options)
    trains = torch.tensor([True, True])

    def loss_of(params: Tensor, goal: Tensor) -> Tensor:
        return (params * goal).sum(1)

    learner = Learner(start, optimiser.start(start))
    trained, _, _ = descend(loss_of, "test", NETWORK, optimiser, learner, trains, [goals])
    for i in range(2):
        p = start[i].clone().requires_grad_()
        theirs = torch.optim.SGD([p], 0.05, **options)
        for goal in goals[i]:
            p.grad = by_torch(NETWORK, goal)
            theirs.step()
        torch.testing.assert_close(trained[i], p.detach(), rtol=1e-5, atol=1e-7)


def test_a_run_that_would_diverge_does_not(tmp_path: Path) -> None:
    steep = override(tiny(), {"method": "dfl-lb", "classifier.lr": 1.0, "rounds": 10})
    alone = experiment.run(steep, tmp_path / "without").accuracy
    cut = experiment.run(override(steep, {"classifier.grad_clip": 0.1}), tmp_path / "with").accuracy
    assert (alone or 0) < 0.2
    assert (cut or 0) > 0.5
