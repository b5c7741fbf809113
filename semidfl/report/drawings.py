"""Pictures that need no run: the graphs with the clients' roles, and which client holds how much of which class."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from semidfl import topology
from semidfl.config import GraphConfig
from semidfl.data.dataset import Dataset
from semidfl.data.partition import class_counts, partition
from semidfl.data.sources import load
from semidfl.report.extras import need
from semidfl.report.figures import blank
from semidfl.report.plans import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_graph", "partition_figure", "topologies_figure"]

ROLES = {"L": "#0072B2", "M": "#E69F00", "U": "#BBBBBB"}
"""Okabe and Ito's blue and orange, and grey: told apart by colour-blind readers and in print"""
MEANINGS = {"L": "L: labels", "M": "M: some labels", "U": "U: no label"}
_TITLES = {"fig1": "Figure 1", "topology1": "Topology 1", "topology2": "Topology 2", "topology3": "Topology 3"}
_NUMBERED = 24
"""clients that have room for their number"""
_LARGEST = 150.0
"""area of the largest bubble, in points squared: two of them side by side do not touch"""


def topologies_figure() -> "Figure":
    """The paper's four graphs side by side."""
    figure, axes = blank(1, len(_TITLES), 3.3, 3.6)
    for ax, (name, title) in zip(axes[0], _TITLES.items(), strict=True):
        draw_graph(ax, topology.build(GraphConfig(name), 0))
        ax.set_title(title)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_graph(ax: "Axes", graph: topology.Topology, widths: Mapping[tuple[int, int], float] | None = None) -> None:
    """A graph with its clients in the colours of their roles; the roles are labelled for a legend.

    `widths`: of the edges (i, j), i < j, in points
    """
    net = nx.Graph(graph.edges())
    net.add_nodes_from(range(graph.clients))
    place, few = _layout(net), graph.clients <= _NUMBERED
    ax.add_collection(
        need("matplotlib.collections").LineCollection(
            [(place[i], place[j]) for i, j in net.edges],
            colors="#888888",
            linewidths=[(widths or {}).get((min(edge), max(edge)), 1.2) for edge in net.edges],
            zorder=1,
        )
    )
    for role, colour in ROLES.items():
        points = np.array([place[i] for i in net if graph.roles[i] == role]).reshape(-1, 2)
        ax.scatter(points[:, 0], points[:, 1], s=330 if few else 30, color=colour, zorder=2, label=MEANINGS[role])
    for i, (x, y) in place.items() if few else ():
        ink = "white" if graph.roles[i] == "L" else "black"
        ax.text(x, y, str(i), ha="center", va="center", fontsize=10, color=ink, zorder=3)
    _square(ax, np.array(list(place.values())))
    ax.axis("off")


def _square(ax: "Axes", points: npt.NDArray[np.float64]) -> None:
    """A square panel with room around: graphs side by side are of one scale and their titles in line."""
    low, high = points.min(0), points.max(0)
    half = 0.65 * max(float((high - low).max()), 1e-3)
    x, y = (low + high) / 2
    ax.set_xlim(x - half, x + half)
    ax.set_ylim(y - half, y + half)
    ax.set_aspect("equal")


def _layout(net: "nx.Graph[int]") -> dict[int, tuple[float, float]]:
    """A ring as a ring, a tree with its branches spread, anything else on a circle in the order of ids."""
    nodes = sorted(net)
    if len(nodes) > 2 and all(degree == 2 for _, degree in net.degree()):
        return _circle([0, *(j for _, j in nx.dfs_edges(net, 0))])
    if nx.is_tree(net):
        need("scipy")
        found = nx.kamada_kawai_layout(net, pos=_circle(nodes))
        return _lying({i: (float(x), float(y)) for i, (x, y) in found.items()})
    return _circle(nodes)


