"""How many clients and samples go through a classifier at once where no gradient is asked for."""

from dataclasses import replace

import pytest
import torch
from helpers import random
from small import tiny

from semidfl import topology
from semidfl.config import override
from semidfl.data.sources import load
from semidfl.models import stacked
from semidfl.models.stacked import WIDE, Network
from semidfl.models.unet import UNet
from semidfl.setup import Setup


def setup_of(model: str, device: str, **compute: object) -> Setup:
    config = override(tiny(), {"classifier.model": model, **{f"compute.{k}": v for k, v in compute.items()}})
    return replace(Setup.of(config, load("digits"), topology.build(config.graph, 0)), device=torch.device(device))


@pytest.mark.parametrize(
    ("model", "device", "clients", "samples", "uneven", "size"),
    [
        ("resnet18", "cuda", 10, WIDE, False, 1),  # one client fills a GPU
        ("resnet18", "cuda", 10, WIDE, True, 1),
        ("resnet18", "cuda", 10, WIDE - 1, False, 10),
        ("cnn", "cuda", 120, 10 * WIDE, False, 120),
        ("cnn", "cuda", 120, 10 * WIDE, True, 16),  # else all are padded to the longest
        ("resnet18", "cpu", 10, WIDE, False, 1),
    ],
)
def test_clients_of_a_pass(model: str, device: str, clients: int, samples: int, uneven: bool, size: int) -> None:
    setup = setup_of(model, device)
    found, limit = setup.passes(clients, samples, uneven)
    assert found == size
    assert limit == setup.limit(setup.classifier, size)


def test_a_deterministic_run_goes_client_by_client() -> None:
    assert setup_of("cnn", "cuda", deterministic=True).passes(10, 10)[0] == 1


def test_a_wide_pass_takes_the_librarys_convolutions_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from semidfl.models import convolution

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Network(lambda: UNet(1, 10, 16, 2), torch.float32)
    params = (network.initial(0)[None] + 0.03 * random(7, 1, network.size)).to(device)
    inputs = [random(5, 1, 4, 1, 8, 8), torch.tensor([[3, 500, 999, 0]]), random(6, 1, 4, 10).softmax(2)]
    inputs = [x.to(device) for x in inputs]
    for name, value in (("fused", lambda x: True), ("WIDE", 4), ("_HEAVY", 0)):
        monkeypatch.setattr(stacked, name, value)
    ours, used = convolution.convolve, []
    monkeypatch.setattr(convolution, "convolve", lambda *args: (used.append(1), ours(*args))[1])
    with torch.no_grad():
        wide = network(params, *inputs)
        assert not used
        monkeypatch.setattr(stacked, "WIDE", 5)
        narrow = network(params, *inputs)
        assert used
    assert torch.allclose(wide, narrow, atol=5e-3 if device.type == "cuda" else 1e-5)
    monkeypatch.setattr(stacked, "WIDE", 4)
    used.clear()
    network(params.requires_grad_(), *inputs)
    assert used  # a step of training is ours
