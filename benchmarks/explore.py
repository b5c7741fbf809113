"""Variants of the tuned recipe, compared on training samples that are put aside: the test images see none of it.

    python benchmarks/explore.py fashion-mnist --cells 0.5:100,0.1:0.1 --seeds 0,1,2 --out found.jsonl \\
        tuned= plain=method:mixmatch weak=augment.strong:0.25,generator.kind:none

A variant is a name and the fields in which it differs. Cells (labelled share : skew) and seeds of a variant train as
one stack where a GPU gains from it. As many labels are given as without the samples put aside. A line is printed, and
added to the file, for each variant.
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean

from semidfl.config import Config, override
from semidfl.data.sources import outline
from semidfl.recipes import tuned
from semidfl.terminal import Progress
from semidfl.together import at_once, run_together

ASIDE = 1 / 6
"""of the training samples"""


def variant_config(dataset: str, ratio: float, alpha: float, seed: int, fields: dict[str, str]) -> Config:
    """One run of a variant."""
    count = len(outline(dataset).train_labels)
    aside = round(count * ASIDE)
    fixed = {
        "data.held_out": aside,
        "data.ratio": ratio * count / (count - aside),
        "compute.checkpoint_every": 0,
        "compute.report": False,
    }
    method = fields.get("method", "semidfl")
    others = {path: value for path, value in fields.items() if path != "method"}
    return override(tuned(dataset, ratio, alpha, method=method, seed=seed), fixed | others)


def accuracies(configs: list[Config]) -> list[float]:
    """In percent, mean over the clients."""
    found, size = [], at_once(configs[0])
    for start in range(0, len(configs), size):
        group, quiet = configs[start : start + size], Progress(plain=True, stream=io.StringIO())
        with tempfile.TemporaryDirectory() as place:
            found += run_together(group, [Path(place) / str(number) for number in range(len(group))], quiet)
    return [100 * result.accuracy for result in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--cells", required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("variants", nargs="+", metavar="NAME=FIELD:VALUE,…")
    asked = parser.parse_args()
    cells = [tuple(map(float, cell.split(":"))) for cell in asked.cells.split(",")]
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    for variant in asked.variants:
        started = time.monotonic()
        name, _, text = variant.partition("=")
        fields = dict(pair.split(":", 1) for pair in text.split(",") if pair)
        found = accuracies([variant_config(asked.dataset, r, a, seed, fields) for r, a in cells for seed in seeds])
        rows = [found[k : k + len(seeds)] for k in range(0, len(found), len(seeds))]
        line = {"dataset": asked.dataset, "variant": name, "fields": fields, "seeds": seeds, "cells": cells}
        with asked.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line | {"accuracy": rows, "seconds": time.monotonic() - started}) + "\n")
        words = [
            f"r={r:g} a={a:g}: {fmean(row):.2f} ({' '.join(f'{x:.1f}' for x in row)})"
            for (r, a), row in zip(cells, rows, strict=True)
        ]
        print(f"{name:24} {'  '.join(words)}  {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
