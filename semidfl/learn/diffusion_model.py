"""The consensus diffusion model as a generator: trained by `diffusion.py` (Eq. 11), drawn from by `sampler.py`."""

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
from semidfl.learn.descend import Outcome
from semidfl.learn.diffusion import Schedule, from_signal, train_diffusion
from semidfl.learn.generator import in_passes
from semidfl.learn.optimise import Optimiser
from semidfl.learn.sampler import guided, solve
from semidfl.models.stacked import Network
from semidfl.models.unet import UNet

__all__ = ["DiffusionModel"]


@dataclass(frozen=True)
class DiffusionModel:
    config: GeneratorConfig
    space: Space
    network: Network
    optimiser: Optimiser
    schedule: Schedule

    @classmethod
    def of(cls, config: GeneratorConfig, space: Space, device: torch.device, dtype: torch.dtype) -> "DiffusionModel":
        plan = (space.channels, space.classes, config.width, config.levels, config.patch)
        network = Network(lambda: UNet(*plan), dtype)
        return cls(config, space, network, Optimiser("adam", config.lr), Schedule.linear(config.steps, device))

    @property
    def size(self) -> int:
        return self.network.size

    def initial(self, seed: int) -> Tensor:
        return self.network.initial(seed)

    def start(self, params: Tensor) -> dict[str, Tensor]:
        return self.optimiser.start(params)

    def train(self, t: int, learner: Learner, batch: Batch, draws: Draws) -> Outcome:
        hidden, snr = self.config.label_dropout, self.config.min_snr
        return train_diffusion(t, self.network, self.optimiser, self.schedule, hidden, snr, learner, batch, draws)

    def sample(self, t: int, params: Tensor, labels: Tensor, draws: Draws, limit: int) -> Tensor:
        noise = draws.normal(t, "generate", len(labels), *self.space.shape)
        wanted = F.one_hot(labels, self.space.classes).float().expand(params.shape[0], -1, -1)

        def draw(some: Tensor, label: Tensor) -> Tensor:
            network = guided(lambda x, level, y: self.network(params, x, level, y), label, self.config.guidance)
            return from_signal(solve(network, some, self.schedule, self.config.sampler_steps))

        return in_passes(draw, noise, wanted, limit)

    def named(self, params: Tensor) -> dict[str, Tensor]:
        return self.network.named(params)

    def row(self, named: Mapping[str, Tensor]) -> Tensor:
        return self.network.row(named)

    def examples(self) -> Iterator[tuple[Network, tuple[Tensor, ...]]]:
        level = torch.zeros(1, 1, dtype=torch.int64)
        yield self.network, (torch.empty(1, 1, *self.space.shape), level, torch.empty(1, 1, self.space.classes))
