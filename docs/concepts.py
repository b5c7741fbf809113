"""Draws the pictures of docs/concepts.md: docs/graph.svg (who talks to whom) and docs/steps.svg (a round)."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from semidfl import topology
from semidfl.config import GraphConfig
from semidfl.report.drawings import draw_graph

HERE = Path(__file__).parent
NEAR, OWN = "#E69F00", "#0072B2"
STEPS = (
    ("1  label", "own and neighbours'\nclassifiers label the\nunlabelled images", True),
    ("2  learn to draw", "a small diffusion model\nlearns from labelled\nand pseudo-labelled", False),
    ("3  draw", "images of all classes:\nthe consensus\ndata space", False),
    ("4  blend", "MixUp of labelled,\npseudo-labelled and\ngenerated images", False),
    ("5  train", "the classifier on\nthe blend", False),
    ("6  mix", "both models with the\nneighbours', by accuracy\non drawn images", True),
)
WIDTH, HEIGHT, GAP = 2.75, 1.5, 0.5


def graph() -> None:
    figure, axes = plt.subplots(figsize=(5.2, 4.4))
    draw_graph(axes, topology.build(GraphConfig("fig1"), 0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.03), ncol=3, frameon=False, markerscale=0.6, fontsize=9)
    save(figure, "graph")


def steps() -> None:
    """Two rows of three: to the right above, back to the left below, and round again."""
    figure, axes = plt.subplots(figsize=(9, 4.8))
    for k, (title, text, shared) in enumerate(STEPS):
        box(axes, *place(k), title, text, NEAR if shared else OWN)
    for k in range(len(STEPS)):
        arrow(axes, k)
    for k in (0, 5):
        x, y = place(k)
        outside = (x - 1.1, y + HEIGHT / 2)
        axes.add_patch(line(outside, (x - 0.04, y + HEIGHT / 2), NEAR, "<|-|>"))
        axes.text(x - 1.15, y + HEIGHT / 2, "neighbours", ha="right", va="center", color="#8a5c00", fontsize=10)
    axes.set_xlim(-2.5, 3 * (WIDTH + GAP))
    axes.set_ylim(-0.2, 2 * HEIGHT + 1.2)
    axes.set_aspect("equal")
    axes.axis("off")
    save(figure, "steps")


def place(k: int) -> tuple[float, float]:
    """Lower left corner of a step's box."""
    column = k if k < 3 else 5 - k
    return column * (WIDTH + GAP), HEIGHT + 0.9 if k < 3 else 0.0


def box(axes: Axes, x: float, y: float, title: str, text: str, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, style, facecolor=colour + "22", edgecolor=colour, lw=1.6))
    axes.text(x + 0.14, y + HEIGHT - 0.14, title, va="top", weight="bold", fontsize=11)
    axes.text(x + 0.14, y + HEIGHT - 0.52, text, va="top", fontsize=9, linespacing=1.35)


def arrow(axes: Axes, k: int) -> None:
    """From a step to the next; the last leads to the first of the next round."""
    (x, y), (u, v) = place(k), place((k + 1) % len(STEPS))
    if y == v:
        right = u > x
        start, end = (x + (WIDTH if right else 0), y + HEIGHT / 2), (u + (0 if right else WIDTH), v + HEIGHT / 2)
    else:
        down = v < y
        start, end = (x + WIDTH / 2, y + (0 if down else HEIGHT)), (u + WIDTH / 2, v + (HEIGHT if down else 0))
        if not down:
            axes.text(x + WIDTH / 2 + 0.12, y + HEIGHT + 0.45, "next round", va="center", fontsize=9, color="#444444")
    axes.add_patch(line(start, end, "#444444", "-|>"))


def line(start: tuple[float, float], end: tuple[float, float], colour: str, style: str) -> FancyArrowPatch:
    return FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=13, color=colour, lw=1.4, shrinkA=1, shrinkB=1)


def save(figure: plt.Figure, name: str) -> None:
    # The same bytes at every call, so that a change in the picture is a change in the file.
    plt.rcParams["svg.hashsalt"] = "semidfl"
    figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    graph()
    steps()
