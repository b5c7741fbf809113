"""Draws docs/demo.png from the run folders that `semidfl demo` leaves: the graph, both curves, generated digits."""

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from semidfl import topology
from semidfl.config import from_toml
from semidfl.record.folder import read_records
from semidfl.report.drawings import draw_graph


def draw_clients(axes: Axes, folder: Path) -> None:
    config = from_toml((folder / "config.toml").read_text())
    draw_graph(axes, topology.build(config.graph, config.seed))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), ncol=3, frameon=False, markerscale=0.6, fontsize=9)
    axes.set_title("ten clients, no server")


def draw_curves(axes: Axes, folders: dict[str, Path]) -> None:
    for (title, folder), colour in zip(folders.items(), ("#888888", "#0072B2"), strict=True):
        tested = [r for r in read_records(folder) if "accuracy" in r]
        rounds = [r["round"] for r in tested]
        values = [[100 * a for a in r["accuracy"]] for r in tested]
        axes.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2, lw=0)
        axes.plot(rounds, [statistics.fmean(v) for v in values], color=colour, label=title)
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy of the clients, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("digits, 5 % labels, very skewed classes")


def main(runs: Path, target: Path) -> None:
    folders = {"labels only": runs / "demo-dfl-lb", "SemiDFL": runs / "demo-semidfl"}
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), gridspec_kw={"width_ratios": [1, 1.4, 1.1]})
    draw_clients(axes[0], folders["SemiDFL"])
    draw_curves(axes[1], folders)
    last = sorted((folders["SemiDFL"] / "samples").glob("*.png"))[-1]
    picture = Image.open(last)
    axes[2].imshow(picture.crop((0, 0, picture.width // 2, picture.height)), cmap="gray", interpolation="nearest")
    axes[2].set_title("drawn by the shared diffusion model,\na row a client, a column a digit", fontsize=10)
    axes[2].axis("off")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
