"""`semidfl reproduce`: a table or figure of the paper, end to end.

It runs what is missing and skips what is done: a run lies in RUNS/HASH, named by the hash of its config, and is done
when its summary.json is there. Stopped at any moment, the same command goes on where it was. The summaries are also
put together in OUT/runs.jsonl, from which the tables can be made again where the runs themselves are not.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from semidfl.config import Config, config_hash, full_path, leaves, override
from semidfl.data.sources import outline
from semidfl.errors import ConfigError, InUseError, RunFolderError, SemiDFLError, Stopped
from semidfl.experiment import Result
from semidfl.overall import Forecast, Overall
from semidfl.record.atomic import explain, replacing
from semidfl.record.summaries import add_summaries, read_summaries
from semidfl.report.extras import need
from semidfl.report.generated import keep_pictures
from semidfl.report.margins import margins, margins_text
from semidfl.report.plans import KINDS, NAMES, Cell, Options, Plan, find_kind, make_plan
from semidfl.report.published import published
from semidfl.report.tables import Entry, Score, Table, converged, csv_text, latex, markdown, score
from semidfl.stop import Stop
from semidfl.together import at_once, likeness, resumable, run_together

__all__ = ["HELP", "options_of", "reproduce"]

HELP = f"""usage: semidfl reproduce NAME [--option value …]

names: {", ".join(KINDS)}

  --dataset NAME,…     mnist, fashion-mnist, cifar10, digits (not in the paper: r = 5, 2) or an .npz; may be repeated
  --ratio R,…          labelled share in percent
  --alpha A,…          skew of the classes
  --method NAME,…      of those that are compared
  --seeds N            seeds 0 to N-1 (3)
  --recipe NAME        paper (default; table-levers: tuned) or tuned
  --rounds N           fewer or more than the recipe's
  --run yes            what RUNS does not have is run (default)
        missing        what neither RUNS nor OUT/runs.jsonl, from whichever machine, has
        no             nothing is run: the table of what either has
  --out DIR            where tables and figures go (results), a file for each data set and recipe: where some methods,
                       cells or fields are chosen, give another, or the whole table is overwritten
  --runs DIR           where the runs are kept (runs/reproduce)
  --kept FILE          where the summaries are put together (OUT/runs.jsonl)
  --engine ray         spread the runs over a Ray cluster (--ray-address HOST:PORT, else this machine)
  --section.field X    any field of `semidfl run --help`, for every run

What is done is not run again; stopped, the same command goes on."""

_LISTS = {"data.dataset": "datasets", "data.ratio": "ratios", "data.alpha": "alphas", "method": "methods"}
_MOST_SEEDS = 1000


def options_of(pairs: Iterable[tuple[str, str]]) -> Options:
    """The options from flags without their dashes; lists may be parted by commas or given as several flags."""
    found: dict[str, Any] = {}
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in _PLAIN:
            found[name] = _PLAIN[name](value)
        elif (path := full_path(name)) in _LISTS:
            found[_LISTS[path]] = tuple(dict.fromkeys([*found.get(_LISTS[path], ()), *_listed(path, value)]))
        elif path in ("seed", "name"):
            raise ConfigError(f"--{path} cannot be set for all runs at once; --seeds N runs seeds 0 to N-1")
        else:
            values[path] = value
    override(Config(), values)  # refuses what is not legal, before anything runs
    return Options(**found, values=values)


def _listed(path: str, value: str) -> tuple[Any, ...]:
    """The items of a list, typed and checked like the config's field."""
    words = [word.strip() for word in value.split(",")]
    return tuple(dict(leaves(override(Config(), {path: word})))[path] for word in words)


def _seeds(value: str) -> int:
    if not (value.isdecimal() and 1 <= int(value) <= _MOST_SEEDS):
        raise ConfigError(f"--seeds = {value!r} is not legal: it must be a whole number from 1 to {_MOST_SEEDS}")
    return int(value)


