"""`semidfl reproduce`: the right runs, each once, whenever it is stopped; and the right numbers in every format."""

import contextlib
import csv
import io
import itertools
import json
import math
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from folders import save
from scipy import stats
from small import TINY

from semidfl import experiment, overall, reproduce, together
from semidfl.cli import main
from semidfl.commands.words import flags
from semidfl.config import Config, config_hash, from_toml, to_toml
from semidfl.data.sources import CATALOGUE
from semidfl.errors import RunFolderError
from semidfl.overall import Overall
from semidfl.record.folder import RunFolder
from semidfl.report.margins import margins
from semidfl.report.plans import KINDS, make_plan
from semidfl.reproduce import options_of

QUICK = [f"--{path}={value}" for path, value in TINY.items() if path not in ("name", "data.dataset", "data.ratio")]
QUICK += ["--classifier.iterations=30", "--pseudo.threshold=0.5"]  # enough to learn something: a dash shows no number
ONE_CELL = ["reproduce", "table-main", "--dataset=digits", "--ratio=50", "--alpha=100", "--seeds=2", *QUICK]
TWO_METHODS = [*ONE_CELL, "--method", "dfl-lb", "--method=semidfl"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["table-nothing"], [*KINDS]),
        (["table-main", "--method", "semidlf"], ["semidfl", "dfl-lb", "mixmatch", "did you mean 'semidfl'"]),
        (["table-main", "--ratio", "0"], ["data.ratio", "above 0 and at most 100"]),
        (["table-main", "--ratio", "5,x"], ["data.ratio", "'x'", "a number"]),
        (["table-main", "--alpha", "-1"], ["data.alpha", "above 0"]),
        (["table-main", "--seeds", "0"], ["--seeds", "from 1 to 1000"]),
        (["table-main", "--seeds", "two"], ["--seeds", "from 1 to 1000"]),
        (["table-main", "--rounds", "0"], ["rounds", "at least 1"]),
        (["table-main", "--recipe", "best"], ["paper, tuned"]),
        (["table-main", "--run", "maybe"], ["--run", "yes, no or missing"]),
        (["table-main", "--dataset", "minst"], ["mnist", "fashion-mnist", "cifar10", "digits", "did you mean"]),
        (["table-main", "--seed", "3"], ["--seeds"]),
        (["table-main", "--nothing", "3"], ["there is no field 'nothing'"]),
        (["table-main", "digits"], ["'digits' stands where"]),
        (["table-mixup", "--generator.kind", "gan"], ["sets generator.kind itself"]),
        (["table-topology", "--topology", "ring"], ["sets graph.topology itself"]),
        (["table-levers", "--generator.guidance", "3"], ["sets generator.guidance itself"]),
        (["table-levers", "--recipe", "paper"], ["takes no --recipe", "levers of tuned"]),
        (["table-levers", "--method", "dfl-lb"], ["takes no --method", "levers"]),
        (["table-mixup", "--method", "dfl-lb"], ["takes no --method"]),
        (["figure-partition", "--method", "dfl-lb"], ["takes no --method"]),
    ],
)
def test_bad_input_is_refused_with_the_legal_values(
    words: list[str], says: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["reproduce", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    for text in says:
        assert text in printed.err
    assert not any(tmp_path.iterdir())


def test_figures_without_matplotlib_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["reproduce", "figure-alpha", "--dataset=digits"]) == 2
    assert "pip install 'semidfl[report]'" in capsys.readouterr().err


def test_help_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in KINDS)


def test_an_out_that_is_a_file_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "results").write_text("mine")
    assert main(TWO_METHODS) == 2
    assert "not a folder" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# --- a real table -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two methods, two seeds, one cell each; and what was printed."""
    place, printed = tmp_path_factory.mktemp("reproduce"), io.StringIO()
    with contextlib.chdir(place), contextlib.redirect_stdout(printed):
        assert main(TWO_METHODS) == 0
    return place, printed.getvalue()


