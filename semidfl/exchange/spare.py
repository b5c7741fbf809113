"""Who is not asked for a while: after each failure in a row, for twice as many rounds as after the one before."""

from collections import Counter

__all__ = ["Spared"]


class Spared:
    def __init__(self, most: int) -> None:
        self.most = most
        """rounds after which one is asked again in any case"""
        self._failed: Counter[str] = Counter()
        self._until: dict[str, int] = {}

    def until(self, name: str) -> int:
        """The round in which it is asked again."""
        return self._until.get(name, 0)

    def fails(self, name: str, t: int) -> None:
        self._failed[name] += 1
        self._until[name] = t + min(2 ** min(self._failed[name], 30), self.most)

    def answers(self, name: str) -> None:
        self._failed[name] = 0
