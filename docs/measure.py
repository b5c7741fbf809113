"""Measures what docs/robust.md and docs/bandwidth.md state, and writes the tables into those pages.

python docs/measure.py robust|bandwidth [--seeds N]    # runs what is missing, in runs/measure

A table stands between <!-- table NAME --> and <!-- end --> of a page. All runs are of digits, on a CPU in minutes.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from semidfl import recipes
from semidfl.config import Config, config_hash, override
from semidfl.record.folder import read_records
from semidfl.report.plans import Cell, Plan
from semidfl.reproduce import finished, run_missing

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "measure"
Values = dict[str, Any]
Measure = Callable[[Mapping[str, Any], Path], float]

RULES: dict[str, Values] = {
    "none": {},
    "clip": {"robust": "clip"},
    "clip 0.15": {"robust": "clip", "clip": 0.15},
    "trimmed-mean": {"robust": "trimmed-mean", "trim": 2},
    "median": {"robust": "median"},
}
ATTACKS: dict[str, Values] = {
    "nobody": {},
    "sign-flip": {"attack.kind": "sign-flip"},
    "noise": {"attack.kind": "noise", "strength": 5.0},
    "label-flip": {"attack.kind": "label-flip"},
    "nan": {"attack.kind": "nan"},
}
TWO = {"attack.count": 2}
DENSE = {"topology": "random-regular", "degree": 6}
SHORT = {"evaluation.every": 5, "evaluation.last": 3, "checkpoint_every": 0}


def cell(row: Sequence[str], column: str, base: Callable[[int], Config], values: Values, seeds: int) -> Cell:
    configs = tuple(override(base(seed), values) for seed in range(seeds))
    data = configs[0].data
    return Cell(tuple(row), column, "", data.dataset, data.ratio, data.alpha, configs[0].graph.topology, configs)


# --- robust -----------------------------------------------------------------------------------------------------------


def supervised(alpha: float, **values: Any) -> Callable[[int], Config]:
    """All samples labelled: what is measured is mixing alone."""
    return lambda seed: override(
        recipes.paper("digits", alpha=alpha, method="dfl-ub", seed=seed), SHORT | {"rounds": 30} | values
    )


def semi(seed: int) -> Config:
    """The demo without its generator, near IID: six of ten clients have no label."""
    values = SHORT | DENSE | {"rounds": 60, "pseudo.start": 20, "generator.kind": "none", "alpha": 100.0}
    return override(recipes.demo(seed=seed), values)


def robust(seeds: int) -> dict[str, tuple[Plan, Mapping[str, Measure]]]:
    mixing = [
        cell((f"{alpha:g}", rule), attack, supervised(alpha, **DENSE), RULES[rule] | TWO | ATTACKS[attack], seeds)
        for alpha in (100.0, 0.1)
        for rule in RULES
        for attack in ATTACKS
    ]
    # Client 2 of fig1 has both as neighbours: two of the five in its neighbourhood.
    beside = {"attack.kind": "sign-flip", "who": "0,8"}
    sparse = [
        cell((rule,), name, supervised(100.0), RULES[rule] | {"trim": 1} | attack, seeds)
        for rule in RULES
        for name, attack in {"nobody": {}, "one (client 0)": beside | {"who": "0"}, "two (0 and 8)": beside}.items()
    ]
    # With apl nobody else's classifier labels a client's samples, so lies come in by mixing alone.
    rules = RULES | {"clip, own labels": RULES["clip"] | {"pseudo.kind": "apl"}}
    semi_supervised = [
        cell((rule,), attack, semi, rules[rule] | TWO | ATTACKS[attack], seeds)
        for rule in rules
        for attack in ("nobody", "sign-flip", "noise")
    ]
    honest: Mapping[str, Measure] = {"": lambda s, _: 100 * float(s.get("honest_accuracy", s["accuracy"]) or 0)}
    return {
        "mixing": (Plan("mixing", "", ("α", "rule"), tuple(mixing)), honest),
        "sparse": (Plan("sparse", "", ("rule",), tuple(sparse)), honest),
        "semi": (Plan("semi", "", ("rule",), tuple(semi_supervised)), honest),
    }


# --- bandwidth --------------------------------------------------------------------------------------------------------

WIRES: dict[str, Values] = {
    "fp32": {},
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
    "bf16, no feedback": {"dtype": "bf16", "feedback": False},
    "int8": {"dtype": "int8"},
    "int8, no feedback": {"dtype": "int8", "feedback": False},
    "fp32, generator int8": {"generator_dtype": "int8"},
    "fp32, generator every 5 rounds": {"generator_every": 5},
    "fp16, generator int8 every 5 rounds": {"dtype": "fp16", "generator_dtype": "int8", "generator_every": 5},
}


def short_demo(seed: int) -> Config:
    """The demo with 40 rounds; the generator takes a step more in each and is asked for samples once."""
    values = {"rounds": 40, "pseudo.start": 15, "generator.iterations": 3, "generator.start": 30, "generator.every": 50}
    return override(recipes.demo(seed=seed), SHORT | values | {"generator.samples": 20, "generator.validation": 20})


def bandwidth(seeds: int) -> dict[str, tuple[Plan, Mapping[str, Measure]]]:
    cells = [cell((name,), "", short_demo, values, seeds) for name, values in WIRES.items()]
    columns: Mapping[str, Measure] = {
        "kB a round": lambda s, _: s["bytes_per_client"] / s["rounds"] / 1e3,
        "accuracy in %": lambda s, _: 100 * float(s["accuracy"] or 0),
        "generator's loss": lambda _, folder: fmean(
            fmean(r["generator_loss"]) for r in read_records(folder)[-5:] if "generator_loss" in r
        ),
    }
    return {"bytes": (Plan("bytes", "", ("sent as",), tuple(cells)), columns)}


# --- tables -----------------------------------------------------------------------------------------------------------


def table(plan: Plan, measures: Mapping[str, Measure]) -> str:
    """A row of the plan a line; the columns are its own, or of a single one the measures."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for c in plan.cells:
        folders = [RUNS / config_hash(config) for config in c.configs]
        for name, measure in measures.items():
            found = [measure(summary, f) for f in folders if (summary := finished(f)) is not None]
            rows.setdefault(c.row, {})[c.column or name] = text_of(found)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [
        "| " + " | ".join([*plan.heads, *columns]) + " |",
        "|" + " --- |" * len(plan.heads) + " ---: |" * len(columns),
    ]
    return "\n".join([*lines, *("| " + " | ".join([*row, *found.values()]) + " |" for row, found in rows.items())])


def text_of(values: Sequence[float]) -> str:
    digits = 3 if max(values) < 1 else 0 if min(values) > 100 else 1
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 and stdev(values) else ""
    return f"{fmean(values):.{digits}f}{spread}"


def write(page: Path, name: str, text: str) -> None:
    start, end = f"<!-- table {name} -->\n", "<!-- end -->"
    before, _, rest = page.read_text().partition(start)
    assert end in rest, f"{page} has no place for the table {name}"
    page.write_text(before + start + text + "\n" + rest[rest.index(end) :])


def main(words: list[str]) -> None:
    pages = {"robust": robust, "bandwidth": bandwidth}
    if not words or words[0] not in pages or (len(words) > 1 and (words[1] != "--seeds" or not words[2:3])):
        raise SystemExit(__doc__)
    seeds = int(words[2]) if len(words) > 1 else {"robust": 2, "bandwidth": 1}[words[0]]
    for name, (plan, measures) in pages[words[0]](seeds).items():
        run_missing(plan, RUNS)
        text = table(plan, measures)
        print(f"\n{text}\n")
        write(HERE / f"{words[0]}.md", name, text)


if __name__ == "__main__":
    main(sys.argv[1:])
