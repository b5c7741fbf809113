"""What the device can do at best, found by trying: a large matrix product, a large copy; and what memory is used."""

import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Device", "Memory", "wait"]


@dataclass(frozen=True)
class Device:
    """What the device can do at best, measured here and now."""

    name: str
    device: torch.device
    tflops: dict[str, float]  # a large matrix product, by precision
    gigabytes: float  # a second, a large copy: read and written

    @classmethod
    def probe(cls, device: torch.device) -> "Device":
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else _processor()
        kinds = {"bfloat16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32} if cuda else {}
        kinds = kinds or {"float32": torch.float32}
        size = 8192 if cuda else 2048
        peaks = {kind: _product(device, dtype, size, kind == "tf32") for kind, dtype in kinds.items()}
        return cls(name, device, peaks, _copy(device, 2**30 if cuda else 2**27))


def _product(device: torch.device, dtype: torch.dtype, size: int, tf32: bool) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = tf32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    spent = _best(lambda: torch.mm(a, b, out=out), device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * size**3 / spent / 1e12


def _copy(device: torch.device, size: int) -> float:
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _best(lambda: b.copy_(a), device) / 1e9


def _best(work: Callable[[], object], device: torch.device, tries: int = 5, times: int = 4) -> float:
    """Seconds of the fastest of a few tries, each of a few times in a row."""
    work()
    spent = []
    for _ in range(tries):
        wait(device)
        started = time.perf_counter()
        for _ in range(times):
            work()
        wait(device)
        spent.append((time.perf_counter() - started) / times)
    return min(spent)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Memory:
    """The most memory since it was made: on a GPU what was allocated; on a CPU the process's whole size until now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)

    def gigabytes(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
