"""Drawing images: our DPM-Solver++ against the one of diffusers, guidance against its formula."""

import pytest
import torch
from helpers import CPU, assert_close, network_of, params_of, random
from torch import Tensor

from semidfl.learn.diffusion import Schedule
from semidfl.learn.sampler import guided, solve
from semidfl.models.unet import UNet

CLIENTS, SAMPLES = 2, 3


def small_unet():
    """A random UNet of ours, (x, level, labels) -> noise, made to behave like a trained one.

    What it says is added to the right answer for pictures that are noise themselves, so that samples stay around 1,
    where 1e-4 means something; and labels are made to matter, so that guidance does.
    """
    network, kept = network_of(lambda: UNet(1, 3, 8, 2)), Schedule.linear(1000, CPU).kept
    params = params_of(network, CLIENTS)
    network.named(params)["label.weight"].mul_(20)

    def noise(x: Tensor, level: Tensor, labels: Tensor) -> Tensor:
        return (1 - kept[level]).sqrt().float()[..., None, None, None] * x + network(params, x, level, labels)

    return noise


def labels() -> Tensor:
    return torch.eye(3).expand(CLIENTS, 3, 3)


def their_scheduler(steps: int):
    """DPM-Solver++ 2M over the same noise levels; skips where diffusers is not installed."""
    module = pytest.importorskip("diffusers", reason="diffusers, the reference, is not installed")
    scheduler = module.DPMSolverMultistepScheduler(
        num_train_timesteps=1000,
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        prediction_type="epsilon",
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        timestep_spacing="linspace",
        # The last step goes to sigma = 0, where order 2 has no meaning (lambda is infinite): it is of order 1.
        final_sigmas_type="zero",
        # By default diffusers drops to lower orders at the end of fewer than 15 steps. With order 2 and a last sigma
        # of 0 this changes nothing; off, so that the steps before the last are of order 2 by what is written here.
        lower_order_final=False,
    )
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize("steps", [20, 10, 5, 2])
@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_the_solver_is_that_of_diffusers(steps: int, scale: float) -> None:
    scheduler, network = their_scheduler(steps), small_unet()
    start = random(5, CLIENTS, SAMPLES, 1, 6, 6)
    x = start
    with torch.no_grad():
        for level in scheduler.timesteps:
            at = torch.full((CLIENTS, SAMPLES), int(level))
            known, free = network(x, at, labels()), network(x, at, torch.zeros_like(labels()))
            x = scheduler.step(free + scale * (known - free), level, x).prev_sample
    ours = solve(guided(network, labels(), scale), start, Schedule.linear(1000, CPU), steps)
    assert (ours - x).abs().max().item() < 1e-4


def test_the_solver_finds_the_picture_that_a_perfect_network_sees() -> None:
    """If the noise is always named rightly, every step leads to the same picture."""
    schedule, picture = Schedule.linear(1000, CPU), random(1, CLIENTS, SAMPLES, 1, 4, 4)

    def perfect(x: Tensor, level: Tensor) -> Tensor:
        kept = schedule.kept[level].reshape(CLIENTS, SAMPLES, 1, 1, 1)
        return ((x - kept.sqrt() * picture) / (1 - kept).sqrt()).float()

    assert_close(solve(perfect, random(2, CLIENTS, SAMPLES, 1, 4, 4), schedule, 20), picture, 1e-3)


def test_levels_go_down_from_the_last_uniformly() -> None:
    asked = []

    def spy(x: Tensor, level: Tensor) -> Tensor:
        assert level.shape == (CLIENTS, SAMPLES)
        asked.append(level.unique().item())
        return torch.zeros_like(x)

    solve(spy, random(1, CLIENTS, SAMPLES, 1, 4, 4), Schedule.linear(1000, CPU), 4)
    assert asked == [999, 749, 500, 250]


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5, 5.0])
def test_guidance_is_its_formula(scale: float) -> None:
    network = small_unet()
    x, level = random(1, CLIENTS, SAMPLES, 1, 6, 6), torch.tensor([[0, 500, 999], [7, 70, 700]])
    noise = guided(network, labels(), scale)(x, level)
    for c in range(CLIENTS):
        for n in range(SAMPLES):

            def one(label: Tensor, c: int = c, n: int = n) -> Tensor:
                alone = x[:, [n]], level[:, [n]], label.expand(CLIENTS, 1, 3)
                return network(*alone)[c, 0]

            free, known = one(torch.zeros(3)), one(labels()[c, n])
            assert_close(noise[c, n], free + scale * (known - free))


@pytest.mark.parametrize(("total", "steps"), [(1000, 1000), (50, 60)])
def test_as_many_steps_as_levels(total: int, steps: int) -> None:
    start = random(1, 1, 1, 1, 2, 2)
    assert solve(lambda x, level: 0.1 * x, start, Schedule.linear(total, CPU), steps).isfinite().all()
