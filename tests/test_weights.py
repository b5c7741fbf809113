"""Kernels on all clients' weights against plain PyTorch: on a GPU as they are, elsewhere in Triton's interpreter."""

import pytest
import torch
from helpers import network_of, params_of, random
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from semidfl.models import stacked
from semidfl.models.stacked import Conv2d, GroupNorm, Linear, Network, fold, unfold

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Small(nn.Module):
    """Filters that fill no strip, one and a part of a second; other weights between them, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = Conv2d(3, 24, 3, bias=False, standard=True), GroupNorm(4, 24)
        self.plain = Conv2d(24, 16, 1)
        self.last, self.end = Conv2d(16, 72, 1, bias=False, standard=True), GroupNorm(8, 72)
        self.out = Linear(72, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.end(self.last(self.plain(self.norm(self.first(fold(images)), act="relu"))))
        logits: Tensor = self.out(unfold(x.mean((2, 3), keepdim=True), images.shape[0]).flatten(2))
        return logits


def weights(network: Network) -> Tensor:
    """Three clients'; some filters far from zero, one all zeros."""
    params = params_of(network, 3) + 0.02
    network.named(params)["first.weight"][1, 5] = 0.0
    network.named(params)["last.weight"][2, 7] += 3.0
    return params.to(DEVICE)


@pytest.mark.parametrize("rows", [256, 4])
@pytest.mark.parametrize("layered", [False, True], ids=["rows", "layer by layer"])
def test_filters_are_standardised_and_all_else_stays(layered: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a filter takes several tiles, and whether or not a tile is full and begins at a round place."""
    monkeypatch.setattr("semidfl.models.weights._ROWS", rows)
    network = network_of(Small)
    params = weights(network)
    leaf = (network.by_layer(params) if layered else params).requires_grad_()
    found = network._standardised(leaf)
    (tables,) = network._tables.values()
    assert all(table[:, 5].any() for table in tables)  # filters in both
    expected = {
        name: stacked.standardised(x) if name in ("first.weight", "last.weight") else x
        for name, x in network.named(leaf).items()
    }
    pull = {name: random(9, *x.shape).to(DEVICE) for name, x in expected.items()}
    for name, ours in network.named(found).items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(network.named(found)["first.weight"][1, 5], torch.zeros(3, 3, 3, device=DEVICE))
    gradients = [
        torch.autograd.grad(sum((x[name] * pull[name]).sum() for name in pull), leaf)[0]
        for x in (network.named(found), expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5 * float(gradients[1].abs().max()))


def test_half_precision_rounds_only_the_result() -> None:
    network = network_of(Small)
    params = weights(network).bfloat16()
    exact = network._standardised(params.float())
    # In bfloat16, the mean of a filter that is 3 away from zero would be off by a tenth of the filter's deviation.
    torch.testing.assert_close(network._standardised(params).float(), exact, rtol=2**-7, atol=1e-6)


def test_the_network_with_standardised_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained and asked, by our kernels and by PyTorch's operations."""
    network, images = network_of(Small), random(4, 3, 2, 3, 6, 6).to(DEVICE)
    pull, ends = random(5, 3, 2, 7).to(DEVICE), []
    for own in (True, False):
        monkeypatch.setattr(stacked, "fused", lambda x, own=own: own)
        params = weights(network).requires_grad_()
        y = network(params, images)
        (grad,) = torch.autograd.grad((y * pull).sum(), params)
        with torch.no_grad():
            ends.append((y, grad, network(params, images)))
    for ours, theirs in zip(*ends, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert error < (5e-3 if DEVICE.type == "cuda" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layered", [False, True], ids=["rows", "layer by layer"])
def test_gradients_are_shortened(layered: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much too long, just too long, short; pieces shorter than a layer."""
    monkeypatch.setattr("semidfl.models.weights._PIECE", 500)
    network, found = network_of(Small), []
    grad = random(1, 3, network.size)
    grad = (grad / grad.norm(dim=1, keepdim=True) * torch.tensor([1e4, 2.02, 1.5])[:, None]).to(DEVICE)
    for own in (True, False):
        monkeypatch.setattr(stacked, "fused", lambda x, own=own: own)
        mine = grad.clone().to(dtype)
        cut = network.shortened(network.by_layer(mine) if layered else mine, 2.0)
        assert (cut.dtype == dtype) == (own or dtype == torch.float32)
        found.append((network.by_client(cut) if layered else cut).float())
    near = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(*found, rtol=near, atol=1e-8)
    assert torch.equal(found[0][2], grad[2].to(dtype).float())  # what is short enough stays as it is
    assert found[0].norm(dim=1).tolist() == pytest.approx([2.0, 2.0, 1.5], rel=near)


def test_tables_are_made_once_for_each_layout() -> None:
    network = network_of(Small)
    params = weights(network)
    network._standardised(params)
    (first,) = network._tables.values()
    network._standardised(params)
    network._standardised(params[:2])
    network._standardised(network.by_layer(params))
    assert len(network._tables) == 3
    assert next(iter(network._tables.values())) is first


class Shared(Small):
    """A layer that runs twice."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.first(fold(images)), act="relu")
        x = self.end(self.last(self.plain(x) + self.plain(x.flip(2))))
        logits: Tensor = self.out(unfold(x.mean((2, 3), keepdim=True), images.shape[0]).flatten(2))
        return logits


class Unused(Small):
    """A layer that does not run."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.first(fold(images)), act="relu")
        return unfold(x.mean((2, 3), keepdim=True), images.shape[0]).flatten(2)[..., :7]


@pytest.mark.parametrize(
    ("build", "made"),
    [(Small, {"first", "plain", "last"}), (Shared, {"first", "last"}), (Unused, {"first", "plain", "last"})],
)
def test_gradients_are_written_where_they_belong(
    build: type[Small], made: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer as in rows; only what our convolutions did not make is copied there."""
    monkeypatch.setattr(stacked, "fused", lambda x: True)
    network, images, pull = network_of(build), random(4, 3, 2, 3, 6, 6).to(DEVICE), random(5, 3, 2, 7).to(DEVICE)
    copied: list[int] = []
    plain = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, by: (copied.extend(x.numel() for x in to), plain(to, by)))

    def gradient(leaf: Tensor) -> Tensor:
        return torch.autograd.grad((network(leaf.requires_grad_(), images) * pull).sum(), leaf)[0]

    rows = gradient(weights(network))
    assert not copied
    found = network.by_client(gradient(network.by_layer(weights(network))))
    torch.testing.assert_close(found, rows, rtol=1e-4, atol=1e-6)
    theirs = [x for name, x in network.named(rows).items() if name not in {f"{layer}.weight" for layer in made}]
    assert sum(copied) == sum(x.numel() for x in theirs if x.any())
