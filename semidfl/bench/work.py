"""The work of a round, counted: samples, operations and bytes by phase, for TFLOP/s and the roofline.

Operations are those of a network's matrix products and convolutions, traced on shapes alone for one client and one
sample; a training step is three forward passes. Only what a client has is counted, not the slots that stacking pads
for it. Bytes are the least that must move: weights and optimiser state once a step, every layer's output written
and read, and in training as much again for its gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from semidfl.cohort import Cohort
from semidfl.estimate import activations_of
from semidfl.learn.generator import Generator
from semidfl.methods.base import Method
from semidfl.models.stacked import Network
from semidfl.setup import Setup

__all__ = ["Pass", "Work", "one_pass", "work_of"]

_TRAINING = 3
"""forward passes that a forward and backward pass cost together"""


@dataclass(frozen=True)
class Pass:
    """A network's forward pass of one sample."""

    flop: int
    bytes: int  # of activations, written and read
    precision: str  # float32, tf32 or bfloat16: what the products are computed in


@dataclass(frozen=True)
class Work:
    """Of a phase, all clients together."""

    samples: int
    flop: int
    bytes: int
    precision: str


def one_pass(network: Network | Generator, setup: Setup) -> Pass:
    """The forward passes that one sample takes through a network, or through all networks of a generator."""
    flop = size = 0
    with torch.device("meta"):
        for part, inputs in _parts(network, setup):
            with FlopCounterMode(display=False) as counter:
                functional_call(part.module, part.named(torch.empty(1, part.size)), inputs)
            flop += counter.get_total_flops()
            size += activations_of(part, *inputs)
    return Pass(flop, size, _precision(network, setup))


def _parts(network: Network | Generator, setup: Setup) -> Iterator[tuple[Network, tuple[Tensor, ...]]]:
    if isinstance(network, Network):
        yield network, (torch.empty(1, 1, *setup.space.shape),)
    else:
        yield from network.examples()


def _precision(network: Network | Generator, setup: Setup) -> str:
    dtype = network.dtype if isinstance(network, Network) else next(network.examples())[0].dtype
    if dtype == torch.bfloat16:
        return "bfloat16"
    # Our kernels round the factors of a float32 product to TF32, as tensor cores want them.
    return "tf32" if setup.device.type == "cuda" else "float32"


def work_of(method: Method, cohort: Cohort, generated: bool) -> dict[str, Work]:
    """By phase, for a round in which everything happens; `generated`: after the first generation."""
    setup, config = method.setup, method.setup.config
    labelled, unlabelled = (x.held for x in (cohort.shards.labelled, cohort.shards.unlabelled))
    pseudo = type(method).pseudo_label is not Method.pseudo_label
    clients, c, g = len(cohort.ids), config.classifier, config.generator
    sources = [(n > 0) + (pseudo and m > 0) for n, m in zip(labelled, unlabelled, strict=True)]
    one = one_pass(setup.classifier, setup)
    batches = [s + generated for s in sources]
    work = {
        "classifier": _training(one, setup.classifier.size, 1, c.iterations, c.batch, batches),
        "mix": _mixing(setup, cohort),
        "test": _forward(one, clients * setup.test_images.shape[1], setup.classifier.size * clients),
    }
    if pseudo:
        seen = sum(min(n, config.pseudo.pool or n) for n in unlabelled) * config.pseudo.views
        work["pseudo-label"] = _forward(one, seen, setup.classifier.size * config.pseudo.views * clients)
    if cohort.generator is not None:
        net = one_pass(setup.generator, setup)
        steps = g.iterations or c.iterations
        work["generator"] = _training(net, setup.generator.size, 2, steps, g.batch, sources)
        if g.kind == "diffusion":
            drawn, passes = clients * (g.samples + g.validation), g.sampler_steps * (1 if g.guidance == 1 else 2)
            done = _forward(net, drawn * passes, setup.generator.size * clients * g.sampler_steps)
            work["generate"] = Work(drawn, done.flop, done.bytes, done.precision)
    return work


def _training(one: Pass, size: int, states: int, steps: int, batch: int, sources: list[int]) -> Work:
    """Weights are read, then read and written by the optimiser with its states; their gradient is written and read."""
    samples = steps * batch * sum(sources)
    moved = steps * sum(s > 0 for s in sources) * size * 4 * (5 + 2 * states)
    return Work(samples, _TRAINING * one.flop * samples, moved + 2 * one.bytes * samples, one.precision)


def _forward(one: Pass, samples: int, weights: int) -> Work:
    return Work(samples, one.flop * samples, one.bytes * samples + 4 * weights, one.precision)


def _mixing(setup: Setup, cohort: Cohort) -> Work:
    """Every client's weights read by each of its neighbourhood, and written."""
    size = setup.classifier.size + (setup.generator.size if cohort.generator is not None else 0)
    near = sum(len(row) + 1 for row in setup.graph.neighbours)
    return Work(0, 2 * size * near, 4 * size * (near + len(cohort.ids)), "float32")
