"""The diffusion model: the forward process in double precision, the loss sample by sample, and that it learns."""

import math

import pytest
import torch
from helpers import CPU, assert_close, draws_of, network_of, params_of, pixels, random
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.learn.batch import Batch
from semidfl.learn.diffusion import Schedule, from_signal, to_signal, train_diffusion
from semidfl.learn.optimise import Optimiser
from semidfl.models.unet import UNet

STEPS, SLOTS, CLASSES = 4, 6, 3
ADAM = Optimiser("adam", 3e-3)


def products(steps: int) -> list[float]:
    """Of 1 - beta up to each level, with beta linear from 1e-4 to 0.02."""
    kept, product = [], 1.0
    for h in range(steps):
        product *= 1 - (1e-4 + (0.02 - 1e-4) * h / (steps - 1))
        kept.append(product)
    return kept


def batch_of(images: Tensor, targets: Tensor, valid: Tensor, slots: Tensor, capacity: int) -> Batch:
    trust = torch.ones(valid.shape)
    return Batch(images=images, targets=targets, valid=valid, trust=trust, slots=slots, capacity=capacity)


def some_batch() -> Batch:
    """Three clients with 6 of 9 slots: the first has all, the second half, the third none."""
    valid = torch.tensor([[True] * 6, [True] * 3 + [False] * 3, [False] * 6])
    slots = torch.tensor([0, 1, 2, 6, 7, 8])
    targets = random(2, 3, STEPS, SLOTS, CLASSES).softmax(3)
    return batch_of(pixels(1, 3, STEPS, SLOTS, 1, 4, 5), targets, valid, slots, 9)


# --- the forward process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 50, 1000])
def test_the_schedule_is_linear_in_beta(steps: int) -> None:
    schedule = Schedule.linear(steps, CPU)
    assert schedule.kept.dtype == torch.float64
    assert schedule.kept.tolist() == pytest.approx(products(steps), rel=1e-12)


def test_noisy_is_signal_and_noise_in_the_schedules_shares() -> None:
    schedule, kept = Schedule.linear(1000, CPU), products(1000)
    clean, noise = random(1, 2, 5, 1, 3, 3), random(2, 2, 5, 1, 3, 3)
    level = torch.tensor([[0, 1, 10, 500, 999], [999, 0, 250, 3, 77]])
    noisy = schedule.noisy(clean, level, noise)
    for c in range(2):
        for n in range(5):
            a = kept[level[c, n]]
            assert_close(noisy[c, n], math.sqrt(a) * clean[c, n] + math.sqrt(1 - a) * noise[c, n])


def test_pictures_come_back_from_the_signal() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    signal = to_signal(every)
    assert signal.tolist() == pytest.approx([2 * v / 255 - 1 for v in range(256)], abs=1e-6)
    assert torch.equal(from_signal(signal), every)
    assert from_signal(torch.tensor([-7.0, -1.001, 1.001, 30.0])).tolist() == [0, 0, 255, 255]
    assert from_signal(signal + 0.003).tolist() == every.tolist()  # rounds to the nearest, does not cut off


# --- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dropout", "snr"), [(0.0, 0.0), (0.15, 0.0), (1.0, 0.0), (0.15, 1.5)])
def test_the_loss_is_that_of_eq_12_over_a_clients_own_samples(dropout: float, snr: float) -> None:
    """With a learning rate of 0 every step sees the same network: sample by sample, one network at a time."""
    network, schedule, draws, batch = (
        network_of(lambda: UNet(1, 3, 8, 2)),
        Schedule.linear(100, CPU),
        draws_of(3),
        some_batch(),
    )
    params, still = params_of(network, 3), Optimiser("adam", 0.0)
    learner = Learner(params, still.start(params))
    _, _, losses = train_diffusion(5, network, still, schedule, dropout, snr, learner, batch, draws)

    level = draws.below(5, "level", 100, STEPS, 9)
    noise = draws.normal(5, "noise", STEPS, 9, 1, 4, 5)
    hidden = draws.uniform(5, "hide label", STEPS, 9) < dropout
    kept = products(100)
    for c in range(3):
        errors = []
        for e in range(STEPS):
            for s, slot in enumerate(batch.slots.tolist()):
                if not batch.valid[c, s]:
                    continue
                a, eps = kept[level[c, e, slot]], noise[c, e, slot]
                signal = batch.images[c, e, s].float() / 255 * 2 - 1
                noisy = math.sqrt(a) * signal + math.sqrt(1 - a) * eps
                label = torch.zeros(3) if hidden[c, e, slot] else batch.targets[c, e, s]
                found = network(params[[c]], noisy[None, None], level[c, e, slot].reshape(1, 1), label[None, None])
                weight = min(a / (1 - a), snr) / (a / (1 - a)) if snr else 1.0
                errors.append(weight * (found[0, 0] - eps).square().mean().item())
        assert losses[c].item() == pytest.approx(sum(errors) / len(errors) if errors else 0, rel=1e-4)


def test_a_client_without_data_keeps_weights_and_optimiser_bit_for_bit() -> None:
    """Not even momentum from earlier rounds may carry its weights on."""
    network, batch = network_of(lambda: UNet(1, 3, 8, 2)), some_batch()
    params = params_of(network, 3)
    state = {name: random(9, *x.shape).abs() for name, x in ADAM.start(params).items()}
    learner = Learner(params.clone(), {name: x.clone() for name, x in state.items()})
    trained, after, losses = train_diffusion(
        1, network, ADAM, Schedule.linear(100, CPU), 0.15, 0.0, learner, batch, draws_of(3)
    )
    assert torch.equal(trained[2], params[2])
    assert losses[2] == 0
    for name in state:
        assert torch.equal(after[name][2], state[name][2])
        assert not torch.equal(after[name][1], state[name][1])
    for c in range(2):
        assert not torch.equal(trained[c], params[c])
    assert torch.equal(learner.params, params)  # what it was given is left as it was


def test_training_lowers_the_loss() -> None:
    """Two clients, each with one picture: the noise can be told from it almost exactly."""
    network, schedule = network_of(lambda: UNet(1, 3, 16, 1)), Schedule.linear(100, CPU)
    pictures = pixels(3, 2, 1, 1, 1, 4, 4).expand(2, 40, 8, 1, 4, 4)
    targets = torch.eye(3)[[0, 1]].reshape(2, 1, 1, 3).expand(2, 40, 8, 3)
    batch = batch_of(pictures, targets, torch.ones(2, 8, dtype=torch.bool), torch.arange(8), 8)
    params = network.initial(0).expand(2, -1).clone()
    learner = Learner(params, ADAM.start(params))
    losses = []
    for t in range(1, 4):
        learner.params, learner.optimiser, loss = train_diffusion(
            t, network, ADAM, schedule, 0.15, 0.0, learner, batch, draws_of(2)
        )
        losses.append(loss)
    assert ((losses[0] > 0.3) & (losses[0] < 1.1)).all()  # starts from "no noise", a loss of 1
    assert (losses[-1] < 0.5 * losses[0]).all()
    assert (losses[-1] < 0.2).all()
