"""Accuracy as pictures: against alpha, against r, against the rounds. Colours are Okabe and Ito's, safe for
colour-blind readers, and every line has its own marker too.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from semidfl.errors import SemiDFLError
from semidfl.record.atomic import explain
from semidfl.report.extras import need
from semidfl.report.plans import NAMES
from semidfl.report.tables import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "accuracy_figure", "blank", "curves_figure", "save"]

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
# The same look for a method in every figure: index of colour and marker.
_STYLES = {"semidfl": 0, "mixmatch": 1, "flexmatch": 2, "cbafed": 3, "dfl-lb": 4, "dfl-ub": 6}

_HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "markersize": 5, "clip_on": False}
"""the look of what did not converge"""

_AXES = {
    "alpha": "Dirichlet α: 0.01 is very skewed, 100 near IID (log scale)",
    "ratio": "labelled share r of the training samples, %",
}


def blank(rows: int, columns: int, width: float, height: float) -> tuple["Figure", npt.NDArray[Any]]:
    """A figure of panels (rows, columns), each of this size in inches. Without pyplot: no window, no global state."""
    figure = need("matplotlib.figure").Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: "Figure", stem: Path) -> list[Path]:
    """STEM.svg and STEM.png."""
    files = [stem.with_name(stem.name + suffix) for suffix in (".svg", ".png")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        # Without date and random ids, the same numbers give the same bytes.
        with need("matplotlib").rc_context({"svg.hashsalt": "semidfl"}):
            figure.savefig(files[0], metadata={"Date": None})
        figure.savefig(files[1], dpi=150)
    except OSError as error:
        raise SemiDFLError(explain(stem, error)) from error
    return files


def accuracy_figure(entries: Sequence[Entry], axis: str) -> "Figure":
    """A panel a data set (and value of the other axis), a line a method, over `axis`: alpha or ratio."""
    other = "ratio" if axis == "alpha" else "alpha"
    panels = list(dict.fromkeys((entry.facts["dataset"], entry.facts[other]) for entry in entries))
    figure, axes = blank(1, len(panels), 5.2, 4.2)
    for panel, ax in zip(panels, axes[0], strict=True):
        _lines(ax, [e for e in entries if (e.facts["dataset"], e.facts[other]) == panel], axis)
        value = f"r = {panel[1]:g} %" if other == "ratio" else f"α = {panel[1]:g}"
        ax.set_title(f"{NAMES.get(str(panel[0]), panel[0])}, {value}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if any(entry.score is not None and not entry.score.converged for entry in entries):
        handles.append(need("matplotlib.lines").Line2D([], [], marker="o", color="grey", linestyle="", **_HOLLOW))
        labels.append("did not converge")
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if len(panels) == 1 else 7, frameon=False)
    return figure


def _lines(ax: "Axes", entries: Sequence[Entry], axis: str) -> None:
    methods = list(dict.fromkeys(str(entry.facts["row"]) for entry in entries))
    xs = sorted({float(str(entry.facts[axis])) for entry in entries})
    for k, method in enumerate(methods):
        mine = sorted((e for e in entries if e.facts["row"] == method), key=lambda e: float(str(e.facts[axis])))
        shifted = _shift(xs, axis, k - (len(methods) - 1) / 2)
        _line(ax, [e for e in mine if e.score is not None], axis, shifted, _styles(methods)[method])
    ax.set_xscale("log" if axis == "alpha" else "linear")
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.minorticks_off()
    ax.set_xlabel(_AXES[axis])
    ax.set_ylabel(f"test accuracy, % (bars: std over the {_spread(entries)})")
    ax.set_ylim(0, 100)
    ax.grid(alpha=0.3)


def _line(ax: "Axes", entries: Sequence[Entry], axis: str, shifted: Mapping[float, float], style: int) -> None:
    """What did not converge is a hollow marker and breaks the line: no trend leads there."""
    if not entries:
        return
    label, method = entries[0].row[0], str(entries[0].facts["row"])
    scores = [entry.score for entry in entries if entry.score is not None]
    places = [shifted[float(str(entry.facts[axis]))] for entry in entries]
    over_seeds, colour, marker = _spread(entries) == "seeds", COLOURS[style], _MARKERS[style]
    ax.errorbar(
        places,
        [score.mean if score.converged else math.nan for score in scores],
        yerr=[score.over_seeds if over_seeds else score.over_clients for score in scores],
        color=colour,
        marker=marker,
        linestyle="--" if method.startswith("dfl-") else "-",
        markersize=5,
        capsize=2.5,
        linewidth=1.4,
        label=label,
    )
    for x, score in zip(places, scores, strict=True):
        if not score.converged:
            ax.plot(x, score.mean, marker, color=colour, **_HOLLOW)


def _styles(methods: Sequence[str]) -> dict[str, int]:
    """Colour and marker of each method; those of one's own take what the others leave."""
    free = [k for k in range(len(COLOURS)) if k not in {_STYLES.get(method) for method in methods}]
    others = [method for method in methods if method not in _STYLES]
    return _STYLES | {method: (free or [0])[k % max(1, len(free))] for k, method in enumerate(others)}


def _spread(entries: Sequence[Entry]) -> str:
    """What the bars are: seeds where every point has several, else clients."""
    scores = [entry.score for entry in entries if entry.score is not None]
    return "clients" if any(math.isnan(score.over_seeds) for score in scores) else "seeds"


def _shift(xs: Sequence[float], axis: str, place: float) -> dict[float, float]:
    """Each x a little aside, by the line's place among the lines: bars of different methods do not hide each other."""
    if axis == "alpha":
        return {x: x * 10 ** (0.025 * place) for x in xs}
    return {x: x + 0.008 * place * (xs[-1] - xs[0]) for x in xs}


def curves_figure(curves: Mapping[str, Sequence[tuple[Sequence[int], npt.NDArray[np.float64]]]]) -> "Figure":
    """Accuracy over the rounds: a line a group, the mean; the band holds all clients of all its runs.

    `curves`: by label, for each run its tested rounds (T,) and accuracies (T, clients) in 0..1.
    """
    figure, axes = blank(1, 1, 7.0, 4.4)
    ax = axes[0][0]
    for k, (label, runs) in enumerate(curves.items()):
        rounds = sorted(set.intersection(*(set(tested) for tested, _ in runs)))
        both = np.concatenate([100 * values[np.isin(tested, rounds)] for tested, values in runs], axis=1)
        look = COLOURS[k % len(COLOURS)]
        ax.fill_between(rounds, both.min(1), both.max(1), color=look, alpha=0.15, linewidth=0)
        every = max(1, len(rounds) // 12)
        ax.plot(rounds, both.mean(1), color=look, marker=_MARKERS[k % 7], markevery=every, markersize=5, label=label)
    ax.set_xlabel("round")
    ax.set_ylabel("test accuracy, % (band: all clients)")
    ax.set_ylim(0, 100)
    ax.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2 if len(curves) > 1 else 1, frameon=False)
    return figure
