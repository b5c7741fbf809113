"""The AC-GAN of the ablation (Odena, Olah, Shlens 2017): a generator against a discriminator that also classifies.

Generated images are asked for with the labels of the client's own batch: the classes that it has, as often
as it has them. What it has not it learns only from its neighbours; nobody here could judge it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Learner
from semidfl.config import GeneratorConfig
from semidfl.data.shards import Space
from semidfl.draws import Draws
from semidfl.learn.batch import Batch
from semidfl.learn.descend import Outcome, descend
from semidfl.learn.diffusion import from_signal, to_signal
from semidfl.learn.generator import in_passes
from semidfl.learn.loss import soft_cross_entropy
from semidfl.learn.optimise import Optimiser
from semidfl.models.acgan import LATENT, DiscriminatorNet, GeneratorNet
from semidfl.models.stacked import Network

__all__ = ["GAN", "discriminator_loss", "generator_loss"]


def discriminator_loss(on_real: Tensor, on_fake: Tensor, labels: Tensor) -> Tensor:
    """-(L_S + L_C) of every sample: which images are real, and of which class both are. (C, B, 1 + K) -> (C, B)."""
    source = F.softplus(-on_real[..., 0]) + F.softplus(on_fake[..., 0])
    return source + soft_cross_entropy(on_real[..., 1:], labels) + soft_cross_entropy(on_fake[..., 1:], labels)


def generator_loss(on_fake: Tensor, labels: Tensor) -> Tensor:
    """To pass for real (in the form that does not saturate) and for the asked-for class. (C, B, 1 + K) -> (C, B)."""
    return F.softplus(-on_fake[..., 0]) + soft_cross_entropy(on_fake[..., 1:], labels)


@dataclass(frozen=True)
class GAN:
    """Both networks in one row (C, D_g + D_d): mixing, checkpoints and messages need not know that there are two."""

    space: Space
    generator: Network
    discriminator: Network
    optimiser: Optimiser

    @classmethod
    def of(cls, config: GeneratorConfig, space: Space, dtype: torch.dtype) -> "GAN":
        # Pixels, not squares of them, and down to where the UNet ends.
        levels = config.levels + (config.patch - 1).bit_length()
        plan = (*space.shape, space.classes, config.width, levels)
        generator = Network(lambda: GeneratorNet(*plan), dtype)
        discriminator = Network(lambda: DiscriminatorNet(*plan), dtype)
        return cls(space, generator, discriminator, Optimiser("adam", config.gan_lr, beta1=0.5))

    @property
    def size(self) -> int:
        return self.generator.size + self.discriminator.size

    def initial(self, seed: int) -> Tensor:
        return torch.cat([self.generator.initial(seed), self.discriminator.initial(seed)])

    def start(self, params: Tensor) -> dict[str, Tensor]:
        return self.optimiser.start(params)

    def train(self, t: int, learner: Learner, batch: Batch, draws: Draws) -> Outcome:
        """One step of both networks at once for each of the round's batches."""
        real, labels, weights = to_signal(batch.images), batch.targets, batch.weights()
        noise = batch.chosen(draws.normal(t, "latent", batch.steps, batch.capacity, LATENT))

        def loss_of(params: Tensor, real: Tensor, labels: Tensor, noise: Tensor, weights: Tensor) -> Tensor:
            return (self.loss(params, real, labels, noise) * weights).sum(1)

        stepped, trains = (real, labels, noise), batch.valid.any(1)
        return descend(loss_of, "gan", self.generator, self.optimiser, learner, trains, stepped, (weights,))

    def loss(self, params: Tensor, real: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Both losses added, (C, B); each has a gradient only for its own network's part of the row."""
        maker, judge = self._parts(params)
        fake = self.generator(maker, noise, labels)
        on_real, on_fake = self.discriminator(judge, torch.cat([real, fake.detach()], dim=1)).chunk(2, dim=1)
        believed = self.discriminator(judge.detach(), fake)
        return discriminator_loss(on_real, on_fake, labels) + generator_loss(believed, labels)

    @torch.no_grad()
    def sample(self, t: int, params: Tensor, labels: Tensor, draws: Draws, limit: int) -> Tensor:
        maker, _ = self._parts(params)
        noise = draws.normal(t, "generate", len(labels), LATENT)
        wanted = F.one_hot(labels, self.space.classes).float().expand(params.shape[0], -1, -1)
        return in_passes(lambda z, label: from_signal(self.generator(maker, z, label)), noise, wanted, limit)

    def named(self, params: Tensor) -> dict[str, Tensor]:
        maker, judge = self._parts(params)
        parts = {"generator": self.generator.named(maker), "discriminator": self.discriminator.named(judge)}
        return {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}

    def row(self, named: Mapping[str, Tensor]) -> Tensor:
        networks = {"generator": self.generator, "discriminator": self.discriminator}
        return torch.cat([net.row({n: named[f"{part}.{n}"] for n in net.shapes}) for part, net in networks.items()])

    def examples(self) -> Iterator[tuple[Network, tuple[Tensor, ...]]]:
        yield self.generator, (torch.empty(1, 1, LATENT), torch.empty(1, 1, self.space.classes))
        for _ in range(3):  # the real image, the generated one, and that again for the generator's sake
            yield self.discriminator, (torch.empty(1, 1, *self.space.shape),)

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor]:
        maker, judge = params.split([self.generator.size, self.discriminator.size], dim=1)
        return maker, judge
