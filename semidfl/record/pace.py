"""When a checkpoint is worth its time.

A hundred clients with generators are gigabytes: written every ten rounds, they took longer than the training on a GPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Pace"]

_QUICK = 0.5
"""seconds that a checkpoint may take however often it is written"""
_TIMES = 20
"""as long as writing a larger one took must pass before the next: a twentieth of the time goes into them at most"""


class Pace:
    """Due every so many rounds (never where `every` is 0), large ones more seldom."""

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._next = clock()

    def due(self, done: int) -> bool:
        """After the rounds done."""
        return bool(self._every) and done % self._every == 0 and self._clock() >= self._next

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around the writing, of all runs that train together."""
        started = self._clock()
        yield
        ended = self._clock()
        self._next = ended + (_TIMES * (ended - started) if ended - started > _QUICK else 0)
