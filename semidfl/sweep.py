"""`semidfl sweep`: search config fields for the best run, by accuracy on generated data, never on the test set.

The judge is what the clients have themselves: each classifier's accuracy on its own generated validation samples
(a_i of Eq. 12), mean over the clients and over the last rounds. `halving` trains all trials for a few rounds, keeps the
best third, trains these further, and so on; a trial goes on from its checkpoint. Test accuracy stands in the table
to be read, and decides nothing.
"""

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from semidfl.config import Config, config_hash, full_path, leaves
from semidfl.data.own import with_sites
from semidfl.data.sources import load
from semidfl.errors import ConfigError, SemiDFLError
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import finish, keep, prepare, save_checkpoint, take_up, train
from semidfl.methods import find_method
from semidfl.record.atomic import replacing
from semidfl.record.clients import write_clients
from semidfl.record.folder import read_records
from semidfl.record.pace import Pace
from semidfl.together import open_folder

__all__ = ["HELP", "Trial", "plan", "rungs", "sweep"]

HELP = """usage: semidfl sweep RECIPE --field VALUES … [--search grid|random|halving] [--trials N] [--option …]

  --field a,b,c        values to try; a field with one value is the same for all trials
  --field LOW..HIGH    any number between (random, halving); LOW..HIGH/log: evenly in its logarithm
  --search grid        every combination (default)
           random      --trials N of them, drawn at random
           halving     as random; after 1/9 and 1/3 of the rounds only the best third goes on
  --engine ray         spread the trials over a Ray cluster (--ray-address HOST:PORT, else this machine)
  --name NAME          of the folder: runs/NAME with a folder a trial, sweep.md and sweep.csv (sweep)

Trials are ranked by accuracy on generated data. What is done is not run again; stopped, the same command goes on."""

_THIRD = 3
_LAST = 3
"""rounds over which the judge's figure is a mean"""
_MOST = 10_000


@dataclass
class Trial:
    """One combination of values and what has become of it."""

    values: dict[str, str]
    config: Config
    rounds: int = 0
    judged: float = math.nan
    tested: float = math.nan
    seconds: float = 0.0
    failed: str = ""
    folder: Path = field(default_factory=Path)


def plan(make: Callable[[dict[str, str]], Config], flags: Mapping[str, str]) -> tuple[list[Trial], str]:
    """The trials that flags ask for, and the kind of search."""
    values = dict(flags)
    search, trials = values.pop("search", "grid"), values.pop("trials", "")
    if search not in ("grid", "random", "halving"):
        raise ConfigError(f"--search = {search!r} is not legal: grid, random or halving")
    if trials and (search == "grid" or not (trials.isdecimal() and 1 <= int(trials) <= _MOST)):
        raise ConfigError(
            f"--trials = {trials!r} is not legal: a whole number from 1 to {_MOST}, with random or halving"
        )
    values = {full_path(name): value for name, value in values.items()}
    tried = {path: value for path, value in values.items() if "," in value or _range(value)}
    fixed = {"name": "sweep"} | {path: value for path, value in values.items() if path not in tried}
    if not tried:
        raise ConfigError("nothing to search: give some field several values, a,b,c, or a range, LOW..HIGH")
    base = make(fixed)
    if "adatest" in (base.aggregation.weights, *tried.get("aggregation.weights", "").split(",")):
        raise ConfigError("aggregation.weights = 'adatest' judges by test images, which must not choose settings")
    combinations = _grid(tried) if search == "grid" else _drawn(tried, int(trials or 9), base.seed)
    found = [Trial(chosen, make(fixed | chosen)) for chosen in combinations]
    if len(found) > _MOST:
        raise ConfigError(f"{len(found)} trials are too many: at most {_MOST}")
    unique = {config_hash(trial.config): trial for trial in found}
    if search == "halving" and "rounds" in tried:
        raise ConfigError("--search halving compares trials of as many rounds: rounds cannot be searched")
    if search == "halving" and (blind := [t for t in unique.values() if not _generates(t.config)]):
        config = blind[0].config
        what = f"method {config.method!r} with generator {config.generator.kind!r}"
        what += f" and weights {config.aggregation.weights!r}"
        raise ConfigError(f"--search halving judges by accuracy on generated data, and {what} measures none")
    return list(unique.values()), search