def _which(value: str) -> str:
    if value not in ("yes", "no", "missing"):
        raise ConfigError(f"--run = {value!r} is not legal: yes, no or missing")
    return value


_PLAIN: dict[str, Callable[[str], Any]] = {
    "seeds": _seeds,
    "recipe": str,
    "out": Path,
    "runs": Path,
    "kept": Path,
    "run": _which,
}


def reproduce(name: str, options: Options, command: str) -> list[Path]:
    """Runs what is missing and writes the table and the figure; returns their files."""
    plan = make_plan(name, options)
    if name.startswith("figure"):
        need("matplotlib")  # not after hours of training
    if not find_kind(name).runs:
        return _drawn(name, options)
    _writable(options.out)
    if options.run == "no" and not any(_found(plan, options).values()):
        where = f"neither {options.runs} nor {options.summaries}"
        raise RunFolderError(f"{where} has a run of this table: there is nothing to write down")
    try:
        if options.run != "no":
            elsewhere = read_summaries(options.summaries) if options.run == "missing" else {}
            run_missing(plan, options.runs, options.summaries, elsewhere)
    except (Stopped, KeyboardInterrupt) as stopped:
        files = _write(plan, options, command)
        missing = sum(summary is None for summary in _found(plan, options).values())
        text = f"stopped; {missing} of {len(plan.runs())} runs are not done, the table so far is in {files[0]}"
        raise Stopped(f"{text}\ngo on with: {command}") from stopped
    return _write(plan, options, command)


