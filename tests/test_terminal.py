"""The two faces of a run's progress: plain lines, and the live display on a recording console."""

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from semidfl.terminal import Progress


def ticks(step: float) -> Iterator[float]:
    now = 100.0
    while True:
        yield now
        now += step


def plain(step: float = 0.5) -> tuple[Progress, io.StringIO]:
    stream, clock = io.StringIO(), ticks(step)
    return Progress(stream=stream, clock=lambda: next(clock)), stream


def live(width: int = 100) -> tuple[Progress, Console]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=50, record=True, color_system=None)
    return Progress(plain=False, console=console), console


def test_without_a_terminal_each_test_is_one_line() -> None:
    progress, stream = plain(step=0.5)
    with progress:
        progress.start(500, 1, "LMU")
        progress.update(1, {"round": 1, "loss": [2.0], "seconds": {}})
        progress.update(2, {"round": 2, "loss": [0.41], "accuracy": [0.85, 0.87, 0.89], "seconds": {"train": 0.1}})
        progress.note("a note")
    assert stream.getvalue().splitlines() == [
        "3 clients (1 labelled, 1 mixed, 1 unlabelled), rounds 1 to 500",
        "round   2/500  accuracy 0.870 ± 0.016  loss 0.41  0.50 s/round  left 4:09",
        "a note",
    ]


def test_a_resumed_run_counts_from_its_first_round() -> None:
    progress, stream = plain(step=2.0)
    progress.start(100, 91, "LL")
    progress.update(91, {"round": 91, "accuracy": [1.0, 1.0]})
    assert stream.getvalue().splitlines()[-1] == "round  91/100  accuracy 1.000 ± 0.000  2.00 s/round  left 0:18"


def test_a_resumed_run_shows_what_is_already_done() -> None:
    progress, console = live()
    with progress:
        progress.start(100, 91, "L")
    assert "round  90/100" in console.export_text()


def test_the_last_round_is_always_shown_with_the_last_accuracy() -> None:
    progress, stream = plain()
    progress.start(2, 1, "L")
    progress.update(1, {"round": 1, "accuracy": [0.5]})
    progress.update(2, {"round": 2, "loss": [float("nan")]})
    assert stream.getvalue().splitlines()[-1] == "round 2/2  accuracy 0.500 ± 0.000  0.50 s/round  left 0:00"


def test_time_left_forgets_slow_first_rounds_and_knows_hours() -> None:
    times = iter([0.0, 1000.0, *(1000.0 + 2 * i for i in range(1, 61))])
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=lambda: next(times))
    progress.start(5000, 1, "L")
    progress.update(1, {"accuracy": [0.1]})
    assert "1000.00 s/round  left 1388:36:40" in stream.getvalue()
    for number in range(2, 62):
        progress.update(number, {"accuracy": [0.1]})
    assert stream.getvalue().splitlines()[-1].endswith("2.00 s/round  left 2:44:38")


def test_clients_without_a_finite_accuracy_do_not_break_the_line() -> None:
    progress, stream = plain()
    progress.start(2, 1, "LU")
    progress.update(1, {"accuracy": [float("nan"), 0.5]})
    assert "accuracy 0.500" in stream.getvalue()


def test_a_run_that_comes_apart_says_so_once() -> None:
    progress, stream = plain()
    progress.start(9, 1, "LLU")
    progress.update(1, {"loss": [0.5, 0.5, 0.0]})
    progress.update(2, {"loss": [0.5, None, 0.0]})
    progress.update(3, {"loss": [None, None, 0.0]})
    assert [line for line in stream.getvalue().splitlines() if "no number" in line] == [
        "round 2: the loss of client 1 is no number any more, and neighbours will follow; "
        "cut gradients (--classifier.grad_clip 5) or smaller steps (--classifier.lr) may help"
    ]


def test_a_log_that_is_not_utf8_gets_its_lines() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = Progress(stream=stream)
    progress.start(2, 1, "L")
    progress.update(1, {"accuracy": [0.25]})
    stream.seek(0)
    assert "accuracy 0.250 ? 0.000" in stream.read()


def test_the_live_display_shows_bar_line_and_clients() -> None:
    progress, console = live()
    with progress:
        progress.start(500, 1, "LMU")
        progress.update(25, {"round": 25, "loss": [0.41], "accuracy": [0.25, 0.5, 1.0], "seconds": {"sample": 0.3}})
        progress.note("[a] note")
    text = console.export_text()
    assert "round  25/500  accuracy 0.583 ± 0.312  loss 0.41" in text
    assert re.search(r" 0 +labelled +█{5}░{15} +25\.0 %", text)
    assert re.search(r" 1 +mixed +█{10}░{10} +50\.0 %", text)
    assert re.search(r" 2 +unlabelled +█{20} +100\.0 %", text)
    assert "━" in text
    assert "sample 0.30 s" in text
    assert "[a] note" in text


@pytest.mark.parametrize(("clients", "rows"), [(10, 10), (20, 10), (21, 0)])
def test_many_clients_share_rows_and_then_a_histogram(clients: int, rows: int) -> None:
    progress, console = live()
    with progress:
        progress.start(5, 1, "U" * clients)
        progress.update(1, {"accuracy": [0.05] + [0.95] * (clients - 1)})
        last = console.export_text(clear=False)
    drawing = last[last.rindex("round 1/5") :]
    assert drawing.count("unlabelled") == (clients if rows else 0)
    assert sum("unlabelled" in line for line in drawing.splitlines()) == rows
    histogram = "21 clients  0 % ▕▁        █▏ 100 %  lowest 5.0 %  median 95.0 %  highest 95.0 %"
    assert (histogram in drawing) == (not rows)


def test_the_live_display_ends_when_the_run_fails() -> None:
    progress, console = live()

    def interrupted() -> None:
        with progress:
            progress.start(5, 1, "L")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


SHOW = """
from semidfl.terminal import Progress
with Progress() as progress:
    progress.start(3, 1, "LU")
    progress.update(1, {"accuracy": [0.5, 0.75]})
"""


@pytest.mark.parametrize(("terminal", "drawn"), [("xterm", True), ("dumb", False)])
def test_a_real_terminal_decides(terminal: str, drawn: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": terminal, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run([sys.executable, "-c", SHOW], stdout=theirs, env=environment, check=True, timeout=60)
        os.close(theirs)
        text = screen.read(65536).decode()
    assert "accuracy 0.625" in text
    assert ("█" in text) == drawn