def _generates(config: Config) -> bool:
    makes = getattr(find_method(config.method), "generates", False) is not False and config.generator.kind != "none"
    return makes and config.aggregation.weights != "constant"  # which asks nobody to judge


def _range(value: str) -> tuple[float, float, bool] | None:
    """LOW..HIGH or LOW..HIGH/log."""
    ends, _, scale = value.partition("/")
    low, dots, high = ends.partition("..")
    try:
        found = float(low), float(high)
    except ValueError:
        return None
    if not dots or scale not in ("", "log") or not found[0] < found[1] or (scale and found[0] <= 0):
        raise ConfigError(
            f"{value!r} is no range: LOW..HIGH or LOW..HIGH/log, with LOW below HIGH (and above 0 with log)"
        )
    return *found, scale == "log"


def _grid(tried: Mapping[str, str]) -> list[dict[str, str]]:
    if ranges := [path for path, value in tried.items() if _range(value)]:
        raise ConfigError(f"{ranges[0]} is a range: a grid needs values, a,b,c (or --search random)")
    lists = [[word.strip() for word in value.split(",")] for value in tried.values()]
    return [dict(zip(tried, words, strict=True)) for words in itertools.product(*lists)]


def _drawn(tried: Mapping[str, str], trials: int, seed: int) -> list[dict[str, str]]:
    random = np.random.default_rng((seed, 0x7377656570))  # "sweep"
    whole = {path for path, value in leaves(Config()) if isinstance(value, int) and not isinstance(value, bool)}
    return [{path: _draw(value, path in whole, random) for path, value in tried.items()} for _ in range(trials)]


def _draw(value: str, whole: bool, random: np.random.Generator) -> str:
    ends = _range(value)
    if ends is None:
        words = [word.strip() for word in value.split(",")]
        return words[int(random.integers(len(words)))]
    low, high, log = ends
    x = math.exp(random.uniform(math.log(low), math.log(high))) if log else float(random.uniform(low, high))
    return str(round(x)) if whole else f"{x:.4g}"


def rungs(configs: Sequence[Config]) -> list[int]:
    """The rounds after which the best third goes on; none before there is anything to judge all of them by."""
    first, rounds = max(config.generator.start for config in configs) + _LAST - 1, configs[0].rounds
    steps = [max(first, math.ceil(rounds / _THIRD**k)) for k in (2, 1)]
    return [*dict.fromkeys(r for r in steps if r < rounds), rounds]


def sweep(make: Callable[[dict[str, str]], Config], flags: Mapping[str, str]) -> list[Path]:
    """Runs what is missing, says what has ended, writes the table; returns its files."""
    trials, search = plan(make, flags)
    folder = Path("runs") / trials[0].config.name
    for trial in trials:
        trial.folder = (folder / config_hash(trial.config)).resolve()
    print(f"{len(trials)} trials, kept in {folder}", flush=True)
    try:
        with _workers(trials[0].config) as work:
            _search(trials, rungs([trial.config for trial in trials]) if search == "halving" else [], work)
    finally:  # stopped, too: of whatever is known
        files = _write(folder, trials)
    if all(trial.failed for trial in trials):
        raise SemiDFLError(f"all trials failed; the first: {trials[0].failed}")
    return files


Work = Callable[[Sequence[tuple[Config, Path, int]]], Iterator[tuple[int, Any]]]


def _search(trials: Sequence[Trial], steps: Sequence[int], work: Work) -> None:
    """To each rung in turn, with ever fewer; without rungs, all to the end."""
    going = list(trials)
    for rung, until in enumerate(steps or [0]):
        jobs = [(t.config, t.folder, until or t.config.rounds) for t in going]
        for done, (number, found) in enumerate(work(jobs), 1):
            trial = going[number]
            if isinstance(found, SemiDFLError):
                trial.failed = str(found)
            else:
                trial.rounds, trial.judged, trial.tested, trial.seconds = found
            print(f"{done}/{len(going)}  {_line(trial)}", flush=True)
        going = _ranked([t for t in going if not t.failed])
        if rung < len(steps) - 1:
            going = going[: math.ceil(len(going) / _THIRD)]
            print(f"after round {until}: {len(going)} go on", flush=True)


