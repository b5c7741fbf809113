"""The AC-GAN: both networks, losses and updates against plain torch, what its samples show, and whole runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import as_row, assert_close, draws_of, load, pixels, random
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from test_resume import Fails, assert_same
from test_rounds import in_blocks, rounds_of, rows_of, ten
from torch import Tensor, nn
from torch.nn import functional as F

import semidfl
from semidfl import recipes
from semidfl.cohort import Learner, take
from semidfl.config import Config, GeneratorConfig
from semidfl.data import sources
from semidfl.data.dataset import Dataset
from semidfl.data.shards import Space
from semidfl.draws import Draws
from semidfl.estimate import memory
from semidfl.learn.batch import Batch
from semidfl.learn.gan import GAN
from semidfl.models.acgan import LATENT
from semidfl.setup import Setup
from semidfl.topology import build
from tests.small import tiny

STEPS, CLASSES = 3, 4
SHAPES = [(1, 8, 8), (3, 7, 10), (2, 5, 3)]


def gan_of(shape: tuple[int, int, int], width: int = 16, levels: int = 3, lr: float = 2e-4) -> GAN:
    config = GeneratorConfig(kind="gan", width=width, patch=1, levels=levels, gan_lr=lr)
    space = Space(*shape, CLASSES, (0.5,) * shape[0], (0.5,) * shape[0])
    return GAN.of(config, space, torch.float32)


def learner_of(gan: GAN, clients: int) -> Learner:
    """Other weights at every client."""
    params = torch.stack([gan.initial(seed) + 0.03 * random(seed, gan.size) for seed in range(clients)])
    return Learner(params, gan.start(params))


def some_batch(shape: tuple[int, int, int], steps: int = STEPS) -> Batch:
    """Three clients with 6 of 9 slots: the first has all, with trust of its own in some, the second half, the third
    none. Labels are soft, but for one that says nothing."""
    targets = random(2, 3, steps, 6, CLASSES).softmax(3)
    targets[0, :, 4] = 0
    return Batch(
        images=pixels(1, 3, steps, 6, *shape),
        targets=targets,
        valid=torch.tensor([[True] * 6, [True] * 3 + [False] * 3, [False] * 6]),
        trust=torch.tensor([[1.0] * 3 + [0.3] * 3, [1.0] * 6, [1.0] * 6]),
        slots=torch.tensor([0, 1, 2, 6, 7, 8]),
        capacity=9,
    )


# --- plain torch, one client and one sample at a time -----------------------------------------------------------------


class PlainGenerator(nn.Module):
    """Three resolutions; layers in the order of ours."""

    def __init__(self, channels: int, height: int, width: int, features: int) -> None:
        super().__init__()
        self.sizes = [(height, width)]
        for _ in range(2):
            self.sizes.insert(0, ((self.sizes[0][0] + 1) // 2, (self.sizes[0][1] + 1) // 2))
        self.wide = 2 * features
        self.seed = nn.Linear(LATENT + CLASSES, self.wide * self.sizes[0][0] * self.sizes[0][1])
        self.norm1, self.norm2 = nn.GroupNorm(self.wide // 8, self.wide), nn.GroupNorm(self.wide // 8, self.wide)
        self.norm3 = nn.GroupNorm(features // 8, features)
        self.conv1, self.conv2 = nn.Conv2d(self.wide, self.wide, 3, 1, 1), nn.Conv2d(self.wide, features, 3, 1, 1)
        self.paint = nn.Conv2d(features, channels, 3, 1, 1)

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        x = self.seed(torch.cat([noise, label], 1)).reshape(-1, self.wide, *self.sizes[0])
        x = F.relu(self.norm1(x))
        x = F.relu(self.norm2(self.conv1(nn.Upsample(self.sizes[1])(x))))
        x = F.relu(self.norm3(self.conv2(nn.Upsample(self.sizes[2])(x))))
        return self.paint(x).tanh()


class PlainDiscriminator(nn.Module):
    def __init__(self, channels: int, height: int, width: int, features: int) -> None:
        super().__init__()
        wide, bottom = 2 * features, ((height + 3) // 4) * ((width + 3) // 4)
        self.stem = nn.Conv2d(channels, features, 3, 1, 1)
        self.conv1, self.conv2 = nn.Conv2d(features, wide, 3, 2, 1), nn.Conv2d(wide, wide, 3, 2, 1)
        self.norm1, self.norm2 = nn.GroupNorm(wide // 8, wide), nn.GroupNorm(wide // 8, wide)
        self.head = nn.Linear(wide * bottom, 1 + CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.leaky_relu(self.stem(x), 0.2)
        x = F.leaky_relu(self.norm1(self.conv1(x)), 0.2)
        x = F.leaky_relu(self.norm2(self.conv2(x)), 0.2)
        out = self.head(x.flatten(1))
        return out[:, 0].sigmoid(), out[:, 1:]


def plain_losses(g: nn.Module, d: nn.Module, batch: Batch, noise: Tensor, c: int, e: int) -> tuple[Tensor, Tensor]:
    """-(L_S + L_C) and -(L_C - L_S), the second with log P(real) for -log P(generated), as means over samples."""
    ours, theirs, valid = torch.zeros(()), torch.zeros(()), batch.valid[c].sum()
    for s in range(6):
        if not batch.valid[c, s]:
            continue
        weight, label = batch.trust[c, s] / valid, batch.targets[c, e, s][None]
        fake = g(noise[c, e, batch.slots[s]][None], label)
        real_source, real_class = d(batch.images[c, e, s][None].float() / 255 * 2 - 1)
        fake_source, fake_class = d(fake.detach())
        source = real_source.log() + (1 - fake_source).log()
        right = -F.cross_entropy(real_class, label) - F.cross_entropy(fake_class, label)
        ours = ours - weight * (source + right).sum()
        passed, seen = d(fake)
        theirs = theirs - weight * (passed.log().sum() - F.cross_entropy(seen, label))
    return ours, theirs


def plain_pair(gan: GAN, row: Tensor) -> tuple[nn.Module, nn.Module]:
    shape = gan.space.shape
    maker, judge = row.split([gan.generator.size, gan.discriminator.size])
    return load(PlainGenerator(*shape, 16), maker.clone()), load(PlainDiscriminator(*shape, 16), judge.clone())


def gradient(loss: Tensor, network: nn.Module) -> Tensor:
    return as_row(torch.autograd.grad(loss, list(network.parameters())))


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_the_plain_ones(shape: tuple[int, int, int]) -> None:
    """A step at a learning rate of 0 leaves half the gradient in Adam's mean, each network's loss in its own part."""
    gan, batch, draws = gan_of(shape, lr=0.0), some_batch(shape, steps=1), draws_of(3)
    learner = learner_of(gan, 3)
    _, state, losses = gan.train(5, learner, batch, draws)
    noise = draws.normal(5, "latent", 1, 9, LATENT)
    for c in range(2):
        g, d = plain_pair(gan, learner.params[c])
        judged, made = plain_losses(g, d, batch, noise, c, 0)
        assert losses[c].item() == pytest.approx((judged + made).item(), rel=1e-5)
        maker, judge = (2 * state["mean"][c]).split([gan.generator.size, gan.discriminator.size])
        assert_close(maker, gradient(made, g), 1e-4)
        assert_close(judge, gradient(judged, d), 1e-4)


def test_both_networks_step_together_with_adam_of_the_publication() -> None:
    """Adam divides by the gradient's size: where that is all rounding the step is, too, so a few may differ."""
    gan, batch, draws = gan_of((1, 8, 8), lr=2e-4), some_batch((1, 8, 8)), draws_of(3)
    learner = learner_of(gan, 3)
    trained, _, losses = gan.train(2, learner, batch, draws)
    noise = draws.normal(2, "latent", STEPS, 9, LATENT)
    for c in range(2):
        g, d = plain_pair(gan, learner.params[c])
        adams = [torch.optim.Adam(x.parameters(), lr=2e-4, betas=(0.5, 0.999)) for x in (g, d)]
        seen = []
        for e in range(STEPS):
            judged, made = plain_losses(g, d, batch, noise, c, e)
            for network, loss in ((g, made), (d, judged)):  # both gradients are taken before either step
                for p, x in zip(network.parameters(), torch.autograd.grad(loss, network.parameters()), strict=True):
                    p.grad = x
            for adam in adams:
                adam.step()
            seen.append((judged + made).item())
        plain = as_row(p.detach() for x in (g, d) for p in x.parameters())
        change = plain - learner.params[c]
        assert change.abs().median() > 2e-4  # else the next line would say nothing
        off = (trained[c] - plain).abs() > 0.01 * change.abs().clamp(min=2e-5)
        assert off.float().mean() < 0.01
        assert losses[c].item() == pytest.approx(sum(seen) / STEPS, rel=1e-4)