def expected(place: Path, method: str) -> tuple[float, float, float]:
    """Mean, std over clients and std over seeds of a method, in percent, from the metrics alone."""
    means, stds = [], []
    for folder in (place / "runs/reproduce").iterdir():
        config = from_toml((folder / "config.toml").read_text())
        if config.method == method:
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            clients = np.mean([r["accuracy"] for r in records if "accuracy" in r][-2:], axis=0) * 100
            means.append(float(np.mean(clients)))
            stds.append(float(np.std(clients)))
    assert len(means) == 2
    return sum(means) / 2, sum(stds) / 2, abs(means[0] - means[1]) / math.sqrt(2)


@pytest.mark.parametrize(("method", "name"), [("dfl-lb", "DFL-LB"), ("semidfl", "SemiDFL")])
def test_all_formats_hold_the_right_numbers(done: tuple[Path, str], method: str, name: str) -> None:
    place, _ = done
    mean, clients, seeds = expected(place, method)
    results = place / "results"
    (row,) = (r for r in csv.DictReader((results / "table-main-digits.csv").open()) if r["row"] == method)
    numbers = [float(row[key]) for key in ("mean", "std_over_clients", "std_over_seeds")]
    assert numbers == pytest.approx([mean, clients, seeds], abs=1e-4)
    assert (row["seeds"], row["dataset"], row["ratio"], row["alpha"], row["paper_mean"]) == (
        "2",
        "digits",
        "50.0",
        "100.0",
        "",
    )
    converged = mean >= 15
    assert converged or method == "dfl-lb"  # some number must be there to be looked at
    assert row["converged"] == str(converged).lower()
    shown = f"{mean:.2f} ± {clients:.2f} ± {seeds:.2f}" if converged else "-----"
    assert f"| {name} | 100 | {shown} |" in (results / "table-main-digits.md").read_text()
    tex = (results / "table-main-digits.tex").read_text()
    assert f"{name} & 100 & {shown.replace('±', '$' + chr(92) + 'pm$')} \\\\" in tex


def test_footer_tells_command_hardware_and_seconds(done: tuple[Path, str]) -> None:
    text = (done[0] / "results/table-main-digits.md").read_text()
    assert "`semidfl reproduce table-main --dataset=digits" in text
    assert "4 runs, " in text
    assert " s of training on cpu" in text
    assert "2 seeds" in text


def test_progress_counts_the_runs(done: tuple[Path, str]) -> None:
    first, *lines = done[1].splitlines()
    assert first.startswith("table-main: 4 runs, 0 of them done")
    assert any(line.startswith("run 2/4  semidfl ring digits r=50 a=100 seed 0  accuracy ") for line in lines)
    assert any("  left 0:" in line for line in lines)
    assert lines[-4:-1] == [f"written: results/table-main-digits.{suffix}" for suffix in ("md", "csv", "tex")]
    assert re.fullmatch(r"written: results/generated-[0-9a-f]{12}\.png", lines[-1])


def test_what_was_generated_last_is_kept_beside_the_table(done: tuple[Path, str]) -> None:
    """Of the first seed, and not of a method that generates nothing."""
    (picture,) = (done[0] / "results").glob("generated-*.png")
    folder = done[0] / "runs/reproduce" / picture.stem.removeprefix("generated-")
    config = from_toml((folder / "config.toml").read_text())
    assert (config.method, config.seed) == ("semidfl", 0)
    assert picture.read_bytes() == max((folder / "samples").glob("*.png")).read_bytes()


def test_finished_runs_keep_no_checkpoints(done: tuple[Path, str]) -> None:
    for folder in (done[0] / "runs/reproduce").iterdir():
        assert (folder / "summary.json").exists()
        assert not list(folder.glob("checkpoints/*"))
        assert list(folder.glob("models/*"))


