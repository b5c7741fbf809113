"""Figures: lines that tell methods apart, graphs and partitions as pictures."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semidfl import topology
from semidfl.config import GraphConfig
from semidfl.report import drawings, figures
from semidfl.report.plans import METHODS, NAMES
from semidfl.report.tables import Entry, Score


def check_figure(stem: Path) -> None:
    assert ET.parse(f"{stem}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    with Image.open(f"{stem}.png") as picture:
        assert min(picture.size) > 300
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10


def points(axis: str, seeds: int) -> list[Entry]:
    spread = 2.0 if seeds > 1 else math.nan
    return [
        Entry(
            (NAMES[method], ""),
            "",
            {"row": method, "dataset": "digits", "ratio": 5.0, "alpha": 100.0, axis: x},
            Score(10 * k + x / 10, 1.0, spread, seeds, True),
        )
        for k, method in enumerate(METHODS)
        for x in (0.1, 1.0, 5.0)
    ]


@pytest.mark.parametrize(("axis", "seeds"), [("alpha", 1), ("ratio", 3)])
def test_accuracy_figures_tell_methods_apart(axis: str, seeds: int, tmp_path: Path) -> None:
    figure = figures.accuracy_figure(points(axis, seeds), axis)
    (panel,) = figure.axes
    lines = [bars.lines[0] for bars in panel.containers]
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 6
    assert {line.get_color() for line in lines} <= set(figures.COLOURS)
    assert panel.get_xscale() == ("log" if axis == "alpha" else "linear")
    assert "%" in panel.get_ylabel()
    assert ("seeds" if seeds > 1 else "clients") in panel.get_ylabel()
    assert lines[2].get_ydata() == pytest.approx([20.01, 20.1, 20.5])
    figures.save(figure, tmp_path / "figure")
    check_figure(tmp_path / "figure")


def test_what_did_not_converge_is_hollow_and_breaks_the_line() -> None:
    entries = points("alpha", 1)
    lost = Entry(entries[1].row, "", entries[1].facts, Score(9.8, 1.0, math.nan, 1, False))
    figure = figures.accuracy_figure([entries[0], lost, *entries[2:]], "alpha")
    (panel,) = figure.axes
    assert panel.containers[0].lines[0].get_ydata() == pytest.approx([0.01, math.nan, 0.5], nan_ok=True)
    (hollow,) = [line for line in panel.lines if line.get_markerfacecolor() == "white"]
    assert list(hollow.get_ydata()) == [9.8]
    assert hollow.get_color() == panel.containers[0].lines[0].get_color()
    whole = figures.accuracy_figure(entries, "alpha")
    said = [[text.get_text() for text in f.legends[0].get_texts()] for f in (figure, whole)]
    assert said == [[*(NAMES[m] for m in METHODS), "did not converge"], [NAMES[m] for m in METHODS]]
    for f in (figure, whole):
        f.draw_without_rendering()
        assert f.axes[0].get_position().height > 0.4  # the legend leaves room for the panel


def test_a_figure_of_what_is_not_run_yet_is_empty(tmp_path: Path) -> None:
    empty = [Entry(e.row, e.column, e.facts, None) for e in points("alpha", 1)]
    check_files = figures.save(figures.accuracy_figure(empty, "alpha"), tmp_path / "empty")
    assert all(file.exists() for file in check_files)


def test_methods_of_ones_own_take_free_colours() -> None:
    styles = figures._styles([*METHODS, "mine:A"])
    assert len({styles[method] for method in [*METHODS, "mine:A"]}) == 7


@pytest.mark.parametrize("name", ["fig1", "topology1", "topology2", "topology3", "star", "full", "ring"])
def test_drawn_clients_do_not_overlap(name: str) -> None:
    figure, axes = figures.blank(1, 1, 3.3, 3.6)
    drawings.draw_graph(axes[0][0], topology.build(GraphConfig(name), 0))
    figure.draw_without_rendering()
    places = np.array([axes[0][0].transData.transform(text.get_position()) for text in axes[0][0].texts])
    gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)[~np.eye(10, dtype=bool)]
    assert gaps.min() * 72 / figure.dpi > math.sqrt(330)  # the diameter of a client, in points


def test_a_pair_and_a_lonely_client_can_be_drawn() -> None:
    for clients in (1, 2):
        _, axes = figures.blank(1, 1, 3, 3)
        drawings.draw_graph(axes[0][0], topology.build(GraphConfig("line", clients, "M" * clients), 0))
        assert len(axes[0][0].texts) == clients


def test_figures_are_the_same_bytes_again(tmp_path: Path) -> None:
    one, two = (figures.save(drawings.topologies_figure(), tmp_path / name)[0] for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    check_figure(tmp_path / "a")


def test_partition_figure_scales_bubbles_by_samples() -> None:
    figure = drawings.partition_figure("digits", 5.0, (100.0, 0.1), GraphConfig())
    panels = figure.axes
    assert [panel.get_title() for panel in panels] == [
        "labelled, α = 100",
        "labelled, α = 0.1",
        "unlabelled, α = 100",
        "unlabelled, α = 0.1",
    ]
    for row, total in ((panels[:2], 72), (panels[2:], 1437 - 72)):
        sums = [float(panel.collections[0].get_sizes().sum()) for panel in row]  # type: ignore[attr-defined]
        assert sums[0] == pytest.approx(sums[1])  # the same samples, dealt otherwise: areas add up to the same
        most = max(float(panel.collections[0].get_sizes().max()) for panel in row)  # type: ignore[attr-defined]
        assert most == pytest.approx(150)
        assert sums[0] / 150 < total
