"""What happened in one round: figures, seconds by phase, bytes. Nothing waits for the device until the end."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["RoundLog"]


class RoundLog:
    """Collects a round's figures; tensors stay on the device until `record` turns all into plain numbers."""

    def __init__(self, t: int, device: torch.device) -> None:
        self.figures: dict[str, Any] = {"round": t}
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.figures[name] = value

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what is inside; on a GPU by events in its queue, so that timing does not slow it down."""
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def record(self) -> dict[str, Any]:
        """The round as JSON can hold it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for name, start, end in self._marks:
            spent = start.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - start
            seconds[name] = round(seconds.get(name, 0.0) + spent, 6)
        return {name: _plain(x) for name, x in self.figures.items()} | {"seconds": seconds}


def _plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _plain(x.tolist())
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, float):
        return round(x, 6) if math.isfinite(x) else None
    return x
