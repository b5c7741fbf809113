"""Published numbers, tables, statistics and `semidfl compare`."""

import csv
import io
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import tiny
from test_figures import check_figure

from semidfl.cli import main
from semidfl.config import to_toml
from semidfl.errors import SemiDFLError
from semidfl.report import compare as comparing
from semidfl.report.extras import need
from semidfl.report.published import PUBLISHED, published
from semidfl.report.stats import bootstrap, holm, wilcoxon
from semidfl.report.tables import Entry, Score, Table, csv_text, latex, markdown, score

# --- the paper's numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "number"),
    [
        (("table-main", "dfl-ub", "mnist", 0.1, 0.1), (94.27, 0.76)),
        (("table-main", "dfl-lb", "cifar10", 5, 0.1), (16.96, 0.27)),
        (("table-main", "mixmatch", "mnist", 0.1, 100), (61.13, 18.27)),
        (("table-main", "flexmatch", "fashion-mnist", 0.1, 0.1), (40.03, 4.05)),
        (("table-main", "cbafed", "cifar10", 1, 0.1), (21.50, 0.89)),
        (("table-main", "semidfl", "mnist", 0.1, 100), (90.88, 0.07)),
        (("table-main", "dfl-lb", "fashion-mnist", 0.1, 0.1), None),
        (("table-main", "dfl-lb", "cifar10", 1, 0.1), None),
        (("table-main", "flexmatch", "cifar10", 1, 0.1), None),
        (("table-main", "cbafed", "fashion-mnist", 0.1, 0.1), None),
        (("table-topology", "dfl-ub", "fashion-mnist", 0.5, 0.1), (59.49, 4.91)),
        (("table-topology", "dfl-lb", "fashion-mnist", 0.1, 0.1), (52.12, 2.14)),
        (("table-topology", "flexmatch", "fashion-mnist", 0.5, 0.1), (37.57, 10.07)),
        (("table-topology", "semidfl", "cifar10", 1, 100), (52.54, 0.51)),
        (("table-pseudo-labels", "vanilla", "cifar10", 5, 100), (40.51, 13.74)),
        (("table-pseudo-labels", "apl", "cifar10", 1, 0.1), (30.89, 1.03)),
        (("table-mixup", "none", "mnist", 0.5, 0.1), (70.75, 9.39)),
        (("table-mixup", "gan", "mnist", 0.1, 100), (90.29, 0.10)),
        (("table-aggregation", "constant", "fashion-mnist", 0.1, 100), (56.12, 0.11)),
        (("table-aggregation", "adatest", "fashion-mnist", 0.1, 0.1), (51.38, 0.64)),
        (("figure-alpha", "cbafed", "cifar10", 5, 0.1), (31.93, 1.13)),
    ],
)
def test_published_numbers_are_those_of_the_tex(
    key: tuple[str, str, str, float, float], number: tuple[float, float] | None
) -> None:
    assert published(*key) == (number,)


def test_published_tables_are_whole() -> None:
    sizes = {table: sum(key[0] == table for key in PUBLISHED) for table in {key[0] for key in PUBLISHED}}
    ablations = dict.fromkeys(("table-pseudo-labels", "table-mixup", "table-aggregation"), 12)
    assert sizes == {"table-main": 72, "table-topology": 72, "figure-alpha": 72, "figure-ratio": 72} | ablations
    dashes = [key for key, number in PUBLISHED.items() if number is None and key[0] == "table-main"]
    assert len(dashes) == 4
    assert published("table-main", "semidfl", "digits", 5, 100) == ()


def test_ablations_end_in_the_main_tables_numbers() -> None:
    ours = {"table-pseudo-labels": "npl", "table-mixup": "diffusion", "table-aggregation": "adagen"}
    for (table, switch, *place), number in PUBLISHED.items():
        if ours.get(table) == switch:
            assert published("table-main", "semidfl", *place) == (number,)  # type: ignore[arg-type]


# --- tables -----------------------------------------------------------------------------------------------------------


def runs(*accuracies: float) -> list[dict[str, float]]:
    return [{"accuracy": a, "std_over_clients": 0.01 * (k + 1)} for k, a in enumerate(accuracies)]


