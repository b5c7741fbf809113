"""The graph of the clients as a chart: colours by role, edges as wide as the models weigh, who is gone marked."""

from functools import lru_cache
from typing import Any

import networkx as nx
import numpy as np

from semidfl.record.history import History
from semidfl.web.look import FONT, MEANINGS, Look

__all__ = ["GONE", "network"]

GONE = 3
"""rounds in a row without an answer from which on a peer counts as gone; fewer: as late"""

Place = dict[int, tuple[float, float]]


def network(run: History, look: Look) -> dict[str, Any]:
    """A node a client, an edge two neighbours; empty where the run does not tell its graph."""
    known, absent, mixing = run.clients, run.absent(), run.mixing()
    place = _layout(len(known.roles), tuple(known.edges))
    accuracies = _latest(run)
    nodes = [_node(i, place[i], run, look, absent.get(i, 0), accuracies.get(i)) for i in place]
    links = [_link(i, j, mixing, look, bool(absent.keys() & {i, j}), len(place) <= 40) for i, j in known.edges]
    return {
        "animation": False,
        "textStyle": {"fontFamily": FONT},
        "tooltip": {
            "confine": True,
            "backgroundColor": look.card,
            "borderColor": look.line,
            "textStyle": {"color": look.ink, "fontSize": 12},
        },
        "series": [
            {
                "type": "graph",
                "layout": "none",
                "preserveAspect": True,
                "data": nodes,
                "links": links,
                "left": 34,
                "right": 34,
                "top": 30,
                "bottom": 30,
                "emphasis": {"focus": "adjacency", "label": {"show": True}},
            }
        ],
    }


def _node(
    i: int, place: tuple[float, float], run: History, look: Look, away: int, accuracy: float | None
) -> dict[str, Any]:
    role, many = run.clients.role(i), len(run.clients.roles)
    size = 34 if many <= 14 else 24 if many <= 40 else 13
    words = [f"client {i}: {MEANINGS[role]}"]
    if accuracy is not None:
        words.append(f"accuracy {100 * accuracy:.1f} %")
    if away:
        words.append(f"{'gone' if away >= GONE else 'late'}: no answer for {away} round{'s' * (away > 1)}")
    border = {"borderColor": look.alarm, "borderWidth": 3, "borderType": [4, 3] if away < GONE else "solid"}
    own = {"borderColor": look.ink, "borderWidth": 3} if len(run.clients.own) < many and i in run.clients.own else {}
    return {
        "id": str(i),
        "name": str(i),
        "x": round(1000 * place[0], 1),  # ECharts rounds level edges to whole units: they must be small
        "y": round(1000 * place[1], 1),
        "tooltip": {"formatter": "<br>".join(words)},
        "symbolSize": size,
        "itemStyle": {"color": look.card if away else look.roles[role], **(border if away else own)},
        "label": {
            "show": many <= 40,
            "formatter": f"{i} ✕" if away >= GONE else str(i),
            "color": look.alarm if away else "#ffffff" if role == "L" and not look.dark else "#10161d",
            "fontSize": 13 if many <= 14 else 10,
            "fontWeight": 600,
        },
    }


def _link(i: int, j: int, mixing: dict[tuple[int, int], float], look: Look, broken: bool, few: bool) -> dict[str, Any]:
    heard = [mixing[pair] for pair in ((i, j), (j, i)) if pair in mixing]
    weight = sum(heard) / len(heard) if heard else 0.0
    words = [f"{a} takes {100 * mixing[a, b]:.1f} % from {b}" for a, b in ((i, j), (j, i)) if (a, b) in mixing]
    return {
        "source": str(i),
        "target": str(j),
        "tooltip": {"formatter": "<br>".join(words) or f"{i} and {j} are neighbours"},
        "lineStyle": {
            "width": round((1 + 18 * weight) * (1 if few else 0.4), 2) if heard else 1.2,
            "color": look.alarm if broken else look.faint,
            "type": "dashed" if broken else "solid",
            "opacity": 0.5,
        },
    }


def _latest(run: History) -> dict[int, float]:
    """The last accuracy of every own client."""
    rounds, values = run.table("accuracy")
    if not rounds:
        return {}
    return {i: float(a) for i, a in zip(run.clients.own, values[-1], strict=False) if np.isfinite(a)}


@lru_cache(maxsize=32)
def _layout(clients: int, edges: tuple[tuple[int, int], ...]) -> Place:
    """Few on a circle, where every edge is seen; more of them by springs, where neighbours lie together."""
    circle = {
        i: (float(np.sin(a)), float(-np.cos(a))) for i, a in enumerate(np.arange(clients) * 2 * np.pi / max(1, clients))
    }
    if clients <= 14 or clients > 400 or len(edges) > 3000:
        return circle
    graph: nx.Graph[int] = nx.Graph(edges)
    graph.add_nodes_from(range(clients))
    found = nx.spring_layout(graph, pos=circle, seed=0, iterations=60, k=1.6 / clients**0.5)
    return {i: (float(x), float(y)) for i, (x, y) in sorted(found.items())}
