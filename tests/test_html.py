"""The report: one file that needs nothing else, holds the run's numbers, and never harms a run."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_up import make_run
from small import tiny

from semidfl import experiment
from semidfl.cli import main
from semidfl.record.history import History
from semidfl.report import html
from semidfl.report.html import write_report
from semidfl.report.portraits import holdings_figure
from semidfl.report.stats import bootstrap


class Checked(HTMLParser):
    """Collects addresses, and sees that every element is closed."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(path: Path) -> tuple[str, Checked]:
    text, checked = path.read_text(encoding="utf-8"), Checked()
    checked.feed(text)
    assert checked.open == []
    return text, checked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "ten", rounds=20)


def test_it_is_one_file_that_holds_the_result(folder: Path, tmp_path: Path) -> None:
    text, checked = parse(write_report([folder], tmp_path / "report.html"))
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in checked.addresses)
    assert not re.search(r"@import|url\((?!#)", text)  # only clip paths inside the file
    values = np.array(json.loads((folder / "summary.json").read_text())["per_client"])
    low, high = bootstrap(100 * values)
    assert f"{100 * values.mean():.2f} %" in text
    assert f"± {100 * values.std():.2f} over 10 clients; 95 % interval of the mean {low:.2f} to {high:.2f} %" in text
    for accuracy in values:
        assert f"<td>{100 * accuracy:.2f}</td>" in text
    for section in ("Accuracy of every client", "who holds what", "Pseudo-labels", "Generated images", "What is taken"):
        assert section in text
    assert text.count("<svg") == 7
    assert "dataset = &#34;digits&#34;" in text
    assert f"semidfl run {folder}/config.toml --name ten-again" in text


def test_the_same_run_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = write_report([folder], tmp_path / "report.html").read_bytes()
    assert write_report([folder], tmp_path / "report.html").read_bytes() == first


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, rounds=20, method=name) for name in ("semidfl", "mixmatch")]
    text, _ = parse(write_report(runs, tmp_path / "both.html"))
    assert "The runs side by side" in text
    assert "mixmatch − semidfl" in text
    assert text.count("To do it again") == 2
    half = make_run(tmp_path / "half", rounds=20, done=7)
    found, why = html._compared([html.History(folder) for folder in (runs[0], half)])
    assert (found, why) == (None, f"the run {half} is not finished: semidfl resume {half}")


@pytest.mark.parametrize("done", [0, 7])
def test_a_run_that_is_not_finished(tmp_path: Path, done: int) -> None:
    text, _ = parse(write_report([make_run(tmp_path / "run", rounds=20, done=done)], tmp_path / "x.html"))
    assert f"not finished: {done} of 20 rounds; go on with `semidfl resume {tmp_path / 'run'}`" in text


def test_a_folder_of_an_older_version(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=20)
    for name in ("clients.json", "confusion.json"):
        (folder / name).unlink()
    text, _ = parse(write_report([folder], tmp_path / "x.html"))
    assert text.count("<svg") == 4  # curves, graph, pseudo-labels, cost


def test_names_are_text_not_html(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=5)
    known = json.loads((folder / "clients.json").read_text())
    known["classes"][3] = "<script>alert(1)</script>"
    known["samples"]["classes"][0] = "<b onclick=x>"
    (folder / "clients.json").write_text(json.dumps(known))
    text, _ = parse(write_report([folder], tmp_path / "x.html"))
    assert "<script" not in text
    assert "<b onclick" not in text


def test_many_clients_and_rounds_take_no_long_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clients=100, rounds=100)
    start = time.perf_counter()
    path = write_report([folder], tmp_path / "x.html")
    assert time.perf_counter() - start < 20  # 3 s where nothing else runs
    assert path.stat().st_size < 3_000_000
    assert "and 60 more clients" in path.read_text(encoding="utf-8")


# --- at the end of a run ---------------------------------------------------------------------------------------------


def test_every_run_ends_with_one(tmp_path: Path) -> None:
    result = experiment.run(tiny(compute__report=True), tmp_path / "run")
    text, _ = parse(tmp_path / "run" / "report.html")
    assert f"{100 * result.accuracy:.2f} %" in text


@pytest.mark.parametrize("error", [ValueError("oh"), MemoryError("no room"), KeyError("x")])
def test_no_run_fails_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(html, "write_report", fail)
    result = experiment.run(tiny(compute__report=True, rounds=2, method="dfl-lb"), tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").is_file()
    assert result.accuracy > 0
    assert capsys.readouterr().err.startswith("the run is complete, but its report could not be made: ")


def test_without_the_extra_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    experiment.run(tiny(compute__report=True, rounds=2, method="dfl-lb"), tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()


def test_too_many_figures_are_left_for_when_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(html, "_TOO_LONG", 10)
    html.at_the_end(folder)
    assert not (folder / "report.html").exists()
    assert f"semidfl report {folder}" in capsys.readouterr().err


# --- the command -----------------------------------------------------------------------------------------------------


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err


def test_the_command_says_where_it_wrote(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--out", str(tmp_path / "deep/er/mine.html")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path}/deep/er/mine.html\n"
    assert (tmp_path / "deep/er/mine.html").is_file()


def test_wrong_words_are_told_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: semidfl report RUN" in refusal(["report"], capsys)
    assert "usage: semidfl report RUN" in refusal(["report", str(folder), "--to", "x"], capsys)
    assert "there is no run folder nowhere" in refusal(["report", "nowhere"], capsys)
    assert "config.toml is missing" in refusal(["report", str(tmp_path)], capsys)
    (tmp_path / "file").touch()
    assert "is a file, not a run folder" in refusal(["report", str(tmp_path / "file")], capsys)
    where = str(tmp_path / "file" / "x.html")
    assert f"cannot write {where}" in refusal(["report", str(folder), "--out", where], capsys)
    assert "is a folder" in refusal(["report", str(folder), "--out", str(tmp_path)], capsys)


def test_no_permission(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)  # root may write anywhere
    error = refusal(["report", str(folder), "--out", str(tmp_path / "x.html")], capsys)
    assert "x.html: no permission to write there" in error
    assert error.endswith("(--out FILE)\n")


def test_images_of_no_known_class_count_as_held(tmp_path: Path) -> None:
    """As at a peer whose own images nobody has labelled."""
    folder = make_run(tmp_path / "own")
    known = json.loads((folder / "clients.json").read_text())
    known["unlabelled"] = [[0] * len(known["classes"])] * 10
    (folder / "clients.json").write_text(json.dumps(known | {"unknown": [7] * 10}))
    run = History(folder)
    run.refresh()
    drawn = holdings_figure(run)
    assert drawn is not None
    above, below = drawn.axes
    assert below.get_title().startswith("unlabelled, 70 samples; largest bubble 7")
    assert above.get_title().startswith(f"labelled, {sum(map(sum, known['labelled']))} samples")
    assert all(ax.get_yticklabels()[-1].get_text() == "unknown" for ax in drawn.axes)
