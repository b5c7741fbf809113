"""Trying again: exponential backoff with full jitter, the one place for it.

Each pause is drawn evenly between 0 and a ceiling that doubles: peers that lost the same neighbour at the same
moment do not all come back at the same moment.
"""

import random
from collections.abc import Iterator

__all__ = ["pauses"]


def pauses(first: float = 0.1, most: float = 2.0, draw: random.Random | None = None) -> Iterator[float]:
    """Seconds to wait before the next try, for ever: whoever tries has a deadline of its own."""
    draw = draw or random.Random()  # noqa: S311 (no secret)
    ceiling = first
    while True:
        yield draw.uniform(0, ceiling)
        ceiling = min(most, 2 * ceiling)