def _lying(place: dict[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Turned so that it is widest from left to right, client 0 on the left."""
    points = np.array(list(place.values()))
    points -= points.mean(0)
    turned = points @ np.linalg.svd(points)[2].T
    if turned[list(place).index(0), 0] > 0:
        turned = -turned
    return {i: (float(x), float(y)) for i, (x, y) in zip(place, turned, strict=True)}


def _circle(order: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Clockwise from the top."""
    turns = np.linspace(0, 2 * np.pi, len(order), endpoint=False)
    return {i: (float(np.sin(turn)), float(np.cos(turn))) for i, turn in zip(order, turns, strict=True)}


def partition_figure(dataset: str, ratio: float, alphas: Sequence[float], graph: GraphConfig) -> "Figure":
    """Bubbles of how much of each class a client holds, labelled above, unlabelled below, a column an alpha."""
    data, built = load(dataset), topology.build(graph, 0)
    figure, axes = blank(2, len(alphas), max(2.6, 0.26 * built.clients), 3.1)
    kinds = ("labelled", "unlabelled")
    for column, alpha in enumerate(alphas):
        split = partition(data.train_labels, built.roles, ratio, alpha, 0)
        for row, indices in enumerate((split.labelled, split.unlabelled)):
            ax = axes[row][column]
            _bubbles(ax, class_counts(indices, data.train_labels, len(data.classes)), row)
            ax.set_title(f"{kinds[row]}, α = {alpha:g}", fontsize=10)
            _clients_and_classes(ax, built, data, named=column == 0)
    for row in range(2):
        _size_legend(axes[row], kinds[row])
    figure.suptitle(f"{NAMES.get(dataset, dataset)}, r = {ratio:g} % of {len(data.train_labels)} samples labelled")
    return figure


def _bubbles(ax: "Axes", counts: npt.NDArray[np.int64], row: int) -> None:
    """Drawn at full size now; `_size_legend` scales a row of panels together."""
    clients, classes = np.nonzero(counts)
    ax.scatter(clients, classes, s=counts[clients, classes].astype(float), color=("#0072B2", "#E69F00")[row], alpha=0.8)


def _clients_and_classes(ax: "Axes", graph: topology.Topology, data: Dataset, named: bool) -> None:
    ax.set_xlim(-0.7, graph.clients - 0.3)
    ax.set_ylim(-0.7, len(data.classes) - 0.3)
    step = max(1, graph.clients // 10)  # of many clients, not every one is named
    shown = range(0, graph.clients, step)
    ax.set_xticks(list(shown), [f"{i}\n{graph.roles[i]}" for i in shown], fontsize=8)
    every = range(0, len(data.classes), max(1, len(data.classes) // 20))
    ax.set_yticks(list(every), [data.classes[k] for k in every] if named else [], fontsize=8)
    ax.set_xlabel("client and role", fontsize=9)
    if named:
        ax.set_ylabel("class", fontsize=9)
    ax.set_axisbelow(True)
    ax.grid(alpha=0.2)


def _size_legend(axes: Sequence["Axes"], kind: str) -> None:
    """The same scale in all panels of a row, area in proportion to samples, explained at its right end."""
    bubbles: list[Any] = [ax.collections[0] for ax in axes]
    most = max((float(b.get_sizes().max()) for b in bubbles if len(b.get_sizes())), default=1.0)
    for each in bubbles:
        each.set_sizes(each.get_sizes() * _LARGEST / most)
    marks = [_key(bubbles[0], value, most) for value in _round_numbers(most)]
    axes[-1].legend(
        handles=marks,
        title=f"{kind}\nsamples",
        title_fontsize=8,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1.02, 0.5),
        frameon=False,
        labelspacing=1.1,
    )


def _key(bubbles: Any, value: int, most: float) -> Any:
    colour = bubbles.get_facecolor()[0]
    size = (value / most * _LARGEST) ** 0.5
    return need("matplotlib.lines").Line2D(
        [], [], linestyle="", marker="o", color=colour, markersize=size, markeredgewidth=0, label=str(value)
    )


def _round_numbers(most: float) -> list[int]:
    """About the largest count, a quarter and a twentieth of it, each with one digit that counts."""
    return sorted({max(1, int(float(f"{most * share:.0e}"))) for share in (0.05, 0.25, 1.0)})
