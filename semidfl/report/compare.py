"""`semidfl compare`: finished runs side by side. Runs that differ in nothing but the seed are one group."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semidfl.config import Config, config_hash, from_toml, leaves
from semidfl.errors import RunFolderError, SemiDFLError
from semidfl.record.card import tested_clients
from semidfl.record.folder import read_records
from semidfl.report.stats import bootstrap, holm, wilcoxon

__all__ = ["Comparison", "Group", "Pair", "Run", "compare", "draw", "gather", "text_of", "to_json"]

_FIELDS_IN_LABEL = 3


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    config: Config
    summary: dict[str, Any]

    @property
    def accuracies(self) -> npt.NDArray[np.float64]:
        """Of every client, in 0..1."""
        return np.array(tested_clients(self.summary), dtype=np.float64)


@dataclass(frozen=True)
class Group:
    """Runs of one config, one a seed."""

    label: str
    runs: dict[int, Run]
    """by seed, ascending"""

    def values(self, seeds: Iterable[int] | None = None) -> npt.NDArray[np.float64]:
        """Accuracies in percent of all clients, seed after seed."""
        chosen = self.runs if seeds is None else seeds
        return np.concatenate([100 * self.runs[seed].accuracies for seed in chosen])


@dataclass(frozen=True)
class Row:
    """A group in numbers; accuracies in percent."""

    label: str
    seeds: list[int]
    mean: float
    low: float
    """of the bootstrap 95 % interval"""
    high: float
    std_over_clients: float
    std_over_seeds: float | None
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Two groups against each other, on the same clients and seeds; the second less the first, in points."""

    first: str
    second: str
    pairs: int
    seeds: list[int]
    difference: float
    low: float
    """of the bootstrap 95 % interval"""
    high: float
    p: float
    """Wilcoxon's signed-rank test, two-sided"""
    p_holm: float
    """corrected for the number of pairs of groups"""


@dataclass(frozen=True)
class Comparison:
    """What `compare` finds."""

    groups: list[Row]
    pairs: list[Pair]


def gather(folders: Sequence[str | Path]) -> list[Group]:
    """The groups of these runs, in the order of their first run; refused where no fair comparison is possible."""
    runs: dict[str, dict[int, Run]] = {}
    for run in map(_read, folders):
        alike = runs.setdefault(config_hash(replace(run.config, seed=0)), {})
        if run.config.seed in alike and run.summary.get("name") != alike[run.config.seed].summary.get("name"):
            raise SemiDFLError(
                f"{run.folder} and {alike[run.config.seed].folder} are peers of one run, not two runs: "
                "`semidfl watch` and `semidfl report` show them side by side"
            )
        if run.config.seed in alike:
            raise SemiDFLError(f"{run.folder} and {alike[run.config.seed].folder} are the same run: give it once")
        alike[run.config.seed] = run
    if len(runs) < 2:
        raise SemiDFLError(f"a comparison needs runs of at least 2 configs (apart from the seed), not {len(runs)}")
    _refuse_unequal([run for alike in runs.values() for run in alike.values()])
    labels = _labels({key: next(iter(alike.values())).config for key, alike in runs.items()})
    return [Group(labels[key], dict(sorted(alike.items()))) for key, alike in runs.items()]


def _read(folder: str | Path) -> Run:
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} is not a run folder: config.toml is missing")
    if not (folder / "summary.json").is_file():
        raise RunFolderError(f"the run {folder} is not finished: semidfl resume {folder}")
    try:
        config = from_toml((folder / "config.toml").read_text(encoding="utf-8"))
        run = Run(folder, config, json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder} cannot be read: {error}") from None
    if not isinstance(run.summary, dict):
        raise RunFolderError(f"{folder}/summary.json is not one of a run")
    if not len(run.accuracies):
        raise RunFolderError(f"{folder} has no result to compare: that peer has no held-out labels")
    return run