def run_missing(
    plan: Plan, runs: Path, kept: Path | None = None, elsewhere: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Runs every config of a plan that has no summary yet, there or `elsewhere`; new ones are also put into `kept`."""
    forecast, todo = Forecast(), []
    for key, config in plan.runs().items():
        if (summary := finished(runs / key) or (elsewhere or {}).get(key)) is None:
            todo.append(config)
        else:
            forecast.learn(config, summary["seconds"])
    total = len(plan.runs())
    if todo and todo[0].compute.engine == "ray":
        from semidfl.cluster.many import run_on_cluster

        print(f"{plan.name}: {total} runs, {total - len(todo)} of them done; they are kept in {runs}", flush=True)
        return run_on_cluster(todo, runs)
    groups = groups_of(todo, runs)
    with Overall([config for group in groups for config in group], total, forecast) as overall, Stop() as stop:
        overall.say(f"{plan.name}: {total} runs, {total - len(todo)} of them done; they are kept in {runs}")
        for group in groups:
            for config, result in _unless_others(group, runs, overall):
                # Two states of all clients and their optimisers: gigabytes a run, and of no use once it has ended.
                shutil.rmtree(runs / config_hash(config) / "checkpoints", ignore_errors=True)
                if kept is not None:
                    add_summaries(kept, [result.summary])
                overall.done(config, result.summary["seconds"], result.summary["accuracy"] or 0)
            if stop.requested:
                raise Stopped("stopped between two runs")
        if left := sum(finished(runs / config_hash(config)) is None for config in overall.others):
            overall.say(f"{left} of {total} runs are left to another process, which will put them into the table")


def _unless_others(group: Sequence[Config], runs: Path, overall: Overall) -> list[tuple[Config, Result]]:
    """Runs those of a group that no other process has done since, or is at."""
    left = list(group)
    while True:
        for config in list(left):
            if (summary := finished(runs / config_hash(config))) is not None:
                overall.elsewhere(config, summary["seconds"])
                left.remove(config)
        if not left:
            return []
        # The table is the report.
        quiet = [replace(config, compute=replace(config.compute, report=False)) for config in left]
        try:
            results = run_together(quiet, [runs / config_hash(config) for config in left], overall.of(left))
            return list(zip(left, results, strict=True))
        except InUseError as error:
            (taken,) = (config for config in left if runs / config_hash(config) == error.path)
            overall.taken(taken)
            left.remove(taken)


def groups_of(todo: Sequence[Config], runs: Path, device: str = "") -> list[list[Config]]:
    """Runs that train together: alike, equally far, and as many as the device gains from."""
    groups: list[list[Config]] = []
    open_ones: dict[tuple[str, int], list[Config]] = {}
    for config in todo:
        size = at_once(config, device)
        # How far it has come counts only among several, and takes seconds to find out for ten ResNets.
        key = likeness(config), resumable(runs / config_hash(config)) if size > 1 else 0
        if len(open_ones.get(key, ())) % size == 0:
            open_ones[key] = []
            groups.append(open_ones[key])
        open_ones[key].append(config)
    return groups


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has ended, else nothing."""
    try:
        summary: dict[str, Any] = dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(f"{folder / 'summary.json'} cannot be read ({error}): remove it to run anew") from None
    if summary.get("config") != folder.name:
        raise RunFolderError(f"{folder} holds a run of another config ({summary.get('config')}): remove it")
    return summary


# --- results ----------------------------------------------------------------------------------------------------------


def _write(plan: Plan, options: Options, command: str) -> list[Path]:
    """The table in three formats, and for a figure the figure too, of whatever is done."""
    found = _found(plan, options)
    add_summaries(options.summaries, [summary for summary in found.values() if summary is not None])
    table = _table(plan, found, command)
    stem = _stem(plan.name, options)
    texts = {".md": markdown(table), ".csv": csv_text(table), ".tex": latex(table)}
    files = [_write_text(stem.with_name(stem.name + suffix), text) for suffix, text in texts.items()]
    if plan.name.startswith("figure"):
        from semidfl.report.figures import accuracy_figure, save

        axis = plan.name.removeprefix("figure-")
        files += save(accuracy_figure(table.entries, axis), stem)
    if find_kind(plan.name).pictures:
        files += keep_pictures(plan.cells, options.runs, options.out)
    return files


def _stem(name: str, options: Options) -> Path:
    """Other data sets and recipes go to other files: so results do not overwrite each other."""
    words = [name, *(Path(dataset).stem for dataset in options.datasets)]
    return options.out / "-".join(words + [options.recipe] * (options.recipe not in ("", find_kind(name).recipe)))


def _found(plan: Plan, options: Options) -> dict[str, dict[str, Any] | None]:
    """The summary of every run, None where it has not ended."""
    elsewhere = read_summaries(options.summaries) if options.run != "yes" else {}
    return {key: finished(options.runs / key) or elsewhere.get(key) for key in plan.runs()}


def _table(plan: Plan, found: dict[str, dict[str, Any] | None], command: str) -> Table:
    summaries = {key: summary for key, summary in found.items() if summary is not None}
    base = {cell.column: _score(cell, summaries) for cell in plan.cells if cell.what == plan.base}
    entries = tuple(_entry(plan, cell, summaries, base.get(cell.column)) for cell in plan.cells)
    return Table(f"{plan.title} ({plan.name})", plan.heads, entries, _notes(plan, entries, found, command))


def _entry(plan: Plan, cell: Cell, summaries: dict[str, dict[str, Any]], base: Score | None) -> Entry:
    done = _done(cell, summaries)
    facts = {
        "table": plan.name,
        "row": cell.what,
        "dataset": cell.dataset,
        "topology": cell.configs[0].graph.topology,
        "ratio": cell.ratio,
        "alpha": cell.alpha,
        "seconds": f"{sum(s['seconds'] for s in done):.1f}",
        "runs": " ".join(map(config_hash, cell.configs)),
    }
    paper = published(plan.name, cell.what, cell.dataset, cell.ratio, cell.alpha)
    return Entry(cell.row, cell.column, facts, _score(cell, summaries), paper, None if cell.what == plan.base else base)


def _done(cell: Cell, summaries: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [summaries[key] for key in map(config_hash, cell.configs) if key in summaries]


def _score(cell: Cell, summaries: Mapping[str, dict[str, Any]]) -> Score | None:
    return score(_done(cell, summaries), len(outline(cell.dataset).classes))


def _notes(
    plan: Plan, entries: tuple[Entry, ...], found: dict[str, dict[str, Any] | None], command: str
) -> tuple[str, ...]:
    done = [summary for summary in found.values() if summary is not None]
    seeds = max(len(cell.configs) for cell in plan.cells)
    notes = [
        "Test accuracy in %, of every client's model after aggregation, mean of the last tests: mean ± standard "
        "deviation over the clients ± standard deviation over the seeds (sample estimate), "
        f"{seeds} seed{'s' * (seeds > 1)}. ----- marks what did not converge (under 1.5 / classes).",
    ]
    if any(entry.paper for entry in entries):
        notes.append(
            "Below: the paper's number (mean ± standard deviation over the clients of one run), and ours less it."
        )
    if plan.base:
        notes.append(f"Below: the difference to {plan.base} (–), with the same seeds.")
    elif not all(entry.paper for entry in entries):
        notes.append("The paper has no number for a cell that shows none.")
    if missing := len(found) - len(done):
        notes.append(f"**Not complete: {missing} of {len(found)} runs are still missing.**")
    if ahead := _ahead(plan, found):
        notes.append(ahead)
    devices = sorted({f"{s['device']}, torch {s['versions']['torch']}" for s in done}) or ["nothing"]
    seconds = sum(s["seconds"] for s in done)
    notes.append(f"`{_making(command)}`\n\n{len(done)} runs, {seconds:.0f} s of training on {'; '.join(devices)}.")
    return tuple(notes)


def _making(command: str) -> str:
    """What is written from runs made elsewhere says how to make them."""
    words, making = iter(shlex.split(command)), []
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in ("--run", "--kept"):
            making.append(word)
        elif not equals:
            next(words)
    return shlex.join(making)


def _ahead(plan: Plan, found: dict[str, dict[str, Any] | None]) -> str:
    """SemiDFL against each other method, where methods are compared and both have been run."""
    if find_spec("scipy") is None:
        return ""
    done: dict[str, dict[str, dict[int, Any]]] = {}
    ours, lost = NAMES["semidfl"], False
    for cell in plan.cells if plan.heads[0] == "method" else ():
        runs = {c.seed: summary for c in cell.configs if (summary := found[config_hash(c)]) is not None}
        if cell.row[0] != ours:  # to be ahead of a run that came apart is nothing to count
            classes = len(outline(cell.dataset).classes)
            kept = {seed: summary for seed, summary in runs.items() if converged(summary, classes)}
            runs, lost = kept, lost or len(kept) < len(runs)
        done.setdefault(f"{cell.column}, α = {cell.alpha:g}", {})[cell.row[0]] = runs
    ahead = margins(done, ours)
    why = (
        "Points by which SemiDFL is ahead, and the p-value of Wilcoxon's signed-rank test over pairs (same client, "
        "same seed) after Holm's correction, which is too small: the clients of a run are not independent."
    )
    if lost:
        why += " Runs of others that did not converge are left out."
    return f"{why}\n\n{margins_text(ahead, ours)}" if ahead else ""


def _drawn(name: str, options: Options) -> list[Path]:
    """The figures for which nothing is trained."""
    from semidfl.report import drawings
    from semidfl.report.figures import save

    if name == "figure-topologies":
        return save(drawings.topologies_figure(), options.out / name)
    kind, files = KINDS[name], []
    graph = override(Config(), options.values).graph
    for dataset in options.datasets or kind.datasets:
        for ratio in options.ratios or kind.ratios.get(dataset, kind.ratios["mnist"]):
            figure = drawings.partition_figure(dataset, ratio, options.alphas or kind.alphas, graph)
            files += save(figure, options.out / f"{name}-{Path(dataset).stem}-r{ratio:g}")
    return files


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SemiDFLError(explain(folder, error)) from error


def _write_text(path: Path, text: str) -> Path:
    try:
        with replacing(path) as temp:
            temp.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SemiDFLError(explain(path, error)) from error
    return path