def test_a_second_call_runs_nothing(done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(done[0])
    before = {path: path.stat().st_mtime_ns for path in (done[0] / "runs").rglob("*")}
    table = (done[0] / "results/table-main-digits.csv").read_text()
    monkeypatch.setattr(reproduce, "run_together", lambda *_, **__: pytest.fail("a finished run was started again"))
    assert main(TWO_METHODS) == 0
    assert {path: path.stat().st_mtime_ns for path in (done[0] / "runs").rglob("*")} == before
    assert (done[0] / "results/table-main-digits.csv").read_text() == table


def test_what_is_done_can_be_written_without_running_the_rest(
    done: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the summaries alone: runs may have been made elsewhere."""
    for summary in (done[0] / "runs/reproduce").glob("*/summary.json"):
        folder = tmp_path / "runs/reproduce" / summary.parent.name
        folder.mkdir(parents=True)
        (folder / "summary.json").write_bytes(summary.read_bytes())
    monkeypatch.setattr(reproduce, "run_together", lambda *_, **__: pytest.fail("a run was started"))
    assert main([*ONE_CELL, "--method=dfl-lb,semidfl,flexmatch", "--run=no"]) == 0
    text = (tmp_path / "results/table-main-digits.md").read_text()
    assert "**Not complete: 2 of 6 runs are still missing.**" in text
    assert "--method=dfl-lb,semidfl,flexmatch" in text
    assert "--run=no" not in text
    for name in ("DFL-LB", "SemiDFL"):
        whole = (done[0] / "results/table-main-digits.md").read_text().splitlines()
        (line,) = (x for x in whole if x.startswith(f"| {name} |"))
        assert line in text.splitlines()


def test_the_margin_over_other_methods_is_that_of_pairs(done: tuple[Path, str]) -> None:
    found: dict[str, list[float]] = {"dfl-lb": [], "semidfl": []}
    for path in sorted((done[0] / "runs/reproduce").glob("*/summary.json"), key=lambda p: config_of(p).seed):
        found[config_of(path).method] += json.loads(path.read_text())["per_client"]
    ours, theirs = (100 * np.array(found[name]) for name in ("semidfl", "dfl-lb"))
    p = stats.wilcoxon(ours - theirs).pvalue
    shown = f"{(ours - theirs).mean():+.2f} (" + ("p < 0.001" if p < 0.001 else f"p = {p:.3f}") + ")"
    text = (done[0] / "results/table-main-digits.md").read_text()
    assert f"| SemiDFL less | DFL-LB |\n| --- | ---: |\n| digits, r = 50 %, α = 100 | {shown} |" in text


def test_a_run_that_came_apart_is_no_margin(done: tuple[Path, str], tmp_path: Path) -> None:
    """Neither DFL-LB's first run nor SemiDFL's second has converged: the latter stays, it is ours to answer for."""
    left: dict[str, list[float]] = {"dfl-lb": [], "semidfl": []}
    for path in sorted((done[0] / "runs/reproduce").glob("*/summary.json"), key=lambda p: config_of(p).seed):
        config, summary = config_of(path), json.loads(path.read_text())
        folder = tmp_path / "runs/reproduce" / path.parent.name
        folder.mkdir(parents=True)
        if (config.method, config.seed) in (("dfl-lb", 0), ("semidfl", 1)):
            summary["accuracy"] = None
        (folder / "summary.json").write_text(json.dumps(summary))
        if config.seed == 1:
            left[config.method] += summary["per_client"]
    assert main([*ONE_CELL, "--method=dfl-lb,semidfl", "--run=no"]) == 0
    text = (tmp_path / "results/table-main-digits.md").read_text()
    assert "Runs of others that did not converge are left out." in text
    points = 100 * (np.mean(left["semidfl"]) - np.mean(left["dfl-lb"]))
    assert f"| digits, r = 50 %, α = 100 | {points:+.2f} (p" in text
    assert "Runs of others" not in (done[0] / "results/table-main-digits.md").read_text()


def config_of(summary: Path) -> Config:
    return from_toml((summary.parent / "config.toml").read_text())


def test_margins_are_corrected_for_their_number_and_need_both_methods() -> None:
    def runs(*means: float, step: float = 0.001) -> dict[int, dict[str, Any]]:
        return {seed: {"per_client": [mean + step * k for k in range(10)]} for seed, mean in enumerate(means)}

    done = {
        "a": {"other": runs(0.5, 0.6), "SemiDFL": runs(0.7, 0.9, 0.1, step=0.002)},  # the third seed has no partner
        "b": {"other": runs(0.5), "third": {}, "SemiDFL": runs(0.5)},
        "c": {"other": runs(0.5)},
        "d": {"other": {0: {"per_client": []}}, "SemiDFL": {0: {"per_client": []}}},  # nobody was tested
        "e": {"other": {0: {"per_client": [0.5]}}, "SemiDFL": runs(0.5)},  # other clients
    }
    first, second = margins(done, "SemiDFL")
    assert (first.setting, first.other, first.seeds) == ("a", "other", 2)
    assert first.points == pytest.approx(25.45)
    pairs = [20 + 0.1 * k for k in range(10)] + [30 + 0.1 * k for k in range(10)]
    assert first.p == pytest.approx(2 * stats.wilcoxon(pairs).pvalue)  # of two comparisons this is the clearest
    assert (second.setting, second.points, second.p) == ("b", pytest.approx(0), 1.0)


def test_a_lever_is_compared_with_the_whole_recipe() -> None:
    """Of runs made elsewhere; the third row has one seed only, which is compared with nothing."""
    words = ["table-levers", "--dataset", "digits", "--ratio", "5", "--seeds", "2"]
    cells = make_plan(words[0], options_of(flags(words[1:]))).cells[:3]
    done = zip([0.9, 0.8, 0.7, 0.75, 0.6], [c for cell in cells for c in cell.configs], strict=False)
    versions = {"versions": {"torch": "1"}, "device": "none", "seconds": 1.0, "std_over_clients": 0.0}
    summaries = [versions | {"config": config_hash(config), "accuracy": accuracy} for accuracy, config in done]
    Path("results").mkdir()
    Path("results/runs.jsonl").write_text("".join(json.dumps(s) + "\n" for s in summaries))
    assert main(["reproduce", *words, "--run", "no"]) == 0
    rows = list(csv.DictReader(io.StringIO(Path("results/table-levers-digits.csv").read_text())))
    assert [(r["mean"][:4], r["difference"][:5]) for r in rows[:3]] == [("85.0", ""), ("72.5", "-12.5"), ("60.0", "")]
    assert "72.50 ± 0.00 ± 3.54<br>-12.50" in Path("results/table-levers-digits.md").read_text()


# --- stopped ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that are begun anew (not resumed), as they begin."""
    names: list[str] = []

    def run(configs: Sequence[Config], folders: Sequence[Path], *args: Any) -> list[experiment.Result]:
        anew = [config for config, folder in zip(configs, folders, strict=True) if not together.resumable(folder)]
        names.extend(f"{config.method} {config.seed}" for config in anew)
        return together.run_together(configs, folders, *args)

    monkeypatch.setattr(reproduce, "run_together", run)
    return names


def test_stopped_between_rounds_it_goes_on_and_ends_the_same(
    done: tuple[Path, str],
    started: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tick = overall.Overall.tick

    def interrupt(self: Overall, progress: Any) -> None:
        tick(self, progress)
        if self.todo[0].method == "semidfl" and progress.done == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(overall.Overall, "tick", interrupt)
        assert main(TWO_METHODS) == 130
    said = capsys.readouterr().err
    assert "3 of 4 runs are not done" in said
    assert "go on with: semidfl reproduce table-main --dataset=digits" in said
    partial = (tmp_path / "results/table-main-digits.md").read_text()
    assert "Not complete: 3 of 4 runs are still missing" in partial
    assert "| SemiDFL | 100 | not run |" in partial
    assert started == ["dfl-lb 0", "semidfl 0"]
    assert main(TWO_METHODS) == 0
    # The half-done run was resumed, not begun anew; the finished one was left alone.
    assert started == ["dfl-lb 0", "semidfl 0", "dfl-lb 1", "semidfl 1"]
    mine, whole = (
        [row | {"seconds": ""} for row in csv.DictReader((place / "results/table-main-digits.csv").open())]
        for place in (tmp_path, done[0])
    )
    assert mine == whole


def test_killed_in_the_second_run_it_repeats_only_that(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*ONE_CELL, "--method=dfl-lb", "--seeds=3", "--rounds=2"]
    real = experiment.prepare

    def fail(config: Config, *args: Any) -> Any:
        if config.seed == 1:
            raise MemoryError
        return real(config, *args)

    with monkeypatch.context() as patch:
        patch.setattr(together, "prepare", fail)
        with pytest.raises(MemoryError):
            main(words)
    (kept,) = (tmp_path / "runs/reproduce").glob("*/summary.json")
    written = kept.stat().st_mtime_ns
    assert main(words) == 0
    assert started == ["dfl-lb 0", "dfl-lb 1", "dfl-lb 1", "dfl-lb 2"]
    assert kept.stat().st_mtime_ns == written


def test_a_run_without_a_checkpoint_begins_anew(started: list[str], tmp_path: Path) -> None:
    words = [*ONE_CELL, "--method=dfl-lb", "--seeds=1", "--rounds=2"]
    config = next(iter(make_plan("table-main", options_of(w[2:].split("=") for w in words[2:])).runs().values()))
    RunFolder.create(tmp_path / "runs/reproduce" / config_hash(config), to_toml(config)).close()
    assert main(words) == 0
    assert started == ["dfl-lb 0"]


def test_a_table_can_be_made_from_the_kept_summaries_alone(
    done: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "run_together", lambda *_, **__: pytest.fail("a run was started"))
    (tmp_path / "results").mkdir()
    kept = (done[0] / "results/runs.jsonl").read_text()
    (tmp_path / "results/runs.jsonl").write_text(kept)
    for which in ("no", "missing"):
        assert main([*TWO_METHODS, "--run", which]) == 0
        for suffix in (".csv", ".md", ".tex"):
            ours, first = (x / f"results/table-main-digits{suffix}" for x in (tmp_path, done[0]))
            assert ours.read_text() == first.read_text()
    assert (tmp_path / "results/runs.jsonl").read_text() == kept
    assert len(kept.splitlines()) == 4


def test_the_command_under_a_table_makes_it() -> None:
    """Without where summaries from elsewhere came from, and with blanks as they were quoted."""
    given = "semidfl reproduce table-main --kept 'a b/runs.jsonl' --out 'c d' --run=missing --runs e --rounds 7"
    assert reproduce._making(given) == "semidfl reproduce table-main --out 'c d' --runs e --rounds 7"


def test_a_table_is_not_overwritten_by_one_without_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/table-main-digits.md").write_text("a table")
    assert main([*ONE_CELL, "--run=no"]) == 2
    assert "has a run of this table" in capsys.readouterr().err
    assert (tmp_path / "results/table-main-digits.md").read_text() == "a table"


def test_only_what_nobody_has_run_is_run_where_that_is_asked_for(started: list[str], tmp_path: Path) -> None:
    words = [*ONE_CELL, "--method=dfl-lb", "--rounds=2"]
    assert main([*words, "--seeds=1"]) == 0
    shutil.rmtree(tmp_path / "runs")  # as on another machine
    assert main([*words, "--seeds=2", "--run=missing"]) == 0
    assert started == ["dfl-lb 0", "dfl-lb 1"]
    shutil.rmtree(tmp_path / "runs")
    assert main([*words, "--seeds=2"]) == 0  # to reproduce is to run
    assert started[2:] == ["dfl-lb 0", "dfl-lb 1"]


def test_what_another_process_has_done_meanwhile_is_not_done_again(
    started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ONE_CELL, "--method=dfl-lb", "--rounds=2"]
    ours = reproduce.run_together

    def with_company(configs: Sequence[Config], folders: Sequence[Path], progress: Any) -> Any:
        """While the first run trains, somebody else does it and the second."""
        monkeypatch.setattr(reproduce, "run_together", ours)
        assert main([*words, "--seeds=2"]) == 0
        capsys.readouterr()
        return [reproduce_result(folder) for folder in folders]

    def reproduce_result(folder: Path) -> Any:
        return SimpleNamespace(summary=reproduce.finished(folder))

    monkeypatch.setattr(reproduce, "run_together", with_company)
    assert main([*words, "--seeds=3"]) == 0
    assert started == ["dfl-lb 0", "dfl-lb 1", "dfl-lb 2"]
    assert re.findall(r"run (\d/3).* seed (\d)  accuracy", capsys.readouterr().out) == [("1/3", "0"), ("3/3", "2")]


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "as a stack"])
def test_a_run_that_another_process_is_at_is_left_to_it(
    stacked: bool,
    started: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same command on several GPUs: each does what the others do not."""
    words = [*ONE_CELL, "--method=dfl-lb", "--rounds=2", "--seeds=3"]
    monkeypatch.setattr(reproduce, "at_once", lambda config, device="": 3 if stacked else 1)
    plan = make_plan("table-main", options_of([word.removeprefix("--").split("=", 1) for word in words[2:]]))
    keys = list(plan.runs())
    with RunFolder.create(tmp_path / "runs/reproduce" / keys[1], ""):
        assert main(words) == 0
    printed = capsys.readouterr().out
    ended = [reproduce.finished(tmp_path / "runs/reproduce" / key) is not None for key in keys]
    assert ended == [True, False, True]
    assert "\n1 of 3 runs are left to another process, which will put them into the table\n" in printed
    assert "1 of 3 runs are still missing" in (tmp_path / "results/table-main-digits.md").read_text()
    started.clear()
    assert main(words) == 0
    assert started == ["dfl-lb 1"]
    assert "another process" not in capsys.readouterr().out
    assert "missing" not in (tmp_path / "results/table-main-digits.md").read_text()


@pytest.mark.parametrize("line", ["{", "[]", "3", "{}", '{"accuracy": 1}'])
def test_a_damaged_line_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/runs.jsonl").write_text(f'{{"config": "a"}}\n{line}\n')
    assert main([*ONE_CELL, "--run=no"]) == 2
    assert "line 2 of results/runs.jsonl is damaged" in capsys.readouterr().err


def test_a_folder_with_another_run_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"config": "another"}')
    with pytest.raises(RunFolderError, match="another config"):
        reproduce.finished(tmp_path)
    (tmp_path / "summary.json").write_text("[1")
    with pytest.raises(RunFolderError, match="remove it"):
        reproduce.finished(tmp_path)


# --- figures without runs ---------------------------------------------------------------------------------------------


def test_drawings_are_written(tmp_path: Path) -> None:
    assert main(["reproduce", "figure-topologies"]) == 0
    assert main(["reproduce", "figure-partition", "--dataset=digits", "--ratio=5", "--alpha=100,0.1"]) == 0
    names = {
        f"{stem}.{kind}" for stem in ("figure-topologies", "figure-partition-digits-r5") for kind in ("svg", "png")
    }
    assert {path.name for path in (tmp_path / "results").iterdir()} == names


def test_catalogue_and_plans_know_the_same_data_sets() -> None:
    assert {dataset for kind in KINDS.values() for dataset in kind.datasets} <= set(CATALOGUE)


def test_a_folder_of_sites_gives_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are found again under their hash, roles of the sites included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    for site, k in itertools.product("abc", range(8)):
        save(tmp_path / "sites" / site / str(k % 2) / f"{k}.png", np.full((8, 8), 9 * k, np.uint8))
    words = ["reproduce", "table-main", "--dataset=sites", "--method=dfl-lb", "--seeds=1", "--rounds=1"]
    words += ["--clients=3", "--ratio=50", "--alpha=100"]
    assert main([*words, "--graph.topology=full"]) == 0
    text = (tmp_path / "results" / "table-main-sites.md").read_text()
    assert "1 runs" in text
    assert "not run" not in text
    assert from_toml(next((tmp_path / "runs/reproduce").glob("*/config.toml")).read_text()).graph.roles == "LLL"
