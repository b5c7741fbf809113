"""The figures of one run, for its report: curves, graph, who holds what, pseudo-labels, confusion, cost."""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from semidfl.record.history import History
from semidfl.report.drawings import MEANINGS, ROLES, draw_graph
from semidfl.report.extras import need
from semidfl.report.figures import COLOURS, blank
from semidfl.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "confusion_figure",
    "confusions_figure",
    "cost_figure",
    "curves",
    "graph_figure",
    "holdings_figure",
    "pseudo_figure",
    "svg",
]

_POINTS = 250
_SMALL = 12
"""clients whose confusion matrices are drawn one by one"""
_GRAPH = 200


def svg(figure: "Figure | None") -> str:
    """A figure as a piece of HTML; text stays text. Nothing for no figure."""
    if figure is None:
        return ""
    written = io.StringIO()
    with need("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": "semidfl"}):
        figure.savefig(written, format="svg", metadata={"Date": None}, transparent=True)
    text = written.getvalue()
    # Names of parts would occur once a figure; what refers to something is named by its content.
    return re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :])


def curves(run: History) -> "Figure | None":
    """Every client's accuracy, and the mean."""
    rounds, values = run.table("accuracy")
    if not rounds:
        return None
    some = _some(len(rounds), _POINTS)
    x, y = np.array(rounds)[some], 100 * values[some]
    figure, axes = blank(1, 1, 8.2, 3.9)
    ax = axes[0][0]
    thin = 1.0 if y.shape[1] <= 20 else 0.5
    for role, colour in ROLES.items():
        mine = [k for k, i in enumerate(run.clients.own) if k < y.shape[1] and run.clients.role(i) == role]
        for n, k in enumerate(mine):
            ax.plot(x, y[:, k], color=colour, linewidth=thin, alpha=0.85, label=None if n else MEANINGS[role])
    ax.plot(x, np.nanmean(y, axis=1), color="black", linewidth=2.2, label="mean", marker="o" if len(x) == 1 else "")
    _finish(ax, run, "test accuracy, %")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def graph_figure(run: History) -> "Figure | None":
    """The graph; edges as wide as the models weighed in the last round."""
    known = run.clients
    if not known.edges or len(known.roles) > _GRAPH:
        return None
    neighbours = tuple(tuple(known.neighbours(i)) for i in range(len(known.roles)))
    mixing = run.mixing()
    widths = {}
    for i, j in known.edges:
        heard = [mixing[pair] for pair in ((i, j), (j, i)) if pair in mixing]
        widths[i, j] = 0.6 + 10 * sum(heard) / len(heard) if heard else 1.2
    figure, axes = blank(1, 1, 4.0, 4.1)
    draw_graph(axes[0][0], Topology(run.config.graph.topology, neighbours, known.roles), widths)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, markerscale=0.5, fontsize=8.5, handletextpad=0.1)
    return figure


def holdings_figure(run: History) -> "Figure | None":
    """Bubbles of how much of each class a client holds, labelled beside unlabelled."""
    known = run.clients
    if not known.labelled or len(known.own) > _GRAPH:
        return None
    parts, names = {"labelled": np.array(known.labelled), "unlabelled": np.array(known.unlabelled)}, list(known.classes)
    if any(known.unknown):  # of a peer's own data: one row more, of no class
        names.append("unknown")
        parts["labelled"] = np.pad(parts["labelled"], ((0, 0), (0, 1)))
        parts["unlabelled"] = np.column_stack([parts["unlabelled"], known.unknown])
    wide = min(10.0, max(4.8, 0.28 * len(known.own)))
    figure, axes = blank(2, 1, wide, min(6.0, max(2.6, 0.2 * len(names) + 0.6)))
    for ax, (kind, counts), colour in zip(axes.flat, parts.items(), ("#0072B2", "#E69F00"), strict=True):
        _bubbles(ax, run, names, counts, colour, min(12.0, 60 * wide / max(1, len(known.own))))
        ax.set_title(f"{kind}, {counts.sum():,} samples; largest bubble {counts.max():,}", fontsize=9.5)
    return figure


