"""Drawing images: DPM-Solver++ of order 2, multistep (Lu et al. 2022), with classifier-free guidance."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from semidfl.learn.diffusion import Schedule

__all__ = ["guided", "solve"]

Noise = Callable[[Tensor, Tensor], Tensor]
"""(x (C, n, …), level (C, n)) -> the noise in x."""


def guided(network: Callable[[Tensor, Tensor, Tensor], Tensor], labels: Tensor, scale: float) -> Noise:
    """eps_any + scale (eps_class - eps_any); labels (C, n, K). Both halves go through the network together."""
    if scale == 1:
        return lambda x, level: network(x, level, labels)
    both = torch.cat([labels, torch.zeros_like(labels)], dim=1)

    def noise(x: Tensor, level: Tensor) -> Tensor:
        known, free = network(torch.cat([x, x], 1), torch.cat([level, level], 1), both).chunk(2, dim=1)
        return free + scale * (known - free)

    return noise


@torch.no_grad()
def solve(noise_in: Noise, start: Tensor, schedule: Schedule, steps: int) -> Tensor:
    """From pure noise `start` (C, n, …) to clean signals, in `steps` steps uniform in time.

    With alpha, sigma of the forward process and lambda = log(alpha / sigma), a step from s to r is
    x_r = sigma_r / sigma_s x_s - alpha_r (e^-h - 1) D, h = lambda_r - lambda_s, where D is the predicted
    clean image, extrapolated from the last two predictions. The last step goes to sigma = 0: x = D.
    """
    kept = schedule.kept.cpu()
    # From the last level down to, but without, level 0; two steps at one level would be a step of length 0.
    levels = np.unique(np.linspace(0, len(kept) - 1, steps + 1).round().astype(int))[:0:-1].copy()
    steps = len(levels)
    alpha, sigma = kept.sqrt()[levels], (1 - kept).sqrt()[levels]
    lam = alpha.log() - sigma.log()
    x, before = start, start
    for k, level in enumerate(levels):
        at = torch.full(x.shape[:2], int(level), device=x.device)
        clean = (x - float(sigma[k]) * noise_in(x, at)) / float(alpha[k])
        if k == steps - 1:
            return clean
        h = lam[k + 1] - lam[k]
        ahead = clean
        if k > 0:  # second order: the slope between the last two predictions, half a step ahead
            ratio = float((lam[k] - lam[k - 1]) / h)
            ahead = clean + (clean - before) / (2 * ratio)
        x = float(sigma[k + 1] / sigma[k]) * x - float(alpha[k + 1] * torch.expm1(-h)) * ahead
        before = clean
    raise AssertionError("steps must be at least 1")