def test_score_is_in_percent_over_clients_and_seeds() -> None:
    found = score(runs(0.5, 0.7), classes=10)
    assert found is not None
    assert (found.mean, found.over_clients, found.seeds, found.converged) == (pytest.approx(60), 1.5, 2, True)
    assert found.over_seeds == pytest.approx(20 / math.sqrt(2))
    assert math.isnan(score(runs(0.5), 10).over_seeds)  # type: ignore[union-attr]
    assert score([], 10) is None


@pytest.mark.parametrize(("accuracy", "classes", "converged"), [(0.149, 10, False), (0.151, 10, True), (0.7, 2, False)])
def test_under_one_and_a_half_times_chance_has_not_converged(accuracy: float, classes: int, converged: bool) -> None:
    assert score(runs(accuracy), classes).converged is converged  # type: ignore[union-attr]


def test_seeds_that_did_not_converge_are_told_apart() -> None:
    found = score(runs(0.9, 0.098, 0.8), 10)
    assert found is not None
    assert (found.mean, found.lost, found.others) == (pytest.approx(59.9333, abs=1e-3), 1, pytest.approx(85))
    table = Table("t", ("method", "α"), (entry("one", "c", found, ()),))
    assert "59.93 ± 2.00 ± 43.70<br>1 of 3 seeds -----, else 85.00" in markdown(table)
    (row,) = csv.DictReader(io.StringIO(csv_text(table)))
    assert row["by_seed"] == "90.00 9.80 80.00"


def entry(row: str, column: str, ours: Score | None, paper: tuple[Any, ...]) -> Entry:
    return Entry((row, "0.1"), column, {"row": row, "dataset": column}, ours, paper)


TABLE = Table(
    "A table & more",
    ("method", "α"),
    (
        entry("one", "r = 5 %", Score(50.126, 1.0, 2.0, 2, True), ((52.0, 0.5),)),
        entry("one", "r = 1 %", Score(12.0, 1.0, 2.0, 2, False), (None,)),
        entry("two", "r = 5 %", Score(50.0, 1.0, math.nan, 1, True), ()),
        entry("two", "r = 1 %", None, ((30.0, 0.5),)),
    ),
    ("A note.",),
)


def test_markdown_shows_ours_the_papers_and_the_difference() -> None:
    assert markdown(TABLE).splitlines()[2:] == [
        "| method | α | r = 5 % | r = 1 % |",
        "| --- | --- | ---: | ---: |",
        "| one | 0.1 | 50.13 ± 1.00 ± 2.00<br>paper 52.00 ± 0.50<br>-1.87 | -----<br>paper ----- |",
        "| two | 0.1 | 50.00 ± 1.00 | not run<br>paper 30.00 ± 0.50 |",
        "",
        "A note.",
    ]


def test_csv_leaves_empty_what_is_not_known() -> None:
    one, dash, alone, missing = csv.DictReader(io.StringIO(csv_text(TABLE)))
    assert float(one["difference"]) == pytest.approx(-1.874)
    assert (one["paper_mean"], one["paper_std"], one["paper_converged"]) == ("52.0", "0.5", "true")
    assert (dash["mean"], dash["converged"], dash["paper_mean"]) == ("12.000000", "false", "")
    assert (dash["paper_converged"], dash["difference"]) == ("false", "")
    assert (alone["std_over_seeds"], alone["paper_converged"]) == ("", "")
    assert (missing["mean"], missing["paper_mean"]) == ("", "30.0")


def test_latex_is_escaped_and_balanced() -> None:
    text = latex(TABLE)
    assert r"\caption{A table \& more}" in text
    assert r"method & $\alpha$ & r = 5 \% & r = 1 \% \\" in text
    assert r"\shortstack[r]{50.13 $\pm$ 1.00 $\pm$ 2.00\\paper 52.00 $\pm$ 0.50\\$-$1.87}" in text
    assert r"two & 0.1 & 50.00 $\pm$ 1.00 & \shortstack" in text
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert sum(line.count("{") - line.count("}") for line in body) == 0
    assert [line.count(" & ") for line in body if line.endswith(r"\\")] == [3, 3, 3]
    assert text.isascii()


# --- statistics -------------------------------------------------------------------------------------------------------


