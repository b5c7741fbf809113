"""The network on the blocks that clients have, against the network on all slots."""

import pytest
import torch
from helpers import random
from small import tiny
from torch import Tensor

from semidfl.data.sources import load
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.learn.batch import Batch
from semidfl.learn.packing import pack, run_packed
from semidfl.models.cnn import CNN
from semidfl.models.stacked import Network

CPU = torch.device("cpu")
HELD = ((True, True, False, False), (False, True, True, False), (False, True, False, False))
"""three blocks, four clients: the first block alone, all, the second alone, none"""


def small() -> Network:
    return Network(lambda: CNN(1, 8, 8, 10), torch.float64)


def test_places_and_owners() -> None:
    place, owner = pack(small(), HELD, CPU)
    # Clients' first blocks, one a client (of the last one, which has none, block 0), then the second client's others.
    assert place.tolist() == [0, 3, 7, 9, 4, 5]
    assert owner.tolist() == [1, 1]


def test_order_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "heavy", True)
    place, full = pack(small(), HELD, CPU)
    assert place.tolist() == [0, 1, 2, 3, 4, 5, 7, 6, 8, 9, 10, 11]
    assert full.tolist() == [1, 3, 1, 0]


def test_nothing_to_leave_out() -> None:
    assert pack(small(), ((True, True), (True, True)), CPU) == ()


@pytest.mark.parametrize("heavy", [False, True], ids=["copied", "in order"])
def test_values_and_gradients_are_those_of_the_whole(heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "heavy", heavy)
    network = small()
    size, there = 2, torch.tensor(HELD).T.repeat_interleave(2, 1)  # (C, S)
    images, weights = random(1, 4, 3 * size, 1, 8, 8).double(), random(2, 4, 3 * size, 10).double() * there[..., None]
    start = network.initial(0).double() + 0.1 * random(3, 4, network.size).double()

    def outcome(packing: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        params = start.clone().requires_grad_()
        y = run_packed(network, packing, len(HELD), params, images)
        (grad,) = torch.autograd.grad((y * weights).sum(), params)
        return y, grad

    whole, packed = outcome(()), outcome(pack(network, HELD, CPU))
    torch.testing.assert_close(packed[0][there], whole[0][there], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed[1], whole[1], rtol=1e-4, atol=1e-6)
    assert not packed[1][3].any()  # who has nothing learns nothing
    if not heavy:
        assert not packed[0][0, size:].any()  # what is left out is zero


@pytest.mark.parametrize(("method", "turns"), [("semidfl", 0.0), ("semidfl", 1.0), ("flexmatch", 0.0)])
def test_a_run_is_the_same(method: str, turns: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with all sources, as on a GPU."""
    changes = {"classifier__batch": 4, "classifier__turns": turns, "generator__fill": True}
    config = tiny(method=method, rounds=4, compute__chunk=4, **changes)

    def last() -> dict[str, Tensor]:
        method, cohort = prepare(config, load("digits"))
        for _ in train(config, method, cohort, MemoryExchange(cohort.ids)):
            pass
        return cohort.state()

    before, packings = last(), []
    monkeypatch.setattr(Batch, "packing", lambda self, net: packings.append(pack(net, self.held, CPU)) or packings[-1])
    after = last()
    assert packings
    assert all(len(packing) == 2 for packing in packings)
    for name in ("classifier.params", "generator.params"):
        if name in before:
            # Adam makes much of a gradient that is all but zero: single weights may differ by more.
            assert (after[name] - before[name]).norm() < 1e-4 * before[name].norm()
