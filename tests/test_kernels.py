"""The GPU's kernels against plain PyTorch: on a GPU as they are, elsewhere through Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import pixels, random
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from semidfl import draws
from semidfl.data import augment, shards
from semidfl.draws import Draws
from semidfl.exchange.base import Neighbourhood
from semidfl.learn import aggregate
from semidfl.learn.optimise import Optimiser
from semidfl.models import cnn, stacked
from semidfl.models.acgan import DiscriminatorNet
from semidfl.models.cnn import CNN
from semidfl.models.convolution import convolve
from semidfl.models.kernels import join
from semidfl.models.normalisation import normalise
from semidfl.models.pooling import features
from semidfl.models.resnet import ResNet18
from semidfl.models.stacked import Network
from semidfl.models.unet import UNet
from semidfl.models.unpooling import features as trained

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A GPU's tensor cores take float32 in as TF32, with 10 bits behind the point.
HALF = 1e-3
"""how far float16 factors are off"""
CLOSE = 5e-3 if torch.cuda.is_available() else 2e-5


def normal(seed: int, *shape: int) -> Tensor:
    return random(seed, *shape).to(DEVICE).requires_grad_()


def error_of(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def assert_near(ours: Tensor, theirs: Tensor, what: str = "", near: float = CLOSE) -> None:
    error = error_of(ours, theirs)
    assert error < near, f"{what} off by {error:.1e} of its length"


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """PyTorch's own convolutions and products with or without the rounding that ours have on a GPU."""
    rooms = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [room.allow_tf32 for room in rooms]
    for room in rooms:
        room.allow_tf32 = allowed
    try:
        yield
    finally:
        for room, was in zip(rooms, before, strict=True):
            room.allow_tf32 = was


