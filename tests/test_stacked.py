"""Stacked networks: the same as a loop over single ones, and one alone the same as plain torch layers."""

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import PlainCNN, assert_close, load, network_of, params_of, pixels, random
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.cohort import Learner, each
from semidfl.learn.descend import descend
from semidfl.learn.optimise import Optimiser
from semidfl.models.cnn import CNN
from semidfl.models.resnet import ResNet18
from semidfl.models.stacked import Conv2d, GroupNorm, Linear, Network, concat, fold, standardised, unfold
from semidfl.models.unet import UNet

Build = Callable[[], nn.Module]


def unet_inputs(clients: int, batch: int, *shape: int) -> tuple[Tensor, ...]:
    level = torch.arange(clients * batch).reshape(clients, batch) * 83 % 1000
    return random(1, clients, batch, *shape), level, random(2, clients, batch, 10).softmax(2)


CASES: dict[str, tuple[Build, tuple[Tensor, ...]]] = {
    "cnn 28x28": (lambda: CNN(1, 28, 28, 10), (random(1, 3, 5, 1, 28, 28),)),
    "cnn 8x8": (lambda: CNN(1, 8, 8, 10), (random(1, 3, 5, 1, 8, 8),)),
    "resnet": (lambda: ResNet18(3, 10), (random(1, 2, 2, 3, 16, 16),)),
    "standard resnet": (lambda: ResNet18(3, 10, standard=True), (random(1, 2, 1, 3, 8, 8),)),
    "unet": (lambda: UNet(2, 10, 16, 3), unet_inputs(3, 4, 2, 9, 12)),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Network, Tensor, tuple[Tensor, ...]]:
    build, inputs = CASES[request.param]
    network = network_of(build)
    return network, params_of(network, len(inputs[0])), inputs


def graded(network: Network, params: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Output, and the gradient of a loss in which all of the output counts differently."""
    leaf = params.clone().requires_grad_()
    out = network(leaf, *inputs)
    # Weights by the place in the client's own output, so that a client has the same loss alone and in company.
    weights = torch.linspace(-1, 1, out[0].numel()).reshape(out[0].shape)
    (out.square() * weights).sum().backward()
    return out.detach(), leaf.grad


# --- stacked == loop ---------------------------------------------------------------------------------------


def test_outputs_and_gradients_of_a_stack_are_those_of_a_loop(case) -> None:
    network, params, inputs = case
    outs, grads = graded(network, params, inputs)
    for i in range(len(params)):
        out, grad = graded(network, params[i : i + 1], tuple(x[i : i + 1] for x in inputs))
        assert_close(outs[i], out[0])
        for name, ours in network.named(grads[i : i + 1]).items():
            theirs = network.named(grad)[name]
            # A bias right before a norm has no influence: what is left there is rounding of large terms.
            floor = 1e-4 * grad.abs().max()
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=floor), name


def test_training_a_stack_is_training_each_with_torch(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of `descend` for all, against autograd and torch.optim on one client at a time."""
    network, params, inputs = case
    # In single precision a ReLU at zero may open in one order of summation and stay shut in the other.
    monkeypatch.setattr(network, "dtype", torch.float64)
    target = random(5, *network(params, *inputs).shape)
    optimiser = Optimiser("sgd", lr=0.01, momentum=0.9)

    def loss_of(p: Tensor, now: Tensor) -> Tensor:
        return (network(p, *inputs) - now).square().flatten(1).mean(1)

    learner = Learner(params, optimiser.start(params))
    everyone, three = torch.ones(len(params), dtype=torch.bool), target[:, None].expand(-1, 3, *target.shape[1:])
    trained, _, losses = descend(loss_of, "test", network, optimiser, learner, everyone, [three])
    for i in range(len(params)):
        alone = params[i : i + 1].clone().requires_grad_()
        torch_sgd = torch.optim.SGD([alone], lr=0.01, momentum=0.9)
        seen = []
        for _ in range(3):
            torch_sgd.zero_grad()
            loss = F.mse_loss(network(alone, *(x[i : i + 1] for x in inputs)), target[i : i + 1])
            loss.backward()
            torch_sgd.step()
            seen.append(loss.item())
        change = (alone.detach()[0] - params[i]).abs().max().item()
        assert change > 1e-4  # else the next line would say nothing
        assert_close(trained[i] - params[i], alone.detach()[0] - params[i], 1e-4)
        assert_close(trained[i], alone.detach()[0])
        assert losses[i].item() == pytest.approx(sum(seen) / 3, rel=1e-5)


def test_no_client_touches_another(case) -> None:
    network, params, inputs = case
    changed = params.clone()
    changed[1] += 0.1
    before, after = network(params, *inputs), network(changed, *inputs)
    assert torch.equal(before[::2], after[::2])
    assert not torch.allclose(before[1], after[1])


# --- one client == plain torch -----------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (1, 8, 8), (3, 10, 13)])
def test_the_cnn_is_the_plain_one(channels: int, height: int, width: int) -> None:
    network = network_of(lambda: CNN(channels, height, width, 7))
    params, images = params_of(network, 2), random(3, 2, 4, channels, height, width)
    logits = network(params, images)
    for i in range(2):
        assert_close(logits[i], load(PlainCNN(channels, height, width, 7), params[i])(images[i]))


def test_the_cnn_has_the_papers_size() -> None:
    assert network_of(lambda: CNN(1, 28, 28, 10)).size == 63_245


class PlainBlock(nn.Module):
    """ResNet's basic block (He et al. 2015) with GroupNorm."""

    def __init__(self, inp: int, out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inp, out, 3, stride, 1, bias=False),
            nn.GroupNorm(32, out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.GroupNorm(32, out),
        )
        self.side = nn.Identity()
        if stride > 1:
            self.side = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), nn.GroupNorm(32, out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.side(x))


