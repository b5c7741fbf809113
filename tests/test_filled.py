"""The GPU's kernels on stacks with empty slots: nothing is computed for those, and nothing else changes."""

import pytest
import torch
from helpers import random
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from test_kernels import DEVICE, assert_near, inputs_of, normal

from semidfl.learn import packing
from semidfl.models import stacked
from semidfl.models.convolution import convolve
from semidfl.models.normalisation import normalise
from semidfl.models.resnet import ResNet18
from semidfl.models.stacked import Network
from semidfl.models.unet import UNet

FILLED = torch.tensor([4, 0, 1], device=DEVICE)
"""of four samples, by client"""
REAL = torch.arange(4, device=DEVICE)[:, None] < FILLED  # (B, C)


def of_clients(channels: int) -> Tensor:
    """(B, 1, 1, C*ch): which numbers belong to a real sample."""
    return REAL.repeat_interleave(channels, 1)[:, None, None]


def spoilt(x: Tensor, channels: int) -> Tensor:
    """With no number at all in the empty slots."""
    return torch.where(of_clients(channels), x, torch.nan)


@pytest.mark.parametrize(
    ("kernel", "stride", "inp", "out"),
    [(3, 1, 16, 16), (3, 2, 40, 16), (3, 2, 16, 40), (1, 2, 16, 40), (1, 1, 40, 16), (3, 1, 3, 16)],
)
def test_convolutions(kernel: int, stride: int, inp: int, out: int) -> None:
    side = 8 * stride
    x, w = normal(1, 4, side, side, 3 * inp), normal(2, 3, kernel * kernel, inp, out)
    # A tile is 64 pixels: one sample here, so that no tile is filled in part.
    y, whole = convolve(spoilt(x, inp), w, None, None, stride, FILLED), convolve(x, w, None, None, stride)
    assert not y.masked_select(~of_clients(out)).any()
    assert_near(torch.where(of_clients(out), y, 0.0), torch.where(of_clients(out), whole, 0.0))
    weights = random(3, *y.shape).to(DEVICE) * of_clients(out)
    ours, theirs = (torch.autograd.grad((v * weights).sum(), (x, w)) for v in (y, whole))
    for name, mine, other in zip(("x", "w"), ours, theirs, strict=True):
        assert_near(mine, other, name)
    assert not ours[1][1].any()  # who has nothing learns nothing


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize(("channels", "per", "side"), [(16, 2, 5), (32, 4, 18), (24, 3, 5)])
def test_normalisation(channels: int, per: int, side: int, conditioned: bool) -> None:
    x, weight, bias = normal(1, 4, side, side, 3 * channels), normal(2, 3, channels), normal(3, 3, channels)
    condition = normal(4, 3, 4, 2 * channels) if conditioned else None
    extra = None if conditioned else normal(6, *x.shape)
    much = None if extra is None else spoilt(extra, channels)
    y = normalise(spoilt(x, channels), weight, bias, condition, per, "silu", 1e-5, much, FILLED)
    whole = normalise(x, weight, bias, condition, per, "silu", 1e-5, extra)
    assert y.isfinite().all()
    there = of_clients(channels)
    assert_near(torch.where(there, y, 0.0), torch.where(there, whole, 0.0))
    weights = random(5, *y.shape).to(DEVICE) * there
    leaves = [v for v in (x, weight, bias, condition, extra) if v is not None]
    ours, theirs = (torch.autograd.grad((v * weights).sum(), leaves) for v in (y, whole))
    for name, mine, other in zip(("x", "weight", "bias", "the last"), ours, theirs, strict=True):
        assert_near(mine, other, name)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: UNet(1, 10, 16, 2), inputs_of(1, 8, 8)),
        pytest.param(
            lambda: ResNet18(3, 10),
            inputs_of(3, 32, 32)[:1],
            marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in Triton's interpreter"),
        ),
    ],
    ids=["unet", "resnet"],
)
def test_a_heavy_network(build, inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients with a sample of two sources each; the first lacks the first source."""
    monkeypatch.setattr(stacked, "fused", lambda x: True)
    monkeypatch.setattr(Network, "heavy", True)
    network, held = Network(build, torch.float32), ((False, True), (True, True))
    start = network.initial(0).expand(2, -1) + 0.03 * random(7, 2, network.size)
    there = torch.tensor(held, device=DEVICE).T

    def outcome(*how: Tensor) -> tuple[Tensor, Tensor]:
        params = start.clone().to(DEVICE).requires_grad_()
        y = packing.run_packed(network, how, 2, params, *inputs)
        weights = random(8, *y.shape).to(DEVICE) * there.reshape(2, 2, *(1 for _ in y.shape[2:]))
        return y, torch.autograd.grad((y * weights).sum(), params)[0]

    (y, grad), (whole, truth) = outcome(*packing.pack(network, held, DEVICE)), outcome()
    assert y.isfinite().all()
    assert_near(y[there], whole[there])
    assert_near(grad, truth, near=2e-2 if DEVICE.type == "cuda" else 2e-5)