def grads(y: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = random(99, *y.shape).to(DEVICE)
    return torch.autograd.grad((y * weights).sum(), leaves)


@pytest.mark.parametrize(
    ("clients", "batch", "side", "inp", "out", "kernel", "stride", "bias"),
    [
        (3, 2, 7, 16, 32, 3, 1, True),
        (2, 3, 8, 24, 16, 3, 2, False),  # channels that fill no tile, every second pixel
        (2, 2, 7, 8, 8, 3, 2, True),  # an odd side
        (2, 2, 8, 1, 16, 3, 1, True),  # the first layer
        (3, 2, 6, 16, 1, 3, 1, True),  # the last
        (2, 2, 6, 40, 16, 1, 1, True),
        (2, 2, 6, 32, 16, 1, 2, False),
        (2, 3, 8, 24, 40, 3, 2, False),  # back to every parity of pixels by its own taps
        (2, 2, 7, 16, 32, 3, 2, True),
        (2, 2, 7, 16, 48, 1, 2, False),  # most pixels went nowhere
        (1, 1, 4, 80, 70, 3, 1, True),  # more than a tile, and not whole ones
        (2, 12, 12, 6, 25, 3, 1, True),  # pixels of several splits
    ],
)
def test_convolutions(
    clients: int, batch: int, side: int, inp: int, out: int, kernel: int, stride: int, bias: bool
) -> None:
    x = normal(1, batch, side, side, clients * inp)
    # As they lie in a client's row: between other layers' weights, at any place.
    row = normal(2, clients, 5 + kernel * kernel * inp * out + out)
    w = row[:, 5:-out].view(clients, kernel * kernel, inp, out)
    b = row[:, -out:] if bias else None
    y = convolve(x, w, b, None, stride)
    plain = w.permute(0, 3, 2, 1).reshape(clients * out, inp, kernel, kernel)
    theirs = F.conv2d(
        x.permute(0, 3, 1, 2), plain, None if b is None else b.flatten(), stride, kernel // 2, groups=clients
    ).permute(0, 2, 3, 1)
    assert_near(y, theirs)
    for name, ours, other in zip(("x", "row"), grads(y, x, row), grads(theirs, x, row), strict=True):
        assert_near(ours, other, name)


def test_a_convolution_adds_what_it_is_told_to() -> None:
    x, w, extra = normal(1, 2, 5, 5, 32), normal(2, 2, 9, 16, 8), normal(3, 2, 5, 5, 16)
    y, plain = convolve(x, w, None, extra, 1), convolve(x, w, None, None, 1) + extra
    assert_near(y, plain)
    for ours, other in zip(grads(y, x, w, extra), grads(plain, x, w, extra), strict=True):
        assert_near(ours, other)


@pytest.mark.parametrize("programs", [1056, 1], ids=["a tile a program", "several"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 14), (2, 8, 12)], ids=str)
def test_the_layers_of_the_cnn(shape: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, and images that all clients share, included."""
    monkeypatch.setattr("semidfl.models.pooling._PROGRAMS", programs)
    x = normal(1, 1 if shape[0] == 2 else 3, 9, *shape).expand(3, -1, -1, -1, -1)
    layers = [normal(2, 3, 9, shape[0], 6), normal(3, 3, 6), normal(4, 3, 9, 6, 25), normal(5, 3, 25)]
    with torch.no_grad():
        ours = features(x, *layers)
    for c in range(3):
        theirs = x[c]
        for w, b in (layers[:2], layers[2:]):
            plain = w[c].permute(2, 1, 0).reshape(w.shape[3], w.shape[2], 3, 3)
            theirs = F.max_pool2d(F.relu(F.conv2d(theirs, plain, b[c], padding=1)), 2)
        assert_near(ours[c], theirs, near=max(HALF, CLOSE))


def in_halves(seed: int, *shape: int) -> Tensor:
    """Numbers that float16 holds exactly: else it would turn a few of the choices between nearly equal pixels."""
    return random(seed, *shape).half().float().to(DEVICE)


def layers_of(row: Tensor, channels: int) -> list[Tensor]:
    """Weights and biases as they lie in a client's row: one behind the other, at any place."""
    shapes = ((9, channels, 6), (6,), (9, 6, 25), (25,))
    parts = row.split([3, *(torch.Size(shape).numel() for shape in shapes)], dim=1)[1:]
    return [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def row_of(seed: int, clients: int, channels: int) -> Tensor:
    return in_halves(seed, clients, 3 + 9 * channels * 6 + 6 + 9 * 6 * 25 + 25).requires_grad_()


def plainly_trained(x: Tensor, layers: list[Tensor]) -> Tensor:
    """The same in float64; only what is between the layers is rounded."""
    found = []
    for c in range(x.shape[0]):
        y = x[c].double()
        for w, b in (layers[:2], layers[2:]):
            plain = w[c].permute(2, 1, 0).reshape(w.shape[3], w.shape[2], 3, 3).double()
            y = F.max_pool2d(F.relu(F.conv2d(y, plain, b[c].double(), padding=1)), 2)
            if w is layers[0]:
                y = y + (y.half() - y).detach()
        found.append(y)
    return torch.stack(found)


def assert_trained_alike(x: Tensor, row: Tensor) -> None:
    layers = layers_of(row, x.shape[2])
    y, theirs = trained(x, *layers), plainly_trained(x, layers)
    assert_near(y, theirs)
    both = [layers_of(grads(v, row)[0], x.shape[2]) for v in (y, theirs)]
    for name, mine, other in zip(("first weights", "first bias", "weights", "bias"), *both, strict=True):
        assert_near(mine, other, name)


@pytest.mark.parametrize("programs", [None, 1], ids=["a tile a program", "several"])
@pytest.mark.parametrize(
    ("clients", "batch", "shape"),
    [
        (1, 1, (1, 28, 28)),
        (3, 5, (1, 12, 12)),
        (2, 10, (1, 7, 9)),  # of the first layer's last column nothing is pooled, of its last row all is seen
        (3, 5, (3, 8, 8)),
        (1, 2, (2, 10, 15)),
        (2, 1, (1, 4, 5)),
    ],
    ids=str,
)
def test_training_the_layers_of_the_cnn(
    clients: int, batch: int, shape: tuple[int, ...], programs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if programs:
        monkeypatch.setattr("semidfl.models.unpooling._FIRST", (16, 4, programs))
        monkeypatch.setattr("semidfl.models.unpooling._SECOND", (16, 4, programs))
    assert_trained_alike(in_halves(1, clients, batch, *shape), row_of(2, clients, shape[0]))


def test_training_on_images_that_lie_anywhere() -> None:
    x = in_halves(1, 2, 12, 12, 3, 1).permute(3, 4, 0, 1, 2)  # three clients, one sample of two channels
    assert_trained_alike(x, row_of(2, 3, 2))
    assert_trained_alike(x[:1].expand(3, -1, -1, -1, -1), row_of(2, 3, 2))


def test_of_equal_pixels_the_first_learns() -> None:
    """Small integers: most windows have a largest output twice or more, in sums that are exact."""
    x, row = in_halves(1, 2, 3, 1, 12, 12).sign().relu(), row_of(2, 2, 1)
    assert_trained_alike(x, row.detach().round().clamp(-1, 1).requires_grad_())
    assert_trained_alike(torch.ones_like(x), row.detach().round().clamp(-1, 1).requires_grad_())


def test_what_a_relu_shuts_learns_nothing() -> None:
    x, row = in_halves(1, 2, 3, 1, 12, 12), row_of(2, 2, 1)
    with torch.no_grad():
        first, second = layers_of(row, 1)[1::2]
        first[1, 2] = second[1, 7] = -1000  # a channel of one client in either layer
        second[0] = -1000  # all of the other client
    found = layers_of(grads(trained(x, *layers_of(row, 1)), row)[0], 1)
    for layer, channel in ((0, 2), (1, 2), (2, 7), (3, 7)):
        assert not found[layer][0].any()
        assert not found[layer][1, ..., channel].any()
        assert found[layer][1].any()
    assert not found[2][1, :, 2].any()


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
def test_training_is_every_clients_own_and_the_same_again() -> None:
    x, row = in_halves(1, 3, 5, 1, 12, 12), row_of(2, 3, 1)
    once, again = (grads(trained(x, *layers_of(row, 1)), row)[0] for _ in range(2))
    assert torch.equal(once, again)
    with torch.no_grad():
        x[1, 2, 0, 3], row[1, ::5] = torch.inf, torch.nan
    y = trained(x, *layers_of(row, 1))
    assert y[1].isnan().any()
    assert torch.equal(grads(y, row)[0][::2], once[::2])


def test_tiny_gradients_keep_their_digits() -> None:
    x, row = in_halves(1, 2, 2, 1, 12, 12), row_of(2, 2, 1)
    y = trained(x, *layers_of(row, 1))
    assert torch.equal(grads(y * 2**-40, row)[0], grads(trained(x, *layers_of(row, 1)), row)[0] * 2**-40)


@pytest.mark.parametrize(
    ("channels", "per", "conditioned", "act"),
    [
        (64, 8, True, "silu"),
        (32, 4, False, "relu"),
        (16, 2, True, "none"),
        (24, 3, False, "silu"),  # groups that are no power of two
        (48, 6, True, "relu"),
        (8, 1, False, "none"),
    ],
)
@pytest.mark.parametrize("side", [5, 18], ids=["in one part", "in several"])
def test_normalisation(channels: int, per: int, conditioned: bool, act: str, side: int) -> None:
    clients, batch = 2, 3
    x, row = normal(1, batch, side, side, clients * channels), normal(2, clients, 2 * channels + 3)
    weight, bias = row[:, 1 : channels + 1], row[:, -channels:]
    condition, extra = normal(3, clients, batch, 2 * channels), normal(4, *x.shape)
    some = (condition, None) if conditioned else (None, extra)
    y = normalise(x, weight, bias, some[0], per, act, 1e-5, some[1])
    h = F.group_norm(x.permute(0, 3, 1, 2), clients * channels // per, weight.flatten(), bias.flatten(), 1e-5)
    if conditioned:
        scale, shift = (v.transpose(0, 1).flatten(1)[:, :, None, None] for v in condition.chunk(2, dim=2))
        h = h * (1 + scale) + shift
    else:
        h = h + extra.permute(0, 3, 1, 2)
    theirs = {"none": lambda v: v, "silu": F.silu, "relu": F.relu}[act](h).permute(0, 2, 3, 1)
    assert_near(y, theirs)
    leaves = (x, row, condition if conditioned else extra)
    for name, ours, other in zip(("x", "row", "some"), grads(y, *leaves), grads(theirs, *leaves), strict=True):
        assert_near(ours, other, name)


@pytest.mark.parametrize("size", [(3, 5), (6, 10), (5, 9), (6, 9)], ids=str)
def test_joining(size: tuple[int, int]) -> None:
    clients, low, kept = 2, 12, 16
    x, skip = normal(1, 3, 3, 5, clients * low), normal(2, 3, *size, clients * kept)
    y = join(x, skip, clients)
    larger = F.interpolate(x.permute(0, 3, 1, 2), size=size, mode="nearest").permute(0, 2, 3, 1)
    theirs = torch.cat([v.unflatten(3, (clients, -1)) for v in (larger, skip)], dim=4).flatten(3)
    assert torch.equal(y, theirs)
    for ours, other in zip(grads(y, x, skip), grads(theirs, x, skip), strict=True):
        assert_near(ours, other)


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("sgd", 0.1),
        Optimiser("sgd", 0.1, nesterov=True, weight_decay=0.01),
        Optimiser("adam", 0.01),
        Optimiser("adam", 0.01, beta1=0.5, weight_decay=0.01),
    ],
    ids=["sgd", "nesterov", "adam", "adam with decay"],
)
@pytest.mark.parametrize("owned", [False, True])
def test_optimisers(optimiser: Optimiser, owned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps, against the plain form, which other tests hold against torch.optim."""
    owners = {"owner": (torch.arange(4500, device=DEVICE) * 7 % 3).to(torch.int16)} if owned else {}
    rate = torch.tensor([optimiser.lr], device=DEVICE)
    ends = []
    for own in (True, False):
        monkeypatch.setattr("semidfl.learn.optimise.fused", lambda x, own=own: own)
        params = random(1, 3, 1500).to(DEVICE)
        state = optimiser.start(params) | owners
        if "steps" in state:
            state["steps"] += torch.tensor([[0.0], [7.0], [2.0]], device=DEVICE)
        if owners:
            state = {name: x.flatten() if x.shape == params.shape else x for name, x in state.items()}
            params = params.flatten()
        for step in range(5):
            grad = random(step + 2, 3, 1500).to(DEVICE).reshape(params.shape)
            optimiser.step(params, grad, state, rate if own else optimiser.lr)
        ends.append([params, *state.values()])
    for ours, theirs in zip(*ends, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [5, 1024, 2500])
def test_neighbours_are_mixed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 1, 3 and 4 of five that answered; the second has two neighbours, so its row is padded. One is broken."""
    index = torch.tensor([[0, 1, 4], [3, 2, 3], [4, 1, 0]], device=DEVICE)
    near = Neighbourhood(index, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]], device=DEVICE).bool())
    weights = (random(1, 3, 3).to(DEVICE).exp() * near.mask).double()
    params = random(2, 5, size).to(DEVICE)
    params[2, size // 2] = torch.nan
    found = []
    for own in (True, False):
        monkeypatch.setattr(aggregate, "fused", lambda x, own=own: own)
        found.append(aggregate.mix(weights, near, params, ordered=True))
    torch.testing.assert_close(*found, equal_nan=True, atol=1e-6, rtol=1e-6)
    assert found[0].isnan().any(1).tolist() == [False, True, False]
    # A rule of one's own may give the same to all; what does not fit is refused, not read from beyond its end.
    monkeypatch.setattr(aggregate, "fused", lambda x: True)
    same = [aggregate.mix(some, near, params, ordered=True) for some in (weights[:1], weights[:1].expand(3, 3))]
    torch.testing.assert_close(*same, equal_nan=True, atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="expand"):
        aggregate.mix(weights[:, :2], near, params, ordered=True)


@pytest.mark.parametrize("channels", [1, 3])
def test_shifted_images_are_the_same_to_the_bit(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pixels(1, 6, channels, 5, 8).to(DEVICE)
    index, drawn = torch.tensor([[0, 5, 2], [3, 3, 1]], device=DEVICE), Draws.of([0, 0], [0, 1], DEVICE)
    found = []
    for own in (True, False):
        monkeypatch.setattr(augment, "fused", lambda x, own=own: own)
        found.append(augment.Augment(2, True)(pool, index, drawn, 3, "test"))
    assert torch.equal(*found)


@pytest.mark.parametrize("channels", [1, 3])
def test_scaled_images(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    space = shards.Space(channels, 5, 8, 10, (0.1, 0.5, 0.9)[:channels], (0.2, 1.0, 3.0)[:channels])
    images = pixels(1, 9, 2, channels, 5, 8).to(DEVICE).transpose(0, 1)  # as they may lie
    found = []
    for own in (True, False):
        monkeypatch.setattr(shards, "fused", lambda x, own=own: own)
        found.append(space.normalise(images))
    assert_near(*found)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 700)])
