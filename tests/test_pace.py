"""How often checkpoints are written."""

import pytest

from semidfl.record.pace import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def written(every: int, costs: float, rounds: int = 100) -> list[int]:
    """The rounds, of a second each, after which a checkpoint is written that takes `costs` seconds."""
    clock, found = Clock(), []
    pace = Pace(every, clock)
    for done in range(1, rounds + 1):
        clock.now += 1.0
        if pace.due(done):
            with pace.writing():
                clock.now += costs
            found.append(done)
    return found


@pytest.mark.parametrize("every", [1, 7, 10])
def test_small_ones_come_as_often_as_asked(every: int) -> None:
    assert written(every, costs=0.1) == list(range(every, 101, every))


def test_large_ones_wait_until_they_are_worth_it() -> None:
    assert written(10, costs=1.0) == [10, 30, 50, 70, 90]  # twenty seconds after the last was there
    assert written(10, costs=2.0, rounds=1000) == [10 + 40 * k for k in range(25)]
    assert written(1, costs=3.0, rounds=1000) == [1 + 60 * k for k in range(17)]


def test_none_where_none_is_asked_for() -> None:
    assert written(0, costs=0.1) == []