# --- clients together, clients alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_is_a_loop(shape: tuple[int, int, int]) -> None:
    # By gradients: Adam's first steps are signs, also of rounding errors.
    gan, batch, draws = gan_of(shape, lr=0.0), some_batch(shape, steps=1), draws_of(3)
    learner, labels = learner_of(gan, 3), torch.arange(7) % CLASSES
    _, together, losses = gan.train(1, learner, batch, draws)
    images = gan.sample(1, learner.params, labels, draws, 100)
    for c in range(3):
        own = Batch(*(x[[c]] for x in (batch.images, batch.targets, batch.valid, batch.trust)), batch.slots, 9)
        _, alone, loss = gan.train(1, take(learner, [c]), own, draws.rows([c]))
        assert losses[c].item() == pytest.approx(loss.item(), rel=1e-5)
        assert_close(together["mean"][c], alone["mean"][0])
        image = gan.sample(1, learner.params[[c]], labels, draws.rows([c]), 100)
        assert (images[[c]].int() - image.int()).abs().max() <= 1  # a grey level, where rounding tips it


def test_another_clients_weights_and_data_change_no_bit() -> None:
    gan, batch, draws = gan_of((1, 8, 8)), some_batch((1, 8, 8)), draws_of(3)
    learner = learner_of(gan, 3)
    before = gan.train(1, learner, batch, draws)
    other = learner_of(gan, 3)
    other.params[1] += 0.1
    batch.images[1] = 255 - batch.images[1]
    after = gan.train(1, other, batch, draws)
    assert torch.equal(before[0][0], after[0][0])
    assert before[2][0] == after[2][0]
    assert not torch.equal(before[0][1], after[0][1])
    assert before[2][1] != after[2][1]


