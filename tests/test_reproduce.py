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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from folders import save
from scipy import stats
from small import TINY, tiny

from semidfl import experiment, overall, recipes, reproduce, together
from semidfl.cli import main
from semidfl.commands.words import flags
from semidfl.config import Config, config_hash, from_toml, override, to_toml
from semidfl.data.sources import CATALOGUE
from semidfl.errors import RunFolderError
from semidfl.overall import Forecast, Overall, describe
from semidfl.record.folder import RunFolder
from semidfl.report.levers import levers
from semidfl.report.margins import margins
from semidfl.report.plans import KINDS, Options, Plan, make_plan
from semidfl.reproduce import options_of

QUICK = [f"--{path}={value}" for path, value in TINY.items() if path not in ("name", "data.dataset", "data.ratio")]
QUICK += ["--classifier.iterations=30", "--pseudo.threshold=0.5"]  # enough to learn something: a dash shows no number
ONE_CELL = ["reproduce", "table-main", "--dataset=digits", "--ratio=50", "--alpha=100", "--seeds=2", *QUICK]
TWO_METHODS = [*ONE_CELL, "--method", "dfl-lb", "--method=semidfl"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan_of(name: str, **options: Any) -> Plan:
    return make_plan(name, Options(**options))


# --- plans ------------------------------------------------------------------------------------------------------------


def test_main_table_has_every_cell_and_the_upper_bound_once_an_alpha() -> None:
    plan = plan_of("table-main")
    assert len(plan.cells) == 6 * 2 * 6
    # DFL-UB: 3 data sets, 2 alphas; the others: 6 columns, 2 alphas; all with 3 seeds.
    assert len(plan.runs()) == 3 * (3 * 2 + 5 * 6 * 2)
    (cell,) = (c for c in plan.cells if (c.what, c.dataset, c.ratio, c.alpha) == ("flexmatch", "cifar10", 1, 0.1))
    assert cell.row == ("FlexMatch", "0.1")
    assert cell.column == "CIFAR-10, r = 1 %"
    assert [c.seed for c in cell.configs] == [0, 1, 2]
    expected = recipes.paper("cifar10", 1.0, 0.1, "fig1", "flexmatch", seed=1)
    assert config_hash(cell.configs[1]) == config_hash(expected)
    upper = [c for c in plan.cells if c.what == "dfl-ub" and c.dataset == "mnist" and c.alpha == 100]
    assert [c.ratio for c in upper] == [0.5, 0.1]
    assert upper[0].configs == upper[1].configs


def test_digits_have_their_own_ratios() -> None:
    plan = plan_of("table-main", datasets=("digits",), seeds=2)
    assert {(c.ratio, c.alpha) for c in plan.cells} == {(5, 100), (2, 100), (5, 0.1), (2, 0.1)}
    assert len(plan.cells) == 24
    assert len(plan.runs()) == 44


def test_first_seeds_of_all_cells_come_first() -> None:
    seeds = [config.seed for config in plan_of("table-main", datasets=("digits",)).runs().values()]
    assert seeds == sorted(seeds)


def test_topology_table_gives_each_data_set_its_graph() -> None:
    plan = plan_of("table-topology", seeds=1)
    graphs = {(c.dataset, c.configs[0].graph.topology) for c in plan.cells}
    assert graphs == {("mnist", "topology1"), ("fashion-mnist", "topology2"), ("cifar10", "topology3")}
    digits = plan_of("table-topology", datasets=("digits",), seeds=1)
    assert len(digits.cells) == 3 * 24
    assert {c.configs[0].graph.topology for c in digits.cells} == {"topology1", "topology2", "topology3"}


@pytest.mark.parametrize(
    ("name", "dataset", "path", "values"),
    [
        ("table-pseudo-labels", "cifar10", "pseudo.kind", ["vanilla", "apl", "npl"]),
        ("table-mixup", "mnist", "generator.kind", ["none", "gan", "diffusion"]),
        ("table-aggregation", "fashion-mnist", "aggregation.weights", ["constant", "adatest", "adagen"]),
    ],
)
def test_ablations_differ_in_one_switch(name: str, dataset: str, path: str, values: list[str]) -> None:
    plan = plan_of(name, seeds=1)
    assert len(plan.cells) == 4 * 3
    assert {c.dataset for c in plan.cells} == {dataset}
    for start in range(0, 12, 3):
        three = plan.cells[start : start + 3]
        assert [c.what for c in three] == values
        plain = recipes.paper(dataset, three[0].ratio, three[0].alpha)
        assert [config_hash(c.configs[0]) for c in three] == [config_hash(override(plain, {path: v})) for v in values]
    # Ours, the last, is a cell of the main table too: the run is shared.
    main_runs = plan_of("table-main", datasets=(dataset,), seeds=1).runs()
    assert {config_hash(c.configs[0]) for c in plan.cells if c.what == values[-1]} <= set(main_runs)


def test_figures_have_the_papers_grids() -> None:
    alpha, ratio = plan_of("figure-alpha", seeds=1), plan_of("figure-ratio", seeds=1)
    assert {(c.dataset, c.ratio) for c in alpha.cells} == {("fashion-mnist", 0.5), ("cifar10", 5)}
    assert {c.alpha for c in alpha.cells} == {100, 10, 1, 0.1, 0.01}
    assert {c.alpha for c in ratio.cells} == {100}
    assert [c.ratio for c in ratio.cells if c.what == "semidfl" and c.dataset == "cifar10"] == [5, 4, 3, 2, 1]
    assert {c.ratio for c in ratio.cells if c.dataset == "fashion-mnist"} == {0.5, 0.4, 0.3, 0.2, 0.1}


def test_overrides_reach_every_run() -> None:
    plan = plan_of("table-mixup", datasets=("digits",), values={"rounds": "7", "classifier.lr": "0.1"})
    assert {(c.rounds, c.classifier.lr) for c in plan.runs().values()} == {(7, 0.1)}


def test_lists_may_be_repeated_or_parted_by_commas() -> None:
    pairs = [("dataset", "digits,mnist"), ("dataset", "digits"), ("data.ratio", "5"), ("ratio", "2"), ("rounds", "9")]
    options = options_of([*pairs, ("seeds", "4"), ("out", "there")])
    assert options.datasets == ("digits", "mnist")
    assert options.ratios == (5.0, 2.0)
    assert (options.seeds, options.values, options.out) == (4, {"rounds": "9"}, Path("there"))


def test_the_recipe_is_the_one_asked_for() -> None:
    for name in ("paper", "tuned"):
        runs = plan_of("table-main", recipe=name, datasets=("digits",), seeds=1).runs().values()
        assert {c.name.split("-")[0] for c in runs} == {name}
        assert {c.variant for c in runs} == {name}


def test_levers_are_taken_back_one_by_one() -> None:
    cells = plan_of("table-levers", datasets=("mnist",), ratios=(0.1,), seeds=2).cells
    whole, *others = cells
    assert whole.configs == tuple(recipes.tuned("mnist", 0.1, 0.1, seed=seed) for seed in range(2))
    for cell in others:
        back = dict(levers("mnist"))[cell.what]
        for ours, config in zip(whole.configs, cell.configs, strict=True):
            assert config == override(replace(ours, name=config.name), back)
            assert config.name.startswith(f"{ours.name}-without-")
    assert len({c.configs[0].name for c in cells}) == len(cells)


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
    assert lines[-3:] == [f"written: results/table-main-digits.{suffix}" for suffix in ("md", "csv", "tex")]


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


@pytest.mark.parametrize(("dataset", "device", "sizes"), [("mnist", "cuda", [6, 12]), ("mnist", "cpu", [1] * 18)])
def test_on_a_gpu_small_networks_train_as_one(dataset: str, device: str, sizes: list[int], tmp_path: Path) -> None:
    plan = plan_of("table-main", datasets=(dataset,), methods=("dfl-ub", "dfl-lb"))
    groups = reproduce.groups_of(list(plan.runs().values()), tmp_path, device)
    assert sorted(map(len, groups)) == sizes


def test_a_resnet_fills_a_gpu_by_itself(tmp_path: Path) -> None:
    plan = plan_of("table-main", datasets=("cifar10",), methods=("dfl-lb",))
    groups = reproduce.groups_of(list(plan.runs().values()), tmp_path, "cuda")
    assert [len(group) for group in groups] == [1] * 12


# --- time left --------------------------------------------------------------------------------------------------------


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