def test_random_numbers_are_the_same_to_the_bit(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Draws.of([3, 2**62, 0], [0, 9, 1], DEVICE)
    found = []
    for own in (True, False):
        monkeypatch.setattr(draws, "_own_kernel", lambda keys, own=own: own)
        below = [mine.below(5, "b", bound, *shape) for bound in (7, torch.tensor([0, 60_000, 2**31], device=DEVICE))]
        others = [mine.words(10**9, "another", 33), mine.normal(1, "n", *shape)]
        found.append([mine.bits(12, "test", *shape), *below, *others])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def inputs_of(*shape: int) -> tuple[Tensor, ...]:
    level = torch.tensor([[3, 500], [999, 0]], device=DEVICE)
    return random(5, 2, 2, *shape).to(DEVICE), level, random(6, 2, 2, 10).softmax(2).to(DEVICE)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: UNet(1, 10, 16, 2), inputs_of(1, 7, 8)),
        (lambda: UNet(1, 10, 16, 2, patch=2), inputs_of(1, 8, 8)),
        (lambda: CNN(1, 12, 12, 10), inputs_of(1, 12, 12)[:1]),
        (lambda: DiscriminatorNet(1, 8, 8, 10, 16, 2), inputs_of(1, 8, 8)[:1]),
        pytest.param(
            lambda: ResNet18(3, 10),
            inputs_of(3, 32, 32)[:1],
            marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in Triton's interpreter"),
        ),
    ],
    ids=["unet", "unet of squares", "cnn", "discriminator", "resnet"],
)
def test_whole_networks(build, inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(build, torch.float32)
    start = network.initial(0).expand(2, -1) + 0.03 * random(7, 2, network.size)

    def outcome(own: bool) -> tuple[Tensor, ...]:
        for room in (stacked, cnn):
            monkeypatch.setattr(room, "fused", lambda x: own)
        params = start.clone().to(DEVICE).requires_grad_()
        y = network(params, *inputs)
        with torch.no_grad():
            again = network(params, *inputs)  # without gradients there are other kernels
        return y, again, *grads(y, params)

    ours = outcome(own=True)
    with tf32(allowed=False):
        theirs = outcome(own=False)
    with tf32(allowed=True):
        rounded = outcome(own=False)  # as far off as PyTorch itself is then: many layers, and ReLUs that open or not
    for what, mine, truth, rough in zip(("y", "without gradients", "gradients"), ours, theirs, rounded, strict=True):
        half = isinstance(network.module, CNN)
        assert_near(mine, truth, what, max(HALF if half else CLOSE, 2 * error_of(rough, truth)))
