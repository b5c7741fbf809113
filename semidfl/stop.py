"""Ctrl-C (or a scheduler's SIGTERM) ends a run after the round at hand; a second one ends it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Stop"]


class Stop:
    """While it is entered, the first signal only sets `requested`. In a thread it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
                outer = getattr(self._before[number], "__self__", None)
                self.requested |= isinstance(outer, Stop) and outer.requested  # asked before this began
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
            outer = getattr(handler, "__self__", None)
            if self.requested and isinstance(outer, Stop):  # who runs many things stops after this one, too
                outer.requested = True