def test_a_client_without_data_keeps_weights_and_optimiser_bit_for_bit() -> None:
    gan, batch = gan_of((1, 8, 8)), some_batch((1, 8, 8))
    learner = learner_of(gan, 3)
    learner.optimiser = {name: random(9, *x.shape).abs() for name, x in learner.optimiser.items()}
    params, state, losses = gan.train(1, learner, batch, draws_of(3))
    assert torch.equal(params[2], learner.params[2])
    assert losses[2] == 0
    for name, x in state.items():
        assert torch.equal(x[2], learner.optimiser[name][2])
        assert not torch.equal(x[0], learner.optimiser[name][0])


# --- images of any size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "width", "levels"),
    [((1, 28, 28), 8, 3), ((3, 32, 32), 16, 3), ((1, 8, 8), 8, 6), ((2, 1, 5), 8, 2), ((1, 9, 4), 8, 1)],
)
def test_any_size_is_drawn_by_noise_and_label_and_is_trained(
    shape: tuple[int, int, int], width: int, levels: int
) -> None:
    gan, draws = gan_of(shape, width, levels), draws_of(3)
    learner = learner_of(gan, 3)
    images = gan.sample(1, learner.params, torch.tensor([0, 0, 1]), draws, 100)
    assert images.shape == (3, 3, *shape)
    assert images.dtype == torch.uint8
    for c in range(3):
        assert not torch.equal(images[c, 0], images[c, 1])
        assert not torch.equal(images[0], images[c]) or c == 0
    other = gan.sample(1, learner.params, torch.tensor([3, 0, 1]), draws, 100)
    assert not torch.equal(other[:, 0], images[:, 0])
    assert (other[:, 1:].int() - images[:, 1:].int()).abs().max() <= 1
    params, _, losses = gan.train(1, learner, some_batch(shape), draws)
    assert torch.isfinite(params).all()
    assert (losses[:2] > 0).all()