def _refuse_unequal(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs:
        if len(run.accuracies) != len(first.accuracies):
            sizes = f"{len(first.accuracies)} clients, {run.folder} has {len(run.accuracies)}"
            raise SemiDFLError(f"{first.folder} has {sizes}: only the same clients can be compared")


def _labels(configs: dict[str, Config]) -> dict[str, str]:
    """What tells the groups apart, in a few words."""
    fields = {key: dict(leaves(replace(config, name="run", seed=0))) for key, config in configs.items()}
    paths = [path for path in next(iter(fields.values())) if not path.startswith("compute.")]
    differ = [path for path in paths if len({f[path] for f in fields.values()}) > 1]
    shown: list[str] = []
    for path in differ:  # the first few, and of the others those that tell apart what was alike so far
        kinds = {len({tuple(f[p] for p in some) for f in fields.values()}) for some in (shown, [*shown, path])}
        if len(shown) < _FIELDS_IN_LABEL or len(kinds) > 1:
            shown.append(path)
    labels = {key: ", ".join(_words(path, f[path]) for path in shown) for key, f in fields.items()}
    if len(set(labels.values())) < len(labels) or not shown:
        return {key: f"{label or fields[key]['method']} [{key[:6]}]" for key, label in labels.items()}
    return labels


def _words(path: str, value: object) -> str:
    if path in ("method", "data.dataset", "graph.topology"):
        return str(value)
    return f"{path.rpartition('.')[2]} = {value:g}" if isinstance(value, float) else f"{path} = {value}"


def compare(groups: Sequence[Group]) -> Comparison:
    """Every group by itself and every two against each other."""
    found = [_pair(one, two) for one, two in combinations(groups, 2)]
    corrected = holm([pair.p for pair in found])
    pairs = [replace(pair, p_holm=p) for pair, p in zip(found, corrected, strict=True)]
    return Comparison([_row(group) for group in groups], pairs)


def _row(group: Group) -> Row:
    runs = list(group.runs.values())
    means = [100 * float(run.accuracies.mean()) for run in runs]
    values = group.values()
    low, high = bootstrap(values)
    return Row(
        group.label,
        list(group.runs),
        float(values.mean()),
        low,
        high,
        float(np.mean([100 * run.accuracies.std() for run in runs])),
        float(np.std(means, ddof=1)) if len(means) > 1 else None,
        max(int(run.summary["rounds"]) for run in runs),
        sum(float(run.summary["seconds"]) for run in runs),
    )


def _pair(one: Group, two: Group) -> Pair:
    seeds = [seed for seed in one.runs if seed in two.runs]
    if not seeds:
        theirs = f"{list(one.runs)} and {list(two.runs)}"
        raise SemiDFLError(f"{one.label} and {two.label} have no seed in common ({theirs}): pairs need the same seed")
    first, second = one.values(seeds), two.values(seeds)
    differences = second - first
    low, high = bootstrap(differences)
    p = wilcoxon(second, first)
    return Pair(one.label, two.label, len(first), seeds, float(differences.mean()), low, high, p, p)


# --- output -----------------------------------------------------------------------------------------------------------


def to_json(comparison: Comparison) -> str:
    """The comparison for other programs."""
    return json.dumps(asdict(comparison), indent=2, ensure_ascii=False)


def text_of(comparison: Comparison) -> str:
    """The comparison for people."""
    heads = ["runs", "seeds", "accuracy %", "95 % interval", "std clients", "std seeds", "rounds", "seconds"]
    rows = [
        [
            row.label,
            str(len(row.seeds)),
            f"{row.mean:.2f}",
            f"{row.low:.2f} … {row.high:.2f}",
            f"{row.std_over_clients:.2f}",
            "" if row.std_over_seeds is None else f"{row.std_over_seeds:.2f}",
            str(row.rounds),
            f"{row.seconds:.0f}",
        ]
        for row in comparison.groups
    ]
    pair_heads = ["paired difference", "pairs", "points", "95 % interval", "Wilcoxon p", "p (Holm)"]
    pairs = [
        [
            f"{p.second} − {p.first}",
            str(p.pairs),
            f"{p.difference:+.2f}",
            f"{p.low:+.2f} … {p.high:+.2f}",
            f"{p.p:.3g}",
            f"{p.p_holm:.3g}",
        ]
        for p in comparison.pairs
    ]
    note = "Pairs are the same client and seed. Clients of one run share their models: trust p only over several seeds."
    return "\n".join([*_aligned([heads, *rows]), "", *_aligned([pair_heads, *pairs]), "", note])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        numbers = "  ".join(word.rjust(width) for word, width in zip(rest, widths[1:], strict=True))
        lines.append(f"{first.ljust(widths[0])}  {numbers}".rstrip())
    return lines


def draw(groups: Sequence[Group], out: Path) -> list[Path]:
    """The accuracy curves over each other: OUT/compare.svg and .png."""
    from semidfl.report.figures import curves_figure, save

    return save(curves_figure({g.label: [_curve(run) for run in g.runs.values()] for g in groups}), out / "compare")


def _curve(run: Run) -> tuple[list[int], npt.NDArray[np.float64]]:
    tested = [record for record in read_records(run.folder) if "accuracy" in record]
    if not tested:
        raise RunFolderError(f"{run.folder} has no test in its metrics.jsonl: there is no curve to draw")
    return [r["round"] for r in tested], np.array([[x or 0.0 for x in r["accuracy"]] for r in tested])
