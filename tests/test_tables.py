"""benchmarks/tables.py: all of the paper's tables, in parts that can be stopped and never overwrite each other."""

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from scripts import script

from semidfl.report.plans import KINDS, make_plan
from semidfl.reproduce import options_of


@pytest.fixture
def tables() -> ModuleType:
    return script("benchmarks/tables.py")


def plan_runs(part: list[str]) -> set[str]:
    pairs = [(k.removeprefix("--"), v) for k, v in zip(part[1::2], part[2::2], strict=True)]
    return set(make_plan(part[0], options_of(pairs)).runs())


def test_the_parts_of_a_table_are_the_table(tables: ModuleType) -> None:
    whole: dict[tuple[str, ...], set[str]] = {}
    for part in tables.parts():
        runs = plan_runs(part)
        assert runs
        whole.setdefault(tuple(tables._whole(part)), set()).update(runs)
    for table, runs in whole.items():
        assert plan_runs(list(table)) == runs, table
    assert {table[0] for table in whole} == {name for name, kind in KINDS.items() if kind.runs}


def note(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Path:
    """In place of `semidfl reproduce`: a process that writes a line when it starts and when it ends."""
    log = folder / "log"
    head = ["import signal, sys, time", f"log = open({str(log)!r}, 'a', buffering=1)"]
    # As `reproduce` does: whoever starts the tests in the background may have Ctrl-C ignored.
    head += ["signal.signal(signal.SIGINT, signal.default_int_handler)", "print('start', sys.argv[1], file=log)"]
    code = "\n".join([*head, body, "print('end', sys.argv[1], file=log)"])
    monkeypatch.setattr(tables, "_runs", lambda part: {part[0]})
    monkeypatch.setattr(tables, "_REPRODUCE", [sys.executable, "-c", code])
    return log


def test_no_more_than_so_many_run_at_a_time_and_a_failure_is_told(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = note(tables, monkeypatch, tmp_path, "time.sleep(0.3)\nif sys.argv[1] == 'b': sys.exit(3)")
    todo = [["a"], ["b"], ["c"]]
    assert not tables.run_all(todo, 2, time.monotonic() + 60, tmp_path, tmp_path, ["--more", "1"])
    lines = log.read_text().split("\n")
    assert {lines[0], lines[1]} == {"start a", "start b"}
    assert sorted(filter(None, lines)) == ["end a", "end c", "start a", "start b", "start c"]
    assert "exit 3  b" in capsys.readouterr().out
    assert tables.run_all(todo[:1], 2, time.monotonic() + 60, tmp_path, tmp_path, [])


def test_when_time_is_over_what_runs_is_asked_to_stop_and_the_rest_waits(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    log.write('checkpoint\\n')\n    sys.exit(130)"
    log = note(tables, monkeypatch, tmp_path, body)
    begun = time.monotonic()
    assert not tables.run_all([["a"], ["b"]], 1, begun + 2, tmp_path, tmp_path, [])
    assert time.monotonic() - begun < 30
    assert log.read_text() == "start a\ncheckpoint\n"


def test_it_lists_what_words_choose(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", "tuned", "table-mixup", "--list"])
    assert tables.main() == 0
    assert capsys.readouterr().out == "table-mixup --dataset mnist --recipe tuned --seeds 1\n"


def test_parts_that_share_a_run_take_turns(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = note(tables, monkeypatch, tmp_path, "time.sleep(0.5)")
    monkeypatch.setattr(tables, "_runs", lambda part: {"x"} if part[0] in "ab" else {part[0]})
    assert tables.run_all([["a"], ["b"], ["c"]], 3, time.monotonic() + 60, tmp_path, tmp_path, [])
    lines = log.read_text().splitlines()
    assert lines.index("end a") < lines.index("start b")
    assert lines.index("start c") < lines.index("start b")


@pytest.mark.parametrize("words", [["no-such-table"], ["tuned", "digits", "--", "--rounds", "1"]])
def test_words_that_choose_nothing_are_refused(
    words: list[str], tables: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables.py", *words])
    with pytest.raises(SystemExit, match="2"):
        tables.main()
    assert "no part has all of these words" in capsys.readouterr().err


def test_options_after_two_dashes_are_passed_on(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    code = f"import sys; print(sys.argv[1:], file=open({str(log)!r}, 'a'))"
    monkeypatch.setattr(tables, "_REPRODUCE", [sys.executable, "-c", code])
    monkeypatch.setattr(sys, "argv", ["tables.py", "table-mixup", "paper", "--out", "a b", "--", "--rounds", "1"])
    assert tables.main() == 0
    ran, written = log.read_text().splitlines()
    for line in (ran, written):
        assert "'--rounds', '1'" in line
    assert "'--kept', 'a b/runs.jsonl'" in ran
    assert written.endswith("'--run', 'no', '--out', 'a b']")
