"""The consensus diffusion model (Eq. 11): learns to name the noise in a noisy image, given its label."""

from dataclasses import dataclass

import torch
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.draws import Draws
from semidfl.learn.batch import Batch
from semidfl.learn.descend import Outcome, descend
from semidfl.learn.optimise import Optimiser
from semidfl.learn.packing import run_packed
from semidfl.models.stacked import Network

__all__ = ["Schedule", "from_signal", "to_signal", "train_diffusion"]


@dataclass(frozen=True)
class Schedule:
    """The forward process: x_h = sqrt(kept_h) x_0 + sqrt(1 - kept_h) noise, beta linear from 1e-4 to 0.02."""

    kept: Tensor  # (T,) float64: the product of 1 - beta up to each level

    @classmethod
    def linear(cls, steps: int, device: torch.device) -> "Schedule":
        beta = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64)
        return cls((1 - beta).cumprod(0).to(device))

    def emphasis(self, level: Tensor, most: float) -> Tensor:
        """min(SNR, most) / SNR: the noise's error counts as the image's would, up to a bound; 1 without one."""
        kept = self.kept[level]
        return (most * (1 - kept) / kept).clamp(max=1).float() if most else torch.ones_like(kept).float()

    def noisy(self, clean: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        kept = self.kept[level].float()[..., None, None, None]
        return kept.sqrt() * clean + (1 - kept).sqrt() * noise


def to_signal(images: Tensor) -> Tensor:
    """uint8 -> [-1, 1], the range the diffusion works in for every data set."""
    return images.float() / 127.5 - 1


def from_signal(signal: Tensor) -> Tensor:
    """[-1, 1] -> uint8; what goes beyond is clipped."""
    return ((signal.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def train_diffusion(
    t: int,
    network: Network,
    optimiser: Optimiser,
    schedule: Schedule,
    label_dropout: float,
    min_snr: float,
    learner: Learner,
    batch: Batch,
    draws: Draws,
) -> Outcome:
    """One step for each of the round's batches; returns parameters, optimiser state, mean loss."""
    steps, size = batch.steps, batch.capacity
    level = batch.chosen(draws.below(t, "level", len(schedule.kept), steps, size))
    noise = batch.chosen(draws.normal(t, "noise", steps, size, *batch.images.shape[3:]))
    shown = batch.chosen(draws.uniform(t, "hide label", steps, size)) >= label_dropout
    noisy = schedule.noisy(to_signal(batch.images), level, noise)
    labels = batch.targets * shown[..., None]

    def loss_of(
        params: Tensor,
        noisy: Tensor,
        level: Tensor,
        labels: Tensor,
        noise: Tensor,
        emphasis: Tensor,
        weights: Tensor,
        *packing: Tensor,
    ) -> Tensor:
        error = run_packed(network, packing, len(batch.held), params, noisy, level, labels) - noise
        return (error.square().mean((2, 3, 4)) * emphasis * weights).sum(1)

    stepped = (noisy, level, labels, noise, schedule.emphasis(level, min_snr))
    kind, fixed = ("diffusion", len(batch.held)), (batch.weights(), *batch.packing(network))
    return descend(loss_of, kind, network, optimiser, learner, batch.valid.any(1), stepped, fixed)
