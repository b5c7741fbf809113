"""The page's charts, as options of ECharts: pure functions of a run's history and a look, without a browser.

All lines are thinned to what a screen can show, so that a page of 100 clients and 500 rounds stays light.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from semidfl.record.history import History
from semidfl.web.look import Look
from semidfl.web.parts import axis, curve, heat, limit, plot

__all__ = ["accuracy", "bytes_sent", "comparison", "holdings", "precision", "pseudo_labels", "seconds", "thresholds"]

Options = dict[str, Any]
Floats = npt.NDArray[np.float64]

_POINTS = 240
"""of a line, at most"""
_ALL_POINTS = 12_000
"""of all lines of a chart together"""
_NAMED = 12
"""clients that a tooltip lists one by one"""


def accuracy(run: History, look: Look) -> Options:
    """Every client's accuracy in the colour of its role, and their mean."""
    rounds, values = run.table("accuracy")
    rounds, values = thin(rounds, 100 * values, max(2, min(_POINTS, _ALL_POINTS // max(1, len(run.clients.own)))))
    many = values.shape[1] > _NAMED if values.size else False
    lines = [
        curve(f"client {i}", rounds, values[:, k], look.roles[run.clients.role(i)], 1.2 if many else 1.6, many)
        for k, i in enumerate(run.clients.own)
        if values.size and k < values.shape[1]
    ]
    if values.size:
        lines.append(curve("mean", rounds, _mean(values, 1), look.ink, 3.2, False, z=5))
    low = float(np.nanmin(values)) if np.isfinite(values).any() else 0.0
    return plot(look, "round", "test accuracy, %", run.config.rounds, lines, low=20 * (low // 20), high=100)


def pseudo_labels(run: History, look: Look) -> Options:
    """How many samples carry a pseudo-label, over all own clients, beside how many there are to label."""
    rounds, values = run.table("pseudo_labels")
    kept, total = thin(rounds, values, _POINTS), run.looked_at()
    line = curve("pseudo-labels", kept[0], kept[1].sum(1) if kept[1].size else [], look.series[0], 2.4, False)
    line |= {"areaStyle": {"opacity": 0.12}}
    line["markLine"] = limit(look, total, f"all {total:,} looked at")
    top = ceiling(1.12 * total) if total else None
    return plot(look, "round", "samples with a pseudo-label", run.config.rounds, [line], low=0, high=top)


def precision(run: History, look: Look) -> Options:
    """The share of right pseudo-labels: of all, and the best and worst client's."""
    rounds, share = run.table("pseudo_precision")
    counts = dict(zip(*run.table("pseudo_labels"), strict=True))
    known = [k for k, t in enumerate(rounds) if t in counts and np.isfinite(share[k]).any()]
    rounds, share = [rounds[k] for k in known], share[known] * 100
    weights = np.array([counts[t] for t in rounds]).reshape(share.shape)
    got = np.where(np.isfinite(share), weights, 0)
    mean = (np.nan_to_num(share) * got).sum(1) / got.sum(1).clip(1e-9) if known else np.zeros(0)
    low, high = (f(share, axis=1) if known else np.zeros(0) for f in (np.nanmin, np.nanmax))
    rounds, rows = thin(rounds, np.stack([mean, low, high], 1) if known else np.zeros((0, 3)), _POINTS)
    lines = [
        curve("worst client", rounds, rows[:, 1], look.faint, 1.2, False),
        curve("best client", rounds, rows[:, 2], look.faint, 1.2, False),
        curve("all clients", rounds, rows[:, 0], look.series[2], 2.8, False, z=5),
    ]
    for line in lines[:2]:
        line["lineStyle"]["type"] = [4, 3]
    least = float(rows.min()) if rows.size else 0.0
    return plot(look, "round", "right pseudo-labels, %", run.config.rounds, lines, low=20 * (least // 20), high=100)


def classes_labelled(run: History, look: Look) -> Options:
    """Of each class, the pseudo-labels of the last round that had any: right, wrong, truth not known."""
    last: dict[str, Any] = next((r for r in reversed(run.records) if "pseudo_given" in r), {})
    given, right, wrong = (
        np.array(last.get(f"pseudo_{part}", [[]]), dtype=int).sum(0) for part in ("given", "right", "wrong")
    )
    parts = {
        "right": (right, look.right),
        "wrong": (wrong, look.wrong),
        "truth unknown": (given - right - wrong, look.faint),
    }
    shown = {name: part for name, part in parts.items() if part[0].size and (name != "truth unknown" or part[0].any())}
    bars = [
        {
            "name": name,
            "type": "bar",
            "stack": "all",
            "data": counts.tolist(),
            "itemStyle": {"color": colour},
            "barMaxWidth": 26,
        }
        for name, (counts, colour) in shown.items()
    ]
    options = plot(look, "class given", "pseudo-labels of this class", 0, bars, low=0)
    options["xAxis"] = axis(look, "class given", type="category", data=names(run, len(given)))
    options["tooltip"]["axisPointer"] = {"type": "shadow"}
    return options


def thresholds(run: History, look: Look, client: int | None = None) -> Options:
    """The threshold of every class over the rounds: of one client, or the mean over all own."""
    rows = [(r["round"], r["thresholds"]) for r in run.records if "thresholds" in r]
    place = run.clients.own.index(client) if client in run.clients.own else None
    picked = [rows[k] for k in picks(len(rows), 60)]
    table = [x.mean(0) if place is None else x[place] for _, x in picked if place is None or place < len(x)]
    cells = [
        [column, k, round(float(max(0.0, value)), 3)] for column, row in enumerate(table) for k, value in enumerate(row)
    ]
    classes = names(run, len(table[0]) if table else 0)
    return heat(look, cells, ("round", [t for t, _ in picked]), ("class", classes), "threshold", 1.0)


def holdings(run: History, look: Look, kind: str) -> Options:
    """Samples of each class at each own client, labelled or unlabelled."""
    rows = run.clients.labelled if kind == "labelled" else run.clients.unlabelled
    unknown = run.clients.unknown if kind != "labelled" else []
    classes = names(run, len(rows[0]) if rows else 0)
    if any(unknown):
        rows, classes = [[*row, n] for row, n in zip(rows, unknown, strict=True)], [*classes, "unknown"]
    cells = [[column, k, n] for column, row in enumerate(rows) for k, n in enumerate(row)]
    most = float(max((cell[2] for cell in cells), default=1) or 1)
    clients = [f"{i} {run.clients.role(i)}" for i in run.clients.own]
    return heat(look, cells, ("client and role", clients), ("class", classes), f"{kind} samples", most)


def seconds(run: History, look: Look) -> Options:
    """Where the time goes: seconds of each phase, stacked."""
    rounds, parts = run.named("seconds")
    whole = np.array(parts.pop("round", np.zeros(len(rounds))))
    parts["other"] = list((whole - sum(np.array(x) for x in parts.values())).clip(0)) if parts else []
    return _stacked(run, look, rounds, parts, "seconds a round")


def bytes_sent(run: History, look: Look) -> Options:
    """What a client sends in a round, by topic, in megabytes (10^6 bytes); the mean over own clients."""
    rounds, parts = run.named("bytes_sent")
    scale = 1e-6 / max(1, len(run.clients.own))
    return _stacked(run, look, rounds, {k: [x * scale for x in v] for k, v in parts.items()}, "MB a client and round")


def comparison(runs: Sequence[tuple[str, History]], look: Look) -> Options:
    """The mean accuracy of several runs over each other."""
    lines = []
    for k, (label, run) in enumerate(runs):
        rounds, values = run.table("accuracy")
        rounds, values = thin(rounds, 100 * values, _POINTS)
        line = curve(label, rounds, _mean(values, 1) if values.size else [], look.series[k % 7], 2.6, False)
        line["lineStyle"]["type"] = ("solid", "dashed", "dotted")[k // 7 % 3]
        lines.append(line)
    least = min((y for line in lines for _, y in line["data"] if y is not None), default=0.0)
    rounds_most = max((run.config.rounds for _, run in runs), default=1)
    return plot(look, "round", "mean test accuracy, %", rounds_most, lines, low=20 * (least // 20), high=100)


def _stacked(run: History, look: Look, rounds: Sequence[int], parts: Mapping[str, Sequence[float]], y: str) -> Options:
    shown = [(name, values) for name, values in parts.items() if any(values)]
    series = [
        {
            "name": name,
            "type": "line",
            "stack": "all",
            "data": binned(rounds, values, 80),
            "showSymbol": len(rounds) == 1,
            "lineStyle": {"width": 0},
            "areaStyle": {"opacity": 0.85, "color": look.series[k % 7]},
            "itemStyle": {"color": look.series[k % 7]},
            "emphasis": {"disabled": True},
        }
        for k, (name, values) in enumerate(shown)
    ]
    options = plot(look, "round", y, run.config.rounds, series, low=0)
    options["tooltip"]["order"] = "seriesDesc"
    return options


# --- numbers --------------------------------------------------------------------------------------


def picks(length: int, most: int) -> list[int]:
    """At most `most` of 0 … length - 1, evenly, the last among them."""
    if length <= most:
        return list(range(length))
    return sorted({round(k * (length - 1) / (most - 1)) for k in range(most)})


def thin(rounds: Sequence[int], values: Floats, most: int) -> tuple[list[int], Floats]:
    """Some rows of (T, …), the last among them."""
    chosen = picks(len(rounds), most)
    return [rounds[k] for k in chosen], values[chosen] if len(rounds) else values.reshape(0, *values.shape[1:])


def binned(rounds: Sequence[int], values: Sequence[float], most: int) -> list[list[float]]:
    """[round, mean] of at most `most` stretches: sums that a thinned line would miss are kept."""
    edges = np.linspace(0, len(rounds), min(most, len(rounds)) + 1).astype(int)
    array = np.array(values, dtype=np.float64)
    return [[rounds[b - 1], float(f"{array[a:b].mean():.4g}")] for a, b in pairwise(edges)]


def ceiling(value: float) -> float:
    """The next number of the kind 1.5, 2, 2.5 … 10 times a power of ten."""
    step = 10.0 ** math.floor(math.log10(value)) / 2
    return step * math.ceil(value / step)


def names(run: History, count: int) -> list[str]:
    """Of the classes; a folder of an older version has numbers only."""
    return run.clients.classes or [str(k) for k in range(count)]


def _mean(values: Floats, axis: int) -> Floats:
    """Without the clients that gave no number."""
    known = np.isfinite(values)
    total = np.where(known, values, 0).sum(axis)
    return np.where(known.any(axis), total / known.sum(axis).clip(1), np.nan)
