"""What a person sees while a run goes on: a live display on a terminal, one plain line a test elsewhere.

`Progress` keeps the few numbers there are to show; two small views draw them. rich is imported only where there is a
terminal to draw on.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, pstdev
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Progress"]

_ROLES = {"L": "labelled", "M": "mixed", "U": "unlabelled"}
_SHOWN = 20
"""clients shown one by one; more are shown as a histogram"""
_WINDOW = 50
"""rounds over which speed is averaged, so that slow first rounds are soon forgotten"""


class Progress:
    """The progress of a run, in a `with` block: `start`, then `update` after each round, `note` for a line between.

    `plain` forces lines (True) or the live display (False); by default a terminal decides.
    """

    def __init__(
        self,
        plain: bool | None = None,
        console: "Console | None" = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream or sys.stdout
        self.rounds = self.done = self.first = 0
        self.roles: Sequence[str] = ""
        self.accuracy: list[float] = []
        self.loss = math.nan
        self.seconds: Mapping[str, float] = {}
        self._broken = False
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_WINDOW + 1)
        plain = not _can_draw(self.stream) if plain is None else plain
        self._view: _Lines | _Live = _Lines(self) if plain else _Live(self, console)

    def start(self, rounds: int, first_round: int, roles: Sequence[str]) -> None:
        """Say how many rounds the run has, which comes first (1, or more on a resume), and each client's role."""
        self.rounds, self.first, self.done, self.roles = rounds, first_round, first_round - 1, roles
        self._times.clear()
        self._times.append(self._clock())
        self._view.start()

    def update(self, round: int, record: Mapping[str, Any]) -> None:
        """Show the metrics of a round that is done; `accuracy` is there only in rounds that test."""
        self.done = round
        self._times.append(self._clock())
        self.accuracy = list(record.get("accuracy") or self.accuracy)
        losses = _finite(record.get("loss") or [])
        self.loss = fmean(losses) if losses else math.nan
        self.seconds = record.get("seconds") or {}
        self._view.update(tested=bool(record.get("accuracy")))
        self._warn(record)

    def _warn(self, record: Mapping[str, Any]) -> None:
        """Say once that training has come apart: what follows is not worth waiting for."""
        broken = [client for client, loss in enumerate(record.get("loss") or []) if loss is None]
        if broken and not self._broken:
            clients = f"client {broken[0]}" if len(broken) == 1 else f"{len(broken)} clients"
            self.note(
                f"round {self.done}: the loss of {clients} is no number any more, and neighbours will follow; "
                "cut gradients (--classifier.grad_clip 5) or smaller steps (--classifier.lr) may help"
            )
            self._broken = True

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._view.note(text)

    @property
    def pace(self) -> float:
        """Seconds a round, over the last rounds; NaN before the first."""
        steps = len(self._times) - 1
        return (self._times[-1] - self._times[0]) / steps if steps > 0 else math.nan

    def line(self) -> str:
        """All in one line, such as `round  25/500  accuracy 0.873 ± 0.012  loss 0.41  0.62 s/round  left 4:53`."""
        parts = [f"round {self.done:>{len(str(self.rounds))}}/{self.rounds}"]
        if values := _finite(self.accuracy):
            parts.append(f"accuracy {fmean(values):.3f} ± {pstdev(values):.3f}")
        if math.isfinite(self.loss):
            parts.append(f"loss {self.loss:.3g}")
        if math.isfinite(self.pace):
            parts += [f"{self.pace:.2f} s/round", f"left {_clock_text(self.pace * (self.rounds - self.done))}"]
        return "  ".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.stop()


class _Lines:
    """Plain lines: after each test and after the last round."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self) -> None:
        roles = self._progress.roles
        counts = ", ".join(f"{roles.count(letter)} {word}" for letter, word in _ROLES.items() if letter in roles)
        first, rounds = self._progress.first, self._progress.rounds
        left = f"rounds {first} to {rounds}" if first <= rounds else f"all {rounds} rounds are done"
        self.note(f"{len(roles)} clients ({counts}), {left}")

    def update(self, tested: bool) -> None:
        if tested or self._progress.done == self._progress.rounds:
            self.note(self._progress.line())

    def note(self, text: str) -> None:
        stream = self._progress.stream
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # Logs are not always UTF-8: a run must not die of a plus-minus sign.
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)

    def stop(self) -> None:
        pass


class _Live:
    """A display that redraws itself twice a second: bar, line, a small bar for each client."""

    def __init__(self, progress: Progress, console: "Console | None") -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self.console = console or Console(file=progress.stream)
        self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=2)

    def start(self) -> None:
        self._live.start()

    def update(self, tested: bool) -> None:
        if tested:
            self._live.refresh()

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._live.stop()

    def render(self) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        bar = Table.grid()  # by itself a bar ends no line
        bar.add_row(
            ProgressBar(total=max(progress.rounds, 1), completed=progress.done, width=min(60, self.console.width))
        )
        parts: list[RenderableType] = [bar, Text(progress.line())]
        if progress.seconds:
            slow = sorted(progress.seconds.items(), key=lambda item: -item[1])[:4]
            parts.append(Text("  ".join(f"{phase} {s:.2f} s" for phase, s in slow), style="dim"))
        if len(progress.accuracy) > _SHOWN:
            parts.append(Text(_histogram(progress.accuracy)))
        elif progress.accuracy:
            parts.append(_table(progress.accuracy, progress.roles))
        return Group(*parts)


def _table(accuracy: Sequence[float], roles: Sequence[str]) -> "RenderableType":
    """A row a client: id, role, bar, percent; two clients side by side where there are more than ten."""
    from rich.table import Table

    cells = [_cells(client, value, roles) for client, value in enumerate(accuracy)]
    columns = 1 if len(cells) <= 10 else 2
    table = Table.grid(padding=(0, 2))
    rows = math.ceil(len(cells) / columns)
    for row in range(rows):
        table.add_row(*(cell for client in cells[row::rows] for cell in client))
    return table


def _cells(client: int, value: float, roles: Sequence[str]) -> tuple[str, str, str, str]:
    role = roles[client] if client < len(roles) else ""
    filled = round(20 * min(max(value, 0.0), 1.0)) if math.isfinite(value) else 0
    return f"{client:>2}", _ROLES.get(role, role), "█" * filled + "░" * (20 - filled), f"{100 * value:5.1f} %"


def _histogram(accuracy: Sequence[float]) -> str:
    """One line for many clients: how many stand in each tenth, and the extremes."""
    values = _finite(accuracy) or [0.0]
    counts = [0] * 10
    for value in values:
        counts[min(9, max(0, int(10 * value)))] += 1
    bars = "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / max(counts))] for count in counts)
    low, middle, high = (f"{100 * value:.1f} %" for value in (min(values), median(values), max(values)))
    return f"{len(accuracy)} clients  0 % ▕{bars}▏ 100 %  lowest {low}  median {middle}  highest {high}"


def _finite(values: Sequence[float | None]) -> list[float]:
    """Without NaN and infinity, which a record holds as None."""
    return [value for value in values if value is not None and math.isfinite(value)]


def _can_draw(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    if "utf" not in (getattr(stream, "encoding", None) or "").lower():
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def _clock_text(seconds: float) -> str:
    """4:53, or 1:02:09 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
