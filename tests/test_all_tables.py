"""benchmarks/tables.py: the parts are the tables, once; asked to stop, nothing is left running."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import script

from semidfl.commands.words import flags
from semidfl.report.plans import make_plan
from semidfl.reproduce import options_of

tables = script("benchmarks/tables.py")

PARTS = [
    ["table-main", "--dataset", "digits", "--method", "dfl-lb", "--seeds", "1"],
    ["table-main", "--dataset", "digits", "--method", "dfl-ub", "--seeds", "1"],
    ["table-main", "--dataset", "digits", "--method", "dfl-ub", "--seeds", "1", "--alpha", "100"],  # of the one before
]


def runs_of(command: list[str]) -> set[str]:
    return set(make_plan(command[0], options_of(flags(command[1:]))).runs())


def test_the_parts_of_a_table_have_each_of_its_runs_once() -> None:
    parts: dict[tuple[str, ...], list[str]] = {}
    for part in tables.parts():
        parts.setdefault(tuple(tables._whole(part)), []).extend(runs_of(part))
    assert {table[0] for table in parts} == {name for name, kind in tables.KINDS.items() if kind.runs}
    for table, runs in parts.items():
        assert set(Counter(runs).values()) == {1}, table
        assert set(runs) == runs_of(list(table)), table


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Callable[..., bool]:
    """What runs the parts, with this program in place of `reproduce`."""
    program = tmp_path / "program.py"
    program.write_text(f"import signal, sys, time, os\nplace = {str(tmp_path)!r}\n{code}")
    monkeypatch.setattr(tables, "_REPRODUCE", [sys.executable, str(program)])
    return lambda jobs, over: bool(tables.run_all(PARTS, jobs, over, tmp_path, tmp_path, ["--rounds", "3"]))


def test_each_is_told_what_was_passed_on_and_where_summaries_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(tmp_path, monkeypatch, "open(place + '/' + sys.argv[5], 'w').write(' '.join(sys.argv[1:]))")
    assert run(2, float("inf"))
    words = (tmp_path / "dfl-lb").read_text()
    assert words.startswith(" ".join(PARTS[0]) + " --rounds 3 --run missing --out ")
    assert words.endswith(f" --kept {tmp_path / 'runs.jsonl'}")
    assert capsys.readouterr().out.count("exit 0") == 3


def test_one_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(tmp_path, monkeypatch, "sys.exit(2 * (sys.argv[5] == 'dfl-lb'))")
    assert not run(1, float("inf"))
    out = capsys.readouterr().out
    assert (out.count("exit 2"), out.count("exit 0")) == (1, 2)


_WAITS = """
def end(number, frame):
    open(f"{place}/{os.getpid()}.ended", "a").write(f"{number} ")
    sys.exit(0)
signal.signal(signal.SIGINT, end)
open(f"{place}/{os.getpid()}.began", "w")
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, 0])
def test_stopped_or_out_of_time_all_are_asked_once_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run, patience = started(tmp_path, monkeypatch, _WAITS), time.monotonic() + 60

    def began() -> list[Path]:
        return sorted(tmp_path.glob("*.began"))

    def ask() -> None:
        while len(began()) < 2 and time.monotonic() < patience:
            time.sleep(0.05)
        os.kill(os.getpid(), number)  # 0 does nothing

    if not number:  # the time is up when two have begun
        clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 2.0 if len(began()) == 2 else 0.0)
        monkeypatch.setattr(tables, "time", clock)
    asking = threading.Thread(target=ask)
    asking.start()
    assert not run(3, 1.0 if not number else patience)
    asking.join()
    # Parts that share a run are not at work together, so the third never began.
    assert [path.with_suffix(".ended").read_text() for path in began()] == [f"{int(signal.SIGINT)} "] * 2
