"""What a model of the consensus data space must offer: the diffusion model and the AC-GAN are trained, mixed,
saved and sampled through this alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Learner
from semidfl.draws import Draws
from semidfl.learn.batch import Batch
from semidfl.learn.descend import Outcome
from semidfl.models.stacked import Network

__all__ = ["Generator", "in_passes"]


class Generator(Protocol):
    """Its parameters, of however many networks, are one row (D,) a client."""

    @property
    def size(self) -> int:
        """D, parameters of one client."""

    def initial(self, seed: int) -> Tensor:
        """(D,) weights drawn from the seed."""

    def start(self, params: Tensor) -> dict[str, Tensor]:
        """Fresh optimiser state for parameters (C, D)."""

    def train(self, t: int, learner: Learner, batch: Batch, draws: Draws) -> Outcome:
        """One step for each of the round's batches; returns parameters, optimiser state, mean loss."""

    def sample(self, t: int, params: Tensor, labels: Tensor, draws: Draws, limit: int) -> Tensor:
        """Images of the asked-for classes, labels (n,) -> (C, n, ch, H, W) uint8, at most `limit` at a time."""

    def named(self, params: Tensor) -> dict[str, Tensor]:
        """(C, D) -> name -> (C, *shape)."""

    def row(self, named: Mapping[str, Tensor]) -> Tensor:
        """name -> shape, as `named` gives for one client, back to (D,)."""

    def examples(self) -> Iterator[tuple[Network, tuple[Tensor, ...]]]:
        """The forward passes that a step keeps for its gradient, each with inputs of one client and sample."""


def in_passes(draw: Callable[[Tensor, Tensor], Tensor], noise: Tensor, labels: Tensor, limit: int) -> Tensor:
    """draw(noise, label vectors) for noise (C, n, …), labels (C, n, K) -> (C, n, …).

    In equal passes of at most `limit` samples, so that one recording serves all.
    """
    count = labels.shape[1]
    passes = -(-count // max(1, limit))
    step = -(-count // passes)
    short = step * passes - count
    noise, labels = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, short)) for x in (noise, labels))
    parts = [draw(some, label) for some, label in zip(noise.split(step, 1), labels.split(step, 1), strict=True)]
    return torch.cat(parts, dim=1)[:, :count]
