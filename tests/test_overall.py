"""What is shown while many runs go on: where it stands, and the time left."""

import io
import math

from small import tiny

from semidfl import recipes
from semidfl.config import override
from semidfl.overall import Forecast, Overall, describe


def test_time_left_adds_up_what_runs_alike_have_taken() -> None:
    quick, slow = tiny(method="dfl-lb"), tiny(method="semidfl")
    forecast = Forecast()
    assert math.isnan(forecast.of(quick))
    forecast.learn(quick, 10)
    assert forecast.of(slow) == 10  # nothing better is known
    forecast.learn(slow, 100)
    forecast.learn(tiny(method="semidfl", seed=1, data__ratio=3, data__alpha=7), 200)
    assert forecast.of(tiny(method="semidfl", seed=2)) == 150
    todo = [quick, slow, slow]
    shown = Overall(todo, 5, forecast, stream=io.StringIO())
    assert shown.left() == 10 + 150 + 150
    assert shown.left(current=4) == 4 + 300


def test_a_run_is_described_by_what_tells_it_from_others() -> None:
    assert describe(recipes.paper("digits", 5, 0.1, seed=1)) == "semidfl digits r=5 a=0.1 seed 1"
    other = override(recipes.paper("mnist", topology="topology1"), {"generator.kind": "none"})
    assert describe(other) == "semidfl topology1 none mnist r=0.5 a=100 seed 0"


def test_lines_say_where_it_stands() -> None:
    stream, now = io.StringIO(), [0.0]
    config = tiny(method="dfl-lb", rounds=4)
    shown = Overall([config, config], 12, Forecast(), stream=stream, clock=lambda: now[0])
    with shown, shown.of([config]) as progress:
        progress.start(4, 1, "LMUU")
        for t in range(1, 5):
            now[0] += 20
            progress.update(t, {"accuracy": [0.25, 0.75]})
    shown.done(config, 80, 0.5)
    lines = stream.getvalue().splitlines()
    # A line at once, then not before half a minute has gone by.
    assert lines[0] == "run 11/12  dfl-lb ring digits r=50 a=100 seed 0  round 1/4  accuracy 0.500"
    assert [line.split("  ")[2] for line in lines[1:-1]] == ["round 3/4"]
    assert lines[-1] == "run 11/12  dfl-lb ring digits r=50 a=100 seed 0  accuracy 0.500  80 s  left 1:20"