def plain_wilcoxon(differences: list[float]) -> float:
    """The exact test by its definition: every choice of signs is as likely."""
    sizes = sorted(abs(d) for d in differences)
    ranks = [sizes.index(abs(d)) + 1 for d in differences]
    total = sum(ranks)

    def statistic(signs: list[bool]) -> int:
        up = sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        return min(up, total - up)

    seen = statistic([d > 0 for d in differences])
    choices = [statistic(list(signs)) for signs in itertools.product([True, False], repeat=len(ranks))]
    return sum(s <= seen for s in choices) / len(choices)


def test_wilcoxon_is_the_exact_test_on_few_pairs() -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        one, two = random.normal(size=8), random.normal(0.5, size=8)
        assert wilcoxon(one, two) == pytest.approx(plain_wilcoxon(list(one - two)))


def test_wilcoxon_is_scipys_also_with_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(1)
    one, two = random.integers(0, 9, 40).astype(float), random.integers(2, 11, 40).astype(float)
    assert wilcoxon(one, two) == pytest.approx(stats.wilcoxon(one, two).pvalue)
    assert wilcoxon(one, one) == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_bootstrap_is_the_plain_loop() -> None:
    values = np.random.default_rng(2).normal(70, 5, 20)
    random, means = np.random.default_rng(0), []
    for _ in range(2000):
        means.append(float(np.mean([values[k] for k in random.integers(20, size=20)])))
    assert bootstrap(values, resamples=2000) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def test_bootstrap_is_scipys_up_to_chance() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).normal(70, 5, 30)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=0).confidence_interval
    assert bootstrap(values) == pytest.approx((theirs.low, theirs.high), abs=0.15)


def test_bootstrap_draws_the_same_in_small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).normal(size=10)
    whole = bootstrap(values, resamples=100)
    monkeypatch.setattr("semidfl.report.stats._CHUNK", 30)
    assert bootstrap(values, resamples=100) == whole


# --- compare ----------------------------------------------------------------------------------------------------------


