"""Variants of the tuned recipe, compared on training samples that are put aside: the test images see none of it.

    python benchmarks/explore.py fashion-mnist --cells 0.5:100,0.1:0.1 --seeds 0,1,2 --out found.jsonl \\
        tuned= plain=method:mixmatch weak=augment.strong:0.25,generator.kind:none

A variant is a name and the fields in which it differs. Cells (labelled share : skew) and seeds of a variant train as
one stack where a GPU gains from it, else one after the other. As many labels are given as without the samples put
aside, or all that are left. Of each run a line is printed as it ends: its accuracy and, of the last round with
pseudo-labels, how many there were and how many of them right. The file gets the same with all tests.
"""

import argparse
import io
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semidfl.config import Config, override
from semidfl.data.sources import load, outline
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.recipes import tuned
from semidfl.record.folder import read_records
from semidfl.terminal import Progress
from semidfl.together import at_once, run_together

ASIDE = 1 / 6
"""of the training samples"""

Records = list[dict[str, Any]]


def variant_config(dataset: str, ratio: float, alpha: float, seed: int, fields: dict[str, str]) -> Config:
    """One run of a variant."""
    count = len(outline(dataset).train_labels)
    aside = round(count * ASIDE)
    fixed = {
        "data.held_out": aside,
        "data.ratio": min(100.0, ratio * count / (count - aside)),
        "compute.checkpoint_every": 0,
        "compute.report": False,
    }
    method = fields.get("method", "semidfl")
    others = {path: value for path, value in fields.items() if path != "method"}
    return override(tuned(dataset, ratio, alpha, method=method, seed=seed), fixed | others)


def trained(configs: list[Config]) -> Iterator[tuple[Config, Records, float]]:
    """Each run's rounds, and its seconds, as stacks end."""
    size = at_once(configs[0])
    for start in range(0, len(configs), size):
        group, began = configs[start : start + size], time.monotonic()
        found = [_alone(group[0])] if size == 1 else _as_stack(group)
        for config, records in zip(group, found, strict=True):
            yield config, records, (time.monotonic() - began) / len(group)


def _alone(config: Config) -> Records:
    """Without a folder: ten ResNets' weights take seconds to write."""
    method, cohort = prepare(config, load(config.data.dataset, config.data, config.seed))
    records = list(train(config, method, cohort, MemoryExchange(cohort.ids)))
    del method, cohort
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return records


def _as_stack(group: list[Config]) -> list[Records]:
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(number) for number in range(len(group))]
        run_together(group, folders, Progress(plain=True, stream=io.StringIO()))
        return [read_records(folder) for folder in folders]


def outcome(config: Config, records: Records) -> dict[str, Any]:
    """Accuracy in percent, mean of the last tests over the clients; every test; the last pseudo-labels."""
    tests = {r["round"]: 100 * float(np.mean(r["accuracy"])) for r in records if "accuracy" in r}
    found: dict[str, Any] = {"accuracy": float(np.mean(list(tests.values())[-config.evaluation.last :]))}
    labelled = [r for r in records if np.sum(r.get("pseudo_given", 0))]
    if labelled:
        given, right = (int(np.sum(labelled[-1][name])) for name in ("pseudo_given", "pseudo_right"))
        found |= {"pseudo_labels": given, "right": 100 * right / given}
    return found | {"tests": {t: round(x, 2) for t, x in tests.items()}}


def main(about: str | None = __doc__, dataset: str = "", usual: Mapping[str, str] | None = None) -> None:
    """`dataset`: the only one there is to compare on; `usual`: what all variants have, unless they say otherwise."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if dataset:
        parser.set_defaults(dataset=dataset)
    else:
        parser.add_argument("dataset")
    parser.add_argument("--cells", required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("variants", nargs="+", metavar="NAME=FIELD:VALUE,…")
    asked = parser.parse_args()
    cells = [tuple(map(float, cell.split(":"))) for cell in asked.cells.split(",")]
    runs = [(r, a, int(seed)) for r, a in cells for seed in asked.seeds.split(",")]
    for variant in asked.variants:
        name, _, text = variant.partition("=")
        fields = dict(usual or {}) | dict(pair.split(":", 1) for pair in text.split(",") if pair)
        configs = [variant_config(asked.dataset, *run, fields) for run in runs]
        for (ratio, alpha, seed), (config, records, seconds) in zip(runs, trained(configs), strict=True):
            found = outcome(config, records) | {"seconds": round(seconds, 1)}
            run = {"dataset": asked.dataset, "variant": name, "ratio": ratio, "alpha": alpha, "seed": seed}
            with asked.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(run | {"fields": fields} | found) + "\n")
            labels = f"{found['pseudo_labels']} labels, {found['right']:.1f} % right" if "right" in found else ""
            shown = f"r={ratio:g} a={alpha:g} seed {seed}: {found['accuracy']:.2f}  {labels}  {seconds:.0f} s"
            print(f"{name:20} {shown}", flush=True)


if __name__ == "__main__":
    main()