@pytest.mark.parametrize("limit", [0, 1, 4, 10, 11])
def test_samples_are_the_same_in_however_many_passes(limit: int) -> None:
    gan, draws, labels = gan_of((1, 8, 8)), draws_of(2), torch.arange(11) % CLASSES
    params, sizes = learner_of(gan, 2).params, []
    whole = gan.sample(3, params, labels, draws, 100)
    gan.generator.module.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))
    parts = gan.sample(3, params, labels, draws, limit)
    assert (whole.int() - parts.int()).abs().max() <= 1
    assert len(set(sizes)) == 1
    assert max(sizes) <= max(1, limit)
    assert sum(sizes) < 11 + len(sizes)  # no more than the equal passes need


def test_one_switch_gives_the_publications_settings() -> None:
    config = Config(generator=GeneratorConfig(kind="gan"))
    gan = Setup.of(config, sources.outline("mnist"), build(config.graph, config.seed)).generator
    assert isinstance(gan, GAN)
    assert (gan.optimiser.kind, gan.optimiser.lr, gan.optimiser.beta1) == ("adam", 2e-4, 0.5)


@pytest.mark.parametrize(
    ("dataset", "sizes"),
    [("mnist", [7, 14, 28]), ("fashion-mnist", [7, 14, 28]), ("cifar10", [4, 8, 16, 32]), ("digits", [4, 8])],
)
def test_it_paints_pixels_from_where_the_unet_ends(dataset: str, sizes: list[int]) -> None:
    """The UNet's squares of pixels are not for the GAN: it has their resolutions besides."""
    config = recipes.paper(dataset).generator
    gan = GAN.of(config, Space.of(sources.outline(dataset)), torch.float32)
    assert gan.generator.module.sizes == [(n, n) for n in sizes]


def test_both_networks_are_named_and_lie_in_one_row() -> None:
    gan = gan_of((1, 8, 8))
    row = gan.initial(3)[None]
    named = gan.named(row)
    assert sum(x.numel() for x in named.values()) == gan.size == row.shape[1]
    assert torch.equal(gan.row({name: x[0] for name, x in named.items()}), row[0])
    assert {name.split(".")[0] for name in named} == {"generator", "discriminator"}
    assert not torch.equal(gan.initial(4)[None], row)


# --- it learns --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return sources.load("digits")


def spread(images: Tensor, labels: Tensor) -> float:
    """How much the images of a class vary."""
    return sum(images[labels == k].float().std(0).mean().item() for k in range(10))


def test_an_independent_classifier_sees_the_asked_for_digits(digits: Dataset) -> None:
    """One client with all digits; 0.1 is chance. Not one image a class, either: they must vary as real ones do."""
    gan = GAN.of(recipes.paper("digits").generator, Space.of(digits), torch.float32)
    images, classes = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels).long()
    judge = LogisticRegression(max_iter=1000).fit(images.flatten(1).numpy() / 255, digits.train_labels)
    draws, asked, slots = draws_of(1), torch.arange(300) % 10, torch.arange(20)
    params = gan.initial(0)[None]
    learner, one = Learner(params, gan.start(params)), torch.ones(1, 20)

    def seen() -> tuple[float, Tensor]:
        drawn = gan.sample(99, learner.params, asked, draws, 1000)[0]
        return float((judge.predict(drawn.flatten(1).numpy() / 255) == asked.numpy()).mean()), drawn

    assert seen()[0] < 0.3
    for t in range(1, 9):
        index = draws.below(t, "index", len(images), 50, 20)
        batch = Batch(images[index], F.one_hot(classes[index], 10).float(), one.bool(), one, slots, 20)
        learner.params, learner.optimiser, _ = gan.train(t, learner, batch, draws)
    share, drawn = seen()
    assert share > 0.8
    assert 0.5 < spread(drawn, asked) / spread(images, classes) < 1.5


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_runs_give_the_same_bits_in_two_cohorts() -> None:
    config = ten(generator__kind="gan", compute__deterministic=True)
    method, cohort, records = rounds_of(config)
    alone, spread = rows_of(cohort), in_blocks(config, [[9, 0, 5], [7, 1, 2, 8, 3, 6, 4]])
    assert sorted(spread) == list(range(10))
    for client, tensors in alone.items():
        assert tensors.keys() == spread[client].keys()
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"
    assert isinstance(method.setup.generator, GAN)
    assert alone[0]["generator.params"].shape == (method.setup.generator.size,)
    assert not torch.equal(alone[0]["generator.params"], alone[1]["generator.params"])
    assert all(loss > 0 for loss in records[-1]["generator_loss"])