def run_folder(place: Path, name: str, clients: list[float], **fields: Any) -> str:
    """A finished run with these accuracies, without running it."""
    folder = place / name
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(tiny(**fields)))
    summary = {"per_client": clients, "rounds": 4, "seconds": 10.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    records = [{"round": t, "accuracy": [a * t / 4 for a in clients]} for t in (2, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two methods, two seeds, four clients."""
    random = np.random.default_rng(5)
    return [
        run_folder(tmp_path, f"{method}-{seed}", list(random.uniform(low, low + 0.2, 4)), method=method, seed=seed)
        for method, low in (("dfl-lb", 0.3), ("semidfl", 0.45))
        for seed in (0, 1)
    ]


def accuracies(folder: str) -> list[float]:
    return [100 * a for a in json.loads((Path(folder) / "summary.json").read_text())["per_client"]]


def test_compare_pairs_clients_and_seeds(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # In another order, and one more seed of one group only: pairs stay pairs.
    extra = run_folder(Path(folders[0]).parent, "extra", [0.9] * 4, method="semidfl", seed=7)
    assert main(["compare", folders[0], folders[3], folders[2], extra, folders[1], "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lower, upper = [accuracies(folder) for folder in folders[:2]], [accuracies(folder) for folder in folders[2:]]
    first, second = np.concatenate(lower), np.concatenate(upper)
    (pair,) = found["pairs"]
    assert (pair["first"], pair["second"], pair["pairs"], pair["seeds"]) == ("dfl-lb", "semidfl", 8, [0, 1])
    assert pair["difference"] == pytest.approx((second - first).mean())
    assert pair["p"] == pair["p_holm"] == pytest.approx(plain_wilcoxon(list(second - first)))
    assert (pair["low"], pair["high"]) == pytest.approx(bootstrap(second - first))
    row, other = found["groups"]
    assert row["seeds"] == [0, 1]
    assert other["seeds"] == [0, 1, 7]
    assert row["mean"] == pytest.approx(first.mean())
    assert row["std_over_clients"] == pytest.approx(np.mean([np.std(x) for x in lower]))
    assert row["std_over_seeds"] == pytest.approx(np.std([np.mean(x) for x in lower], ddof=1))
    assert (row["rounds"], row["seconds"], other["seconds"]) == (4, 20, 30)


def test_compare_prints_a_table_and_draws_curves(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *folders, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("runs")
    assert lines[1].startswith("dfl-lb")
    assert lines[5].startswith("semidfl − dfl-lb")
    assert len({len(line) for line in lines[:3]}) == 1
    assert printed.err.count("written: ") == 2
    check_figure(tmp_path / "out/compare")


def test_groups_are_named_by_what_differs(tmp_path: Path) -> None:
    names = [
        run_folder(tmp_path, f"{k}", [0.5] * 4, method=method, data__ratio=ratio)
        for k, (method, ratio) in enumerate([("dfl-lb", 5), ("semidfl", 5), ("semidfl", 2.5)])
    ]
    labels = [group.label for group in comparing.gather(names)]
    assert labels == ["dfl-lb, ratio = 5", "semidfl, ratio = 5", "semidfl, ratio = 2.5"]
    three = comparing.compare(comparing.gather(names))
    assert len(three.pairs) == 3
    assert all(pair.p == 1.0 for pair in three.pairs)  # no difference anywhere


def test_groups_that_differ_in_much_have_names_of_their_own(tmp_path: Path) -> None:
    same = {"method": "dfl-lb", "rounds": 9, "data__alpha": 3, "data__ratio": 4}
    names = [run_folder(tmp_path, "a", [0.5] * 4)]
    names += [run_folder(tmp_path, f"b{lr}", [0.5] * 4, **same, classifier__lr=lr) for lr in (0.1, 0.2)]
    labels = [group.label for group in comparing.gather(names)]
    assert len(set(labels)) == 3


def test_compare_names_what_tells_groups_apart(tmp_path: Path) -> None:
    made = [
        run_folder(
            tmp_path,
            f"{alpha}-{last}",
            [0.1, 0.2, 0.3, 0.4],
            data__alpha=alpha,
            data__ratio=5 * alpha,
            classifier__lr=0.1 * alpha,
            augment__strong=0.1 * alpha,
            mixup__beta=last,
        )
        for alpha in (1.0, 2.0)
        for last in (0.5, 0.6)
    ]
    labels = [group.label for group in comparing.gather(made)]
    assert len(set(labels)) == 4
    for label in labels:
        assert label.count(",") == 3, label  # three fields that all share, and the one without which they are alike
        assert "[" not in label, label


def test_compare_refuses_what_it_cannot_compare(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = run_folder(tmp_path, "unfinished", [0.5] * 4, rounds=9)
    (Path(unfinished) / "summary.json").unlink()
    wide = run_folder(tmp_path, "wide", [0.5] * 5, graph__clients=5, graph__roles="LMUUU")
    other_seed = run_folder(tmp_path, "other-seed", [0.5] * 4, rounds=9, seed=5)
    for words, says in (
        (folders[:1], "at least 2 configs"),
        (folders[:2], "at least 2 configs"),
        ([folders[0], folders[0], folders[2]], "the same run: give it once"),
        ([folders[0], unfinished], f"not finished: semidfl resume {unfinished}"),
        ([folders[0], str(tmp_path / "nowhere")], "is not a run folder"),
        ([folders[0], wide], "has 4 clients"),
        ([folders[0], other_seed], "no seed in common"),
        ([folders[0], folders[2], "--format", "xml"], "usage: semidfl compare"),
        ([], "usage: semidfl compare"),
    ):
        assert main(["compare", *words]) == 2
        printed = capsys.readouterr()
        assert says in printed.err
        assert printed.out == ""


# --- extras ---------------------------------------------------------------------------------------------------------


def test_missing_extras_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(SemiDFLError, match=r"pip install 'semidfl\[report\]'"):
        need("scipy")


def test_extras_are_not_imported_with_the_package() -> None:
    modules = "semidfl.cli, semidfl.reproduce, semidfl.report.compare, semidfl.report.drawings"
    code = f"import sys, {modules}; sys.exit(any(m in sys.modules for m in ('matplotlib', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_command_line_answers_without_torch() -> None:
    code = "import sys, semidfl.cli as c; c.main(['version']); c.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, stdout=subprocess.DEVNULL).returncode == 0
