"""Training with all clients' weights layer by layer, as on a GPU: the same as with a row a client."""

import pytest
import torch
from helpers import network_of, params_of, random
from test_stacked import CASES
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.learn import descend as steps
from semidfl.learn.descend import descend
from semidfl.learn.optimise import Optimiser


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("sgd", 0.01, nesterov=True, weight_decay=0.01),
        Optimiser("sgd", 0.01, clip=0.1),
        Optimiser("adam", 0.01),
    ],
)
def test_it_is_the_same_training(name: str, optimiser: Optimiser, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client has nothing to learn."""
    build, inputs = CASES[name]
    network = network_of(build)
    params = params_of(network, len(inputs[0]))
    assert torch.equal(network.by_client(network.by_layer(params)), params)
    target = random(5, *network(params, *inputs).shape)[:, None].expand(-1, 2, *network(params, *inputs).shape[1:])
    trains = torch.tensor([True, False, True])[: len(params)]

    def loss_of(p: Tensor, now: Tensor) -> Tensor:
        return (network(p, *inputs) - now).square().flatten(1).mean(1)

    ends = []
    for layered in (False, True):
        monkeypatch.setattr(steps, "_layered", lambda *_, layered=layered: layered)
        start = {name: random(6, *x.shape).abs() for name, x in optimiser.start(params).items()}
        trained, state, losses = descend(loss_of, "test", network, optimiser, Learner(params, start), trains, [target])
        ends.append((trained, *state.values(), losses))
        assert list(state) == list(start)
    for rows, layers in zip(*ends, strict=True):
        torch.testing.assert_close(layers, rows, rtol=1e-5, atol=1e-7)
    assert not torch.equal(ends[0][0][0], params[0])
    assert torch.equal(ends[0][0][1], params[1])


def test_only_who_counts_steps_is_told_whose_a_weight_is() -> None:
    network = network_of(CASES["cnn 8x8"][0])
    params = params_of(network, 3)
    names = {
        kind: set(steps._by_layer(network, Learner(params, Optimiser(kind, 0.1).start(params))).optimiser)
        for kind in ("sgd", "adam")
    }
    assert names == {"sgd": {"velocity"}, "adam": {"mean", "square", "steps", "owner"}}
