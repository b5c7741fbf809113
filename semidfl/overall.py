"""What a person sees while many runs go on: how many are done, what the one at hand does, and the time left."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from semidfl.config import Config, DataConfig, config_hash
from semidfl.terminal import Progress, _can_draw, _clock_text, _Lines

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Forecast", "Overall", "describe"]

_PAUSE = 30.0
"""seconds between two plain lines of the same run"""


def describe(config: Config) -> str:
    """A run in a few words: `semidfl digits r=5 a=0.1 seed 1`, with the graph and switches that are not the usual."""
    plain, data = Config(), config.data
    switches = [
        (config.graph.topology, plain.graph.topology),
        (config.pseudo.kind, plain.pseudo.kind),
        (config.generator.kind, plain.generator.kind),
        (config.aggregation.weights, plain.aggregation.weights),
    ]
    words = [config.method, *(value for value, usual in switches if value != usual), data.dataset]
    return " ".join([*words, f"r={data.ratio:g}", f"a={data.alpha:g}", f"seed {config.seed}"])


class Forecast:
    """Seconds that runs will take, from those that are done: alike are those that differ in split and seed only."""

    def __init__(self) -> None:
        self._known: dict[str, list[float]] = {}

    def learn(self, config: Config, seconds: float) -> None:
        """A run of this config has taken so long."""
        self._known.setdefault(self._likeness(config), []).append(seconds)

    def of(self, config: Config) -> float:
        """As the mean of runs alike, else of all kinds seen so far; NaN before the first."""
        alike = self._known.get(self._likeness(config))
        if alike:
            return fmean(alike)
        return fmean(map(fmean, self._known.values())) if self._known else math.nan

    def _likeness(self, config: Config) -> str:
        return config_hash(
            replace(config, seed=0, data=replace(config.data, ratio=DataConfig.ratio, alpha=DataConfig.alpha))
        )


class Overall:
    """Progress over many runs, in a `with` block; `of` gives the Progress of each run in turn."""

    def __init__(
        self,
        todo: Sequence[Config],
        total: int,
        forecast: Forecast,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.todo, self.total, self.forecast = list(todo), total, forecast
        self.stream, self.clock = stream or sys.stdout, clock
        self.others: list[Config] = []  # runs that another process is at
        self._said, self._group = -math.inf, 1
        self._bar = _bar() if _can_draw(self.stream) else None
        self._task = self._bar.add_task("", total=total) if self._bar else None

    def of(self, group: Sequence[Config]) -> Progress:
        """The Progress of the next runs, which train together and must be the first of those to do."""
        assert self.todo[: len(group)] == list(group)
        self._said, self._group = -math.inf, len(group)
        return _OneRun(self)

    def done(self, config: Config, seconds: float, accuracy: float) -> None:
        """A run has ended."""
        self.forecast.learn(config, seconds)
        self._group = 1
        line = f"{self._where()}  accuracy {accuracy:.3f}  {seconds:.0f} s"
        self.todo.pop(0)
        self.say(line + self._left_text(math.nan))

    def elsewhere(self, config: Config, seconds: float) -> None:
        """Another process has done this run, which was still to do."""
        self.forecast.learn(config, seconds)
        self.todo.remove(config)

    def taken(self, config: Config) -> None:
        """Another process is at this run."""
        self.others.append(config)
        self.todo.remove(config)

    def tick(self, run: Progress) -> None:
        """A round of a run has ended."""
        left = run.pace * (run.rounds - run.done)
        line = f"{self._where()}  round {run.done}/{run.rounds}{_accuracy(run)}{self._left_text(left)}"
        if self._bar is not None and self._task is not None:
            ended = self.total - len(self.todo) + self._group * run.done / max(run.rounds, 1)
            self._bar.update(self._task, completed=ended, description=line)
        elif self.clock() - self._said >= _PAUSE:
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._said = self.clock()
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            _Lines(Progress(plain=True, stream=self.stream)).note(text)

    def left(self, current: float = math.nan) -> float:
        """Seconds for all that is to do; `current`: of the run at hand, where its pace is known."""
        rest = self.todo[self._group if math.isfinite(current) else 0 :]
        known = 0.0 if math.isnan(current) else current
        return known + sum(map(self.forecast.of, rest))

    def _left_text(self, current: float) -> str:
        seconds = self.left(current)
        return f"  left {_clock_text(seconds)}" if self.todo and math.isfinite(seconds) else ""

    def _where(self) -> str:
        number, more = self.total - len(self.todo) + 1, self._group - 1
        beside = f" and {more} alike" * (more > 0)
        return f"run {number:>{len(str(self.total))}}/{self.total}  {describe(self.todo[0])}{beside}"

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class _OneRun(Progress):
    """Says nothing itself, but tells the whole of every round."""

    def __init__(self, overall: Overall) -> None:
        super().__init__(plain=True, stream=overall.stream, clock=overall.clock)
        self._view = _Hand(self, overall)


class _Hand(_Lines):
    def __init__(self, run: Progress, overall: Overall) -> None:
        super().__init__(run)
        self._overall = overall

    def start(self) -> None:
        pass

    def update(self, tested: bool) -> None:
        self._overall.tick(self._progress)

    def note(self, text: str) -> None:
        self._overall.say(text)


def _accuracy(run: Progress) -> str:
    return f"  accuracy {fmean(run.accuracy):.3f}" if run.accuracy else ""


def _bar() -> "Bar":
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    return Bar(BarColumn(bar_width=30), TextColumn("{task.description}", markup=False))