@contextmanager
def _workers(config: Config) -> Iterator[Work]:
    """Who trains: this process, trial by trial, or the tasks of a cluster."""
    if config.compute.engine == "memory":
        yield lambda jobs: ((number, _tried(*job)) for number, job in enumerate(jobs))
        return
    from semidfl.cluster.many import spread
    from semidfl.cluster.start import cluster, place_of

    with cluster(config) as ray:
        place = place_of(ray, config)
        yield lambda jobs: spread(ray, place, advance, [(place.config(c), folder, until) for c, folder, until in jobs])


def _tried(config: Config, folder: Path, until: int) -> Any:
    try:
        return advance(config, folder, until)
    except SemiDFLError as error:
        return error


def advance(config: Config, folder: Path, until: int) -> tuple[int, float, float, float]:
    """Trains a trial until a round, from wherever it stands: rounds done, judged, tested, seconds."""
    records = read_records(folder)
    if len(records) < until or (until == config.rounds and not (folder / "summary.json").is_file()):
        data = load(config.data.dataset, config.data, config.seed)
        config = with_sites(config, data)
        method, cohort = prepare(config, data)
        with open_folder(config, folder) as kept:
            rounds = train(config, method, cohort, MemoryExchange(cohort.ids), take_up(kept, config, cohort) + 1)
            write_clients(kept, data.classes, method.setup, cohort)
            pace = Pace(config.compute.checkpoint_every)
            while rounds.t <= until:
                record = next(rounds)
                keep(method, kept, record, lambda: cohort)
                if record["round"] == until or pace.due(record["round"]):
                    with pace.writing():
                        save_checkpoint(config, kept, record["round"], cohort)
            if until == config.rounds:
                finish(config, method, cohort, kept)
            records = kept.records()
    return until, *_figures(records[:until])


def _figures(records: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    judged = [fmean(r["generated_accuracy"]) for r in records if "generated_accuracy" in r][-_LAST:]
    tested = [fmean(r["accuracy"]) for r in records if "accuracy" in r][-1:]
    return (*(fmean(x) if x else math.nan for x in (judged, tested)), sum(r["seconds"]["round"] for r in records))


# --- the table --------------------------------------------------------------------------------------------------------


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best first: who went furthest, then by the judge; where nobody judges, in the order asked for."""
    return sorted(trials, key=lambda t: (-t.rounds, -t.judged if math.isfinite(t.judged) else math.inf))


def _line(trial: Trial) -> str:
    words = " ".join(f"{path}={value}" for path, value in trial.values.items())
    if trial.failed:
        return f"{words}  failed: {trial.failed}"
    judged = "not judged" if math.isnan(trial.judged) else f"generated {trial.judged:.3f}"
    tested = "not tested" if math.isnan(trial.tested) else f"test {trial.tested:.3f}"
    return f"{words}  round {trial.rounds}  {judged}  {tested}  {trial.seconds:.0f} s"


def _cells(t: Trial) -> list[str]:
    percents = ["" if math.isnan(x) else f"{100 * x:.2f}" for x in (t.judged, t.tested)]
    return [*t.values.values(), str(t.rounds), *percents, f"{t.seconds:.1f}", t.folder.name, t.failed]


def _write(folder: Path, trials: Sequence[Trial]) -> list[Path]:
    fields = list(trials[0].values)
    heads = ["rank", *fields, "rounds", "generated %", "test %", "seconds", "run", "note"]
    rows = [[str(rank), *_cells(trial)] for rank, trial in enumerate(_ranked(trials), 1)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    lines = [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]
    note = "Ranked by rounds survived, then by accuracy on generated data; test accuracy decides nothing."
    if any(math.isnan(trial.judged) and not trial.failed for trial in trials):
        note += " What nobody has judged stands in the order asked for."
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / "sweep.md": "\n".join([*lines, "", note, ""]), folder / "sweep.csv": text.getvalue()}
    for path, content in files.items():
        with replacing(path) as temp:
            temp.write_text(content, encoding="utf-8")
    return list(files)
