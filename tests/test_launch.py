"""A rehearsal compiles what the work will launch, and launches nothing; a launch on a GPU gets what it is given."""

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from helpers import random
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from semidfl import models
from semidfl.models import launch, stacked
from semidfl.models.cnn import CNN
from semidfl.models.launch import launched, rehearse
from semidfl.models.stacked import Network


class Kernel:
    """What a compiler makes of a function: launched through its grid, or compiled for later."""

    def __init__(self) -> None:
        self.done: list[tuple[str, tuple[int, ...], int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda x, num_warps: self.done.append(("run", grid, x, num_warps))

    def warmup(self, x: int, grid: tuple[int, ...], num_warps: int) -> None:
        self.done.append(("compile", grid, x, num_warps))


class Doubled(torch.autograd.Function):
    """A layer with a kernel in either direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: launched) -> Tensor:
        ctx.kernel = kernel
        kernel[2, 3](1, num_warps=4)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.kernel[5,](2, num_warps=8)
        return 2 * grads[0], None


def test_forwards_and_backwards() -> None:
    kernel = Kernel()
    x = torch.ones(3, requires_grad=True)

    def work() -> Tensor:
        return torch.autograd.grad(Doubled.apply(x, launched(kernel)).sum(), x)[0]

    rehearse(work)
    assert kernel.done == [("compile", (2, 3), 1, 4), ("compile", (5,), 2, 8)]
    kernel.done.clear()
    assert work().tolist() == [2, 2, 2]
    assert kernel.done == [("run", (2, 3), 1, 4), ("run", (5,), 2, 8)]


def test_after_an_error_kernels_run_again() -> None:
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError):
        rehearse(lambda: 1 / 0)
    launched(kernel)[1,](0, num_warps=1)
    assert kernel.done == [("run", (1,), 0, 1)]


def test_a_compiler_that_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(launch.triton, "AsyncCompileMode")
    rehearse(lambda: pytest.fail("there is nothing to rehearse for"))


def test_a_network_rehearses_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(lambda: CNN(1, 8, 8, 10), torch.float32)
    params, rehearsed = network.initial(0)[None].expand(2, -1), []
    monkeypatch.setattr(stacked, "fused", lambda x: True)
    monkeypatch.setattr(network, "_by_taps", network.named)  # kernels for another device, here
    monkeypatch.setattr(launch, "rehearse", lambda work: rehearsed.append(work()))
    for batch in (3, 3, 4):
        with torch.no_grad():
            network(params, random(1, 2, batch, 1, 8, 8))
    network(params, random(1, 2, 5, 1, 8, 8))  # in training the whole step is rehearsed, instead
    assert [len(y[0]) for y in rehearsed] == [3, 4]


def all_kernels() -> Iterator[tuple[str, Any]]:
    for module in iter_modules(models.__path__, "semidfl.models."):
        for name, value in vars(import_module(module.name)).items():
            if isinstance(value, launched):
                yield f"{module.name}.{name}", value._kernel.fn


@pytest.mark.parametrize("function", [pytest.param(fn, id=name) for name, fn in all_kernels()])
def test_on_a_gpu_a_launch_gets_every_argument(function: Callable[..., None]) -> None:
    """Where Triton interprets a kernel it is called as it is; on a GPU code is made for it, with names of its own."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    kernel = JITFunction(function)
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    bound, *_ = bind(*range(2, 2 + len(kernel.params)))
    assert bound == {name: place for place, name in enumerate(kernel.arg_names, start=2)}
