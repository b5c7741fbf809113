"""GPU kernels that are launched from Python, and how they are compiled: all at once, ahead of their first use.

A network needs dozens of kernels that take half a second each to compile. Where each is compiled when it is first
launched, one waits for the other. A rehearsal goes through the work without the kernels, notes which there will be, and
has all cores compile them.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton

__all__ = ["launched", "rehearse"]

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


class launched:
    """`kernel[grid](…)`: runs a kernel, or in a rehearsal has it compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _rehearsing.get():
            return lambda *args, **options: self._kernel.warmup(*args, grid=grid, **options)
        launch: Callable[..., Any] = self._kernel[grid]
        return launch


def rehearse(work: Callable[[], object]) -> None:
    """Compiles the kernels of `work`, which is done without them: what it computes may be any number."""
    if not hasattr(triton, "AsyncCompileMode"):  # an older Triton: each when it is first launched
        return
    told = _rehearsing.set(True)
    try:
        with (
            ThreadPoolExecutor(os.cpu_count()) as cores,
            torch.autograd.set_multithreading_enabled(False),  # gradients in this thread, too, which alone rehearses
            triton.AsyncCompileMode(cores),
        ):
            work()
    finally:
        _rehearsing.reset(told)