def plain_resnet18() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()),
        *(PlainBlock(64, 64, 1), PlainBlock(64, 64, 1)),
        *(PlainBlock(64, 128, 2), PlainBlock(128, 128, 1)),
        *(PlainBlock(128, 256, 2), PlainBlock(256, 256, 1)),
        *(PlainBlock(256, 512, 2), PlainBlock(512, 512, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
    )


def test_the_resnet_is_the_plain_one() -> None:
    network = network_of(lambda: ResNet18(3, 10))
    params, images = params_of(network, 1), random(4, 1, 2, 3, 16, 16)
    assert_close(network(params, images)[0], load(plain_resnet18(), params[0])(images[0]))


def test_the_standardised_resnet_is_the_plain_one_with_such_filters() -> None:
    network = network_of(lambda: ResNet18(3, 10, standard=True))
    params, images = params_of(network, 1), random(4, 1, 2, 3, 16, 16)
    plain = load(plain_resnet18(), params[0])
    filters = [weight for conv in plain.modules() if isinstance(conv, nn.Conv2d) for weight in conv.weight.data]
    for weight in filters:
        weight -= weight.mean()
        weight /= weight.norm()
    assert_close(network(params, images)[0], plain(images[0]), 1e-3)
    assert len(filters) == 4800


def test_filters_have_no_mean_and_length_one() -> None:
    filters = standardised(random(3, 2, 5, 4, 3, 3) + 7.0).flatten(2)  # (C, out, in, k, k)
    assert_close(filters.norm(dim=2), torch.ones(2, 5), 1e-4)
    assert filters.mean(2).abs().max() < 1e-5


def test_every_convolution_of_the_resnet_is_followed_by_a_norm() -> None:
    """Norms that are built and never called are what the authors' network suffers from."""
    network = network_of(lambda: ResNet18(3, 10))
    made_by: dict[int, nn.Module] = {}
    kept, normed, norms = [], [], []

    def after_conv(module: nn.Module, _: object, out: Tensor) -> None:
        made_by[id(out)] = module
        kept.append(out)  # alive, so that no other tensor gets its id

    def before_norm(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        normed.append(made_by.get(id(inputs[0])))
        norms.append(module)

    for module in network.module.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(after_conv)
        elif isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(before_norm)
    network(params_of(network, 1), random(4, 1, 1, 3, 16, 16))
    convs = [m for m in network.module.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 20  # stem, 16 in the blocks, 3 shortcuts
    assert set(normed) == set(convs)
    assert len(norms) == len(set(norms)) == 20
    assert {m.num_groups for m in norms} == {32}
    assert [m.num_features for m in network.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] == []


def plain_unet(w: dict[str, Tensor], noisy: Tensor, level: Tensor, labels: Tensor, levels: int) -> Tensor:
    """The residual UNet for one client with functions of torch only; noisy (B, ch, H, W), w without client axis."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride, w[f"{name}.weight"].shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, 8, w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def block(name: str, x: Tensor) -> Tensor:
        h = conv(f"{name}.conv1", F.silu(norm(f"{name}.norm1", x)))
        scale, shift = linear(f"{name}.condition", condition)[:, :, None, None].chunk(2, dim=1)
        h = conv(f"{name}.conv2", F.silu(norm(f"{name}.norm2", h) * (1 + scale) + shift))
        return h + (conv(f"{name}.shortcut", x) if f"{name}.shortcut.weight" in w else x)

    half = w["time1.weight"].shape[1] // 2
    angle = [[h * 10_000 ** (-k / half) for k in range(half)] for h in level.tolist()]
    waves = torch.tensor([[f(a) for f in (math.cos, math.sin) for a in row] for row in angle])
    condition = F.silu(linear("time2", F.silu(linear("time1", waves))) + linear("label", labels))
    x = conv("stem", noisy)
    skips = []
    for depth in range(levels):
        x = block(f"down.{depth}", conv(f"shrink.{depth - 1}", x, stride=2) if depth else x)
        skips.append(x)
    x = block("middle", x)
    for depth, skip in enumerate(reversed(skips)):
        x = block(f"up.{depth}", torch.cat([F.interpolate(x, skip.shape[2:]), skip], dim=1))
    return conv("out", F.silu(norm("norm", x)))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 9), (30, 30), (1, 1)])
def test_the_unet_is_the_plain_one_and_takes_odd_sizes(height: int, width: int) -> None:
    network = network_of(lambda: UNet(1, 10, 8, 3))
    params, inputs = params_of(network, 2), unet_inputs(2, 2, 1, height, width)
    out = network(params, *inputs)
    assert out.shape == (2, 2, 1, height, width)
    for i in range(2):
        weights = {name: x[i] for name, x in network.named(params).items()}
        # Angles of up to 999 radians in float32 are good to 6e-5 only.
        assert_close(out[i], plain_unet(weights, *(x[i] for x in inputs), levels=3), 1e-4)


@pytest.mark.parametrize(("side", "height", "width"), [(2, 8, 8), (2, 7, 9), (3, 8, 8), (2, 28, 28)])
def test_squares_of_pixels_are_channels_of_the_plain_unet(side: int, height: int, width: int) -> None:
    """Filled up with zeros where they do not fit, which is cut off again."""
    network = network_of(lambda: UNet(2, 10, 8, 1, side))
    params, (noisy, level, labels) = params_of(network, 2), unet_inputs(2, 2, 2, height, width)
    out = network(params, noisy, level, labels)
    assert out.shape == noisy.shape
    filled = F.pad(noisy, (0, -width % side, 0, -height % side))
    for i in range(2):
        weights = {name: x[i] for name, x in network.named(params).items()}
        squares = plain_unet(weights, F.pixel_unshuffle(filled[i], side), level[i], labels[i], levels=1)
        assert_close(out[i], F.pixel_shuffle(squares, side)[:, :, :height, :width], 1e-4)


def test_the_unet_tells_classes_and_levels_apart_and_the_zero_vector_from_all() -> None:
    network = network_of(lambda: UNet(1, 3, 8, 2))
    params = params_of(network, 1)
    noisy = random(1, 1, 1, 1, 8, 8)
    labels = [*torch.eye(3), torch.zeros(3), torch.tensor([0.5, 0.5, 0])]
    outs = [network(params, noisy, torch.tensor([[h]]), y[None, None]) for y in labels for h in (0, 500)]
    for i in range(len(outs)):
        for j in range(i):
            assert (outs[i] - outs[j]).abs().max() > 1e-3


def test_the_unet_starts_from_zero_noise() -> None:
    network = network_of(lambda: UNet(1, 3, 8, 2))
    assert not network(network.initial(0)[None], *unet_inputs(1, 2, 1, 8, 8)[:2], torch.zeros(1, 2, 3)).any()


def test_a_stacked_block_is_a_plain_block_for_each_client() -> None:
    """The layers by themselves: convolution with a stride, group norm, linear layer."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = Conv2d(4, 6, 3, stride=2), GroupNorm(3, 6), Linear(6 * 4 * 3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(unfold(self.norm(self.conv(fold(x))), x.shape[0]).flatten(2))

    network = network_of(Block)
    params, x = params_of(network, 3), random(1, 3, 2, 4, 7, 5)
    out = network(params, x)
    for i in range(3):
        plain = nn.Sequential(
            nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.GroupNorm(3, 6), nn.Flatten(), nn.Linear(6 * 4 * 3, 5)
        )
        assert_close(out[i], load(plain, params[i])(x[i]))


def test_moving_between_client_axis_and_channels() -> None:
    x, y = pixels(1, 3, 2, 4, 5, 6), pixels(2, 3, 2, 1, 5, 6)
    for i in range(3):
        assert torch.equal(fold(x)[:, 4 * i : 4 * i + 4], x[i])
    assert fold(x.float()).is_contiguous(memory_format=torch.channels_last)
    assert fold(x.float()[:, :, :1]).stride(1) == 1  # of one channel, too
    assert torch.equal(unfold(fold(x), 3), x)
    assert torch.equal(unfold(concat(fold(x), fold(y), 3), 3), torch.cat([x, y], dim=2))


def test_a_row_and_its_names_are_the_same_weights() -> None:
    network = network_of(lambda: UNet(1, 10, 16, 2))
    params = params_of(network, 2)
    for i in range(2):
        assert torch.equal(network.row({name: x[i] for name, x in network.named(params).items()}), params[i])


# --- the first weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: CNN(1, 8, 8, 10), lambda: UNet(1, 10, 16, 2)], ids=["cnn", "unet"])
def test_first_weights_belong_to_the_seed(build: Build) -> None:
    one, other = network_of(build), network_of(build)
    assert torch.equal(one.initial(3), other.initial(3))
    drawn = one.initial(3) != one.initial(4)
    fixed = torch.isin(one.initial(3), torch.tensor([0.0, 1.0]))  # norms and layers that start at zero
    assert torch.equal(~drawn, fixed)


def test_no_two_layers_start_alike() -> None:
    network = network_of(lambda: ResNet18(3, 10))
    layers = network.named(network.initial(3)[None])
    heads = [x.flatten()[:9] / x.abs().max() for name, x in layers.items() if x.dim() > 2]
    assert len(heads) == 21
    for i in range(21):
        assert not any(torch.allclose(heads[i], heads[j], atol=0.05) for j in range(i))


def test_building_a_network_touches_no_global_random_state() -> None:
    before = torch.random.get_rng_state()
    network_of(lambda: UNet(1, 10, 16, 2)).initial(0)
    network_of(lambda: CNN(1, 8, 8, 10)).initial(0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_first_weights_have_the_spread_of_torchs_defaults() -> None:
    """Layer by layer against a plain network that torch itself has filled."""
    network = network_of(lambda: CNN(1, 28, 28, 10))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch_filled = PlainCNN(1, 28, 28, 10).parameters()
    for p, ours in zip(torch_filled, network.named(network.initial(0)[None]).values(), strict=True):
        layer = ours[0]
        assert layer.shape == p.shape
        if p.numel() >= 500:  # below that the largest of the layer says little
            assert layer.abs().max().item() == pytest.approx(p.abs().max().item(), rel=0.02)
            assert layer.std().item() == pytest.approx(p.std().item(), rel=0.1)
            assert abs(layer.mean().item()) < 0.1 * p.abs().max().item()


def test_first_weights_stay_inside_torchs_bounds_and_norms_start_as_torchs() -> None:
    network = network_of(lambda: ResNet18(3, 10))
    fan_in = {name: p[0].numel() for name, p in network.module.named_parameters() if p.dim() > 1}
    for name, layer in network.named(network.initial(1)[None]).items():
        weight = f"{name.rpartition('.')[0]}.weight"
        if weight in fan_in:
            bound = fan_in[weight] ** -0.5
            assert 0.8 * bound < layer.abs().max().item() <= bound, name
        else:
            assert layer.unique().tolist() == [float(name.endswith("weight"))], name


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_chunks_on_two_threads_give_what_one_gives() -> None:
    """Gradients of ten clients, many times: threads that shared a module would mix up their weights."""
    network = network_of(lambda: CNN(1, 8, 8, 10))
    params, images = params_of(network, 10), random(1, 10, 4, 1, 8, 8)
    seen = set()

    def gradient(params: Tensor, images: Tensor) -> Tensor:
        seen.add(threading.get_ident())
        leaf = params.requires_grad_()
        return torch.autograd.grad(network(leaf, images).square().sum(), leaf)[0]

    alone = torch.cat([gradient(params[i : i + 1].clone(), images[i : i + 1].clone()) for i in range(10)])
    seen.clear()
    for _ in range(20):
        assert torch.equal(each(gradient, 1, params, images), alone)
    assert threading.get_ident() not in seen
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_an_error_in_a_chunk_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        each(lambda x: torch.tensor([6 // int(3 - x)]), 1, torch.arange(5))
