"""The page's charts and sentences, without a browser: they show the numbers of the run, at any size."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_up import make_run

from semidfl.config import override
from semidfl.record.folder import RunFolder, read_records
from semidfl.record.history import History
from semidfl.web import charts, words
from semidfl.web.library import Library
from semidfl.web.look import DARK, LIGHT, Look
from semidfl.web.network import network


def read(folder: Path) -> History:
    history = History(folder)
    history.refresh()
    return history


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> History:
    return read(make_run(tmp_path_factory.mktemp("charts") / "ten", rounds=40))


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> History:
    return read(make_run(tmp_path_factory.mktemp("charts") / "hundred", clients=100, rounds=250))


def every(run: History, look: Look) -> dict[str, dict[str, object]]:
    return {
        "accuracy": charts.accuracy(run, look),
        "given": charts.pseudo_labels(run, look),
        "right": charts.precision(run, look),
        "classes": charts.classes_labelled(run, look),
        "thresholds": charts.thresholds(run, look),
        "labelled": charts.holdings(run, look, "labelled"),
        "unlabelled": charts.holdings(run, look, "unlabelled"),
        "seconds": charts.seconds(run, look),
        "bytes": charts.bytes_sent(run, look),
        "network": network(run, look),
        "compared": charts.comparison([("one", run), ("two", run)], look),
    }


def test_lines_are_the_clients_and_their_mean(ten: History) -> None:
    tests = {r["round"]: r["accuracy"] for r in read_records(ten.folder) if "accuracy" in r}
    lines = {line["name"]: line["data"] for line in charts.accuracy(ten, LIGHT)["series"]}
    assert list(lines) == [*(f"client {i}" for i in range(10)), "mean"]
    for i in range(10):
        assert lines[f"client {i}"] == [[t, pytest.approx(100 * row[i], abs=0.006)] for t, row in tests.items()]
    assert lines["mean"] == [[t, pytest.approx(100 * np.mean(row), abs=0.006)] for t, row in tests.items()]


def test_a_client_that_gives_no_number_leaves_a_gap(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=20, done=4)
    with RunFolder.open(folder) as kept:
        kept.append({"round": 5, "accuracy": [float("nan"), *[0.5] * 9], "seconds": {"round": 1.0}})
    run = read(folder)
    lines = {line["name"]: line["data"] for line in charts.accuracy(run, LIGHT)["series"]}
    assert (lines["client 0"], lines["mean"]) == ([[5, None]], [[5, 50.0]])
    assert words.accuracy_words(run) == "Mean 50.0 %, clients from 50.0 to 50.0 %, after round 5."


def test_edges_are_as_wide_as_models_weigh(ten: History) -> None:
    mixing = ten.mixing()
    links = {(int(e["source"]), int(e["target"])): e for e in network(ten, LIGHT)["series"][0]["links"]}
    assert sorted(links) == ten.clients.edges
    order = sorted(links, key=lambda edge: links[edge]["lineStyle"]["width"])
    assert order == sorted(links, key=lambda edge: mixing[edge] + mixing[edge[::-1]])
    i, j = order[-1]
    assert f"{i} takes {100 * mixing[i, j]:.1f} % from {j}" in links[i, j]["tooltip"]["formatter"]


def test_who_is_missing_is_marked(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "peers", rounds=20, done=10, missing=[7]))
    nodes = {node["name"]: node for node in network(run, LIGHT)["series"][0]["data"]}
    assert "gone: no answer for 10 rounds" in nodes["7"]["tooltip"]["formatter"]
    assert nodes["7"]["itemStyle"]["borderColor"] == LIGHT.alarm
    assert nodes["6"]["itemStyle"] == {"color": LIGHT.roles["U"]}
    assert words.network_words(run) == "Client 7 gone (10 rounds)."
    late = read(make_run(tmp_path / "late", rounds=20, done=1, missing=[2]))
    assert words.network_words(late) == "Client 2 late (1 round)."


def test_stacks_add_up_to_the_whole(ten: History) -> None:
    parts = charts.seconds(ten, LIGHT)["series"]
    assert [sum(y) for y in zip(*([y for _, y in part["data"]] for part in parts), strict=True)] == pytest.approx(
        [1.2] * 40, abs=1e-2
    )
    sent = charts.bytes_sent(ten, LIGHT)["series"]
    assert {part["name"]: part["data"][-1][1] for part in sent} == {"models": 4.0, "classifiers": 0.4, "counts": 0.0004}


def test_bars_are_the_pseudo_labels_of_the_last_round(ten: History) -> None:
    last = read_records(ten.folder)[-1]
    bars = {bar["name"]: bar["data"] for bar in charts.classes_labelled(ten, LIGHT)["series"]}
    assert bars == {part: np.sum(last[f"pseudo_{part}"], 0).tolist() for part in ("right", "wrong")}


def test_thresholds_of_one_client_or_of_all(ten: History) -> None:
    last = np.array(read_records(ten.folder)[-1]["thresholds"])
    for client, expected in ((None, last.mean(0)), (3, last[3])):
        cells = charts.thresholds(ten, LIGHT, client)["series"][0]["data"]
        assert [value for column, _, value in cells if column == 39] == pytest.approx(expected.tolist(), abs=6e-4)


@pytest.mark.parametrize("look", [LIGHT, DARK])
def test_every_chart_can_be_sent_and_names_its_axes(ten: History, hundred: History, look: Look) -> None:
    for run in (ten, hundred):
        for name, options in every(run, look).items():
            json.dumps(options, allow_nan=False)
            if name != "network":
                assert options["title"]["text"], name  # type: ignore[index]
                assert options["xAxis"]["name"], name  # type: ignore[index]


def test_the_page_stays_light_whatever_the_run(hundred: History) -> None:
    sizes = {name: len(json.dumps(options)) for name, options in every(hundred, LIGHT).items()}
    assert sum(sizes.values()) < 600_000, sizes


def test_thinning_keeps_the_last_and_bins_keep_the_mean() -> None:
    assert charts.picks(5, 9) == [0, 1, 2, 3, 4]
    assert charts.picks(1000, 3) == [0, 500, 999]
    values = np.random.default_rng(0).random(1000)
    bins = charts.binned(range(1, 1001), values, 80)
    assert (len(bins), bins[-1][0]) == (80, 1000)
    assert np.mean([y for _, y in bins]) == pytest.approx(values.mean(), rel=1e-3)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", rounds=20, done=0))
    for options in every(run, LIGHT).values():
        json.dumps(options, allow_nan=False)
    assert words.accuracy_words(run) == "The first test comes after round 5."
    seldom = {"compute.test_every": 100, "evaluation.every": 2, "evaluation.last": 3}  # the first of those that count
    run.config = override(run.config, seldom)
    assert words.accuracy_words(run) == "The first test comes after round 16."
    run.records.append({"round": 16})  # a peer without test images
    assert words.accuracy_words(run) == "Nothing to test with here."
    run.records.clear()
    assert words.time_words(run) == "No round is done yet."
    assert words.traffic(run) == (0.0, 0.0)


def test_a_class_may_have_any_name(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=5)
    known = json.loads((folder / "clients.json").read_text())
    known["classes"][3] = "<img src=x onerror=alert(1)>\"'`${x}"
    (folder / "clients.json").write_text(json.dumps(known))
    tooltip = charts.holdings(read(folder), LIGHT, "labelled")["tooltip"]
    assert tooltip["renderMode"] == "richText"  # plain text, drawn on the canvas
    assert json.dumps(known["classes"]) in tooltip[":formatter"]


def test_figures_in_words() -> None:
    assert [words.duration(s) for s in (0.44, 48.2, 293, 3725)] == ["0.4 s", "48 s", "4:53 min", "1:02 h"]
    assert [words.amount(n) for n in (512, 4200, 1.6e6, 2.2e9, 3e13)] == [
        "512 B",
        "4.2 kB",
        "1.6 MB",
        "2.2 GB",
        "30 TB",
    ]


def test_runs_that_begin_later_are_found_and_equal_names_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run", rounds=1)
    library = Library([str(tmp_path)])
    assert list(library.names()) == ["run"]
    make_run(tmp_path / "b" / "other", rounds=1)
    assert list(library.names("other")) == ["other", "run"]  # the newest first
    make_run(tmp_path / "c" / "run", rounds=1)
    names = Library([str(tmp_path)]).names()
    assert list(names) == [str(tmp_path / "c" / "run"), "other", str(tmp_path / "a" / "run")]
    assert library.open("other") is library.open("other")