def test_its_images_judge_the_classifiers() -> None:
    """Trained a little more than in the tiny run, until they differ enough to be told apart."""
    values = {"generator__iterations": 30, "generator__batch": 10, "generator__gan_lr": 2e-3, "rounds": 4}
    _, cohort, records = rounds_of(tiny(generator__kind="gan", **values))
    accuracy, weights = records[-1]["generated_accuracy"], torch.tensor(records[-1]["weights"])
    assert len(set(accuracy)) > 1
    near = [(0, 1, 3), (0, 1, 2), (1, 2, 3), (0, 2, 3)]  # of the ring
    for row, group in zip(weights, near, strict=True):
        assert_close(row[:3], torch.tensor([accuracy[j] for j in group]).softmax(0))
    assert cohort.synthetic is not None
    assert cohort.synthetic.check_images.shape == (4, 20, 1, 8, 8)


def test_stacked_and_loop_agree_to_rounding() -> None:
    """Not by its weights, which Adam's first steps take from signs: by what it is paid and what it draws."""
    loop, stack = (rounds_of(ten(generator__kind="gan", rounds=2, compute__chunk=size)) for size in (1, 10))
    assert loop[2][-1]["generator_loss"] == pytest.approx(stack[2][-1]["generator_loss"], rel=1e-3)
    assert loop[1].synthetic is not None
    assert stack[1].synthetic is not None
    off = (loop[1].synthetic.images.int() - stack[1].synthetic.images.int()).abs()
    assert off.float().mean() < 0.5
    assert loop[1].synthetic.images.float().std() > 5


def test_a_broken_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    values: dict[str, Any] = {"generator__kind": "gan", "generator__ema": 0.5, "rounds": 4}
    config = tiny(**values)
    semidfl.run(config, tmp_path / "whole")
    with pytest.raises(MemoryError):
        semidfl.run(config, tmp_path / "broken", progress=Fails(4))
    semidfl.resume(tmp_path / "broken")
    assert_same(tmp_path / "broken", tmp_path / "whole")
    saved = load_file(tmp_path / "whole" / "models" / "generator-0000.safetensors")
    assert saved["generator.paint.weight"].shape == (1, 8, 3, 3)
    assert saved["discriminator.head.bias"].shape == (11,)


def test_the_estimate_counts_both_networks() -> None:
    config = tiny(generator__kind="gan")
    setup = Setup.of(config, sources.outline("digits"), build(config.graph, config.seed))
    parts, clients = memory(config), setup.graph.clients
    assert parts["generator: weights, optimiser"] == clients * setup.generator.size * 4 * 3
    # Layer outputs of 8x8 images at width 8: 16 channels at 4x4 twice (seed, norm), 8 at 8x8 twice (grow, norm), paint;
    # and three times the discriminator's stem, shrink, norm and head. Twice that, in 4 bytes, for 8 samples.
    maker, judge = 2 * 16 * 16 + 2 * 8 * 64 + 64, 8 * 64 + 2 * 16 * 16 + 11
    assert parts["generator: a step's activations"] == clients * 8 * 2 * 4 * (maker + 3 * judge)


def test_draws_belong_to_the_client_and_the_round() -> None:
    gan = gan_of((1, 8, 8))
    params, labels = gan.initial(0).expand(2, -1).clone(), torch.zeros(2, dtype=torch.int64)
    images = gan.sample(1, params, labels, draws_of(2), 100)
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(gan.sample(2, params, labels, draws_of(2), 100), images)
    second = Draws.of([7], [1], torch.device("cpu"))
    assert (gan.sample(1, params[1:], labels, second, 100).int() - images[1:].int()).abs().max() <= 1