def _bubbles(
    ax: "Axes", run: History, names: list[str], counts: npt.NDArray[np.int64], colour: str, largest: float
) -> None:
    known, (clients, classes) = run.clients, np.nonzero(counts)
    sizes = counts[clients, classes] / max(1, counts.max()) * largest**2
    ax.scatter(clients, classes, s=sizes, color=colour, alpha=0.85, linewidths=0)
    ax.set_xlim(-0.7, len(known.own) - 0.3)
    ax.set_ylim(-0.7, len(names) - 0.3)
    shown = range(0, len(known.own), max(1, len(known.own) // 20))
    ax.set_xticks(list(shown), [f"{known.own[k]}\n{known.role(known.own[k])}" for k in shown], fontsize=8)
    every = range(0, len(names), max(1, len(names) // 20))
    ax.set_yticks(list(every), [_short(names[k]) for k in every], fontsize=8)
    ax.set_xlabel("client and role", fontsize=9)
    ax.set_ylabel("class", fontsize=9)
    ax.set_axisbelow(True)
    ax.grid(alpha=0.2)


def pseudo_figure(run: History) -> "Figure | None":
    """Count and precision of the pseudo-labels over the rounds."""
    rounds, counts = run.table("pseudo_labels")
    if not rounds or not counts.sum():
        return None
    shares = run.table("pseudo_precision")[1] * 100
    truth = np.isfinite(shares).any()
    figure, axes = blank(1, 2 if truth else 1, 4.6, 3.1)
    some = _some(len(rounds), _POINTS)
    x = np.array(rounds)[some]
    axes[0][0].plot(x, counts.sum(1)[some], color=COLOURS[1])
    total = run.looked_at()
    if total:
        axes[0][0].axhline(total, color="#777777", linestyle="--", linewidth=1)
        axes[0][0].text(run.config.rounds, total, f"all {total:,} looked at ", ha="right", va="bottom", fontsize=8.5)
    _finish(axes[0][0], run, "samples with a pseudo-label", percent=False, top=1.12 * total if total else None)
    if truth:
        known = np.where(np.isfinite(shares), counts, 0)
        mean = (np.nan_to_num(shares) * known).sum(1) / np.maximum(known.sum(1), 1e-9)
        mean[known.sum(1) == 0] = np.nan
        axes[0][1].plot(x, mean[some], color=COLOURS[2])
        _finish(axes[0][1], run, "right among them, %")
    return figure


def confusion_figure(run: History) -> "Figure | None":
    """What the mean model, or the only one there is, takes for what on the test set."""
    found = run.confusion
    if not found:
        return None
    alone = len(run.clients.own) == 1
    title = f"client {run.clients.own[0]}" if alone else "mean model"
    size = min(7.0, max(3.8, 0.34 * len(found["mean"])))
    figure, axes = blank(1, 1, size, size)
    _matrix(axes[0][0], np.array(found["mean"]), title, run.clients.classes)
    return figure


def confusions_figure(run: History) -> "Figure | None":
    """The same of every client, or of many the weakest, small: their patterns are to be compared, not read."""
    each = np.array((run.confusion or {}).get("clients", []))
    if len(each) < 2:
        return None
    score = np.trace(each, axis1=1, axis2=2) / each.sum((1, 2)).clip(1)
    shown = sorted(np.argsort(score, kind="stable")[:_SMALL].tolist()) if len(each) > _SMALL else range(len(each))
    columns = 4
    rows = -(-len(shown) // columns)
    figure, axes = blank(rows, columns, 1.4, 1.55)
    for ax in axes.flat:
        ax.axis("off")
    for ax, k in zip(axes.flat, shown, strict=False):
        share = each[k] / np.maximum(each[k].sum(1, keepdims=True), 1)
        ax.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        ax.set_title(f"client {run.clients.own[k]}: {100 * score[k]:.1f} %", fontsize=8)
    return figure


def _matrix(ax: "Axes", matrix: npt.NDArray[np.int64], title: str, classes: Sequence[str]) -> None:
    share = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    ax.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if len(matrix) <= 12:
        for (i, j), n in np.ndenumerate(matrix):
            if n:
                ax.text(
                    j,
                    i,
                    str(n),
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if share[i, j] > 0.5 else "black",
                )
    every = range(0, len(matrix), max(1, len(matrix) // 12))
    words = [_short(classes[k]) if k < len(classes) else str(k) for k in every]
    ax.set_xticks(list(every), words, fontsize=8, rotation=90 if max(map(len, words)) > 2 else 0)
    ax.set_yticks(list(every), words, fontsize=8)
    ax.set_title(f"{title}: {100 * np.trace(matrix) / max(1, matrix.sum()):.1f} %", fontsize=10)
    ax.set_xlabel("answer", fontsize=9)
    ax.set_ylabel("truth", fontsize=9)
    ax.tick_params(length=0)


def cost_figure(run: History) -> "Figure | None":
    """Where the seconds and the bytes went, in all."""
    _, seconds = run.named("seconds")
    _, sent = run.named("bytes_sent")
    whole = sum(seconds.pop("round", []))
    totals = {name: sum(values) for name, values in seconds.items()}
    if not whole:
        return None
    totals["other"] = max(0.0, whole - sum(totals.values()))
    clients = max(1, len(run.clients.own))
    figure, axes = blank(1, 2, 4.6, 2.4)
    _bars(axes[0][0], totals, "seconds, whole run", COLOURS[1])
    _bars(
        axes[0][1], {k: sum(v) / 1e6 / clients for k, v in sent.items()}, "MB sent by a client, whole run", COLOURS[0]
    )
    return figure


def _bars(ax: "Axes", totals: dict[str, float], unit: str, colour: str) -> None:
    order = sorted(totals, key=lambda name: totals[name])
    bars = ax.barh(order, [totals[name] for name in order], color=colour, height=0.65)
    ax.bar_label(bars, fmt="{:.3g}", fontsize=8, padding=2)
    ax.margins(x=0.18)
    ax.set_xlabel(unit, fontsize=9)
    ax.tick_params(labelsize=8.5, length=0)
    ax.spines[["top", "right"]].set_visible(False)


def _finish(ax: "Axes", run: History, label: str, percent: bool = True, top: float | None = None) -> None:
    ax.set_xlabel("round")
    ax.set_ylabel(label)
    ax.set_xlim(0, run.config.rounds)
    low = float(np.nanmin([np.nanmin(line.get_ydata()) for line in ax.lines])) if percent else 0.0
    ax.set_ylim(20 * (low // 20) if percent else 0, 100.5 if percent else top)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _some(length: int, most: int) -> Any:
    """Indices of at most `most` rows, the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(int))


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"
