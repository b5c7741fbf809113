"""`semidfl report`: runs as one HTML file that needs nothing else, to keep, to mail, to print."""

import base64
import errno
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from semidfl import __version__
from semidfl.config import Config, to_toml
from semidfl.errors import SemiDFLError
from semidfl.record.atomic import explain, replacing
from semidfl.record.card import tested_clients
from semidfl.record.history import History
from semidfl.report import portraits
from semidfl.report.compare import Comparison, compare, gather
from semidfl.report.extras import need
from semidfl.report.figures import curves_figure
from semidfl.report.stats import bootstrap

__all__ = ["at_the_end", "write_report"]

_TOO_LONG = 200 * 2**20
"""bytes of metrics.jsonl above which no report is made unasked: reading them would keep the user waiting"""
_ROWS = 40
"""clients in the table"""


def write_report(folders: Sequence[str | Path], target: Path) -> Path:
    """One file of one or several runs."""
    runs = [History(folder) for folder in folders]
    for run in runs:
        run.refresh()
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temp:
            temp.touch()  # what cannot be written is told at once, not after the drawing
            temp.write_text(_render(runs, target), encoding="utf-8")
    except OSError as error:
        raise SemiDFLError(f"{explain(target, error)} (--out FILE)") from None
    return target


def at_the_end(folder: Path) -> None:
    """The report of a run that has just ended, where that can be made: no reason is reason enough to fail the run."""
    if any(find_spec(name) is None for name in ("matplotlib", "jinja2", "scipy")):
        return
    try:
        if os.path.getsize(folder / "metrics.jsonl") > _TOO_LONG:
            print(f"the report of so many figures takes a while: semidfl report {folder}", file=sys.stderr)
            return
        write_report([folder], folder / "report.html")
    except Exception as error:
        print(f"the run is complete, but its report could not be made: {error}", file=sys.stderr)


@dataclass(frozen=True)
class Chapter:
    """One run, as the template wants it."""

    name: str
    facts: list[tuple[str, str]]
    headline: str
    interval: str
    state: str
    figures: dict[str, str]
    pictures: list[tuple[int, str]]
    sample_rows: str
    sample_columns: str
    clients: list[list[str]]
    left_out: int
    config: str
    commands: list[str]


def _render(runs: Sequence[History], target: Path) -> str:
    jinja2 = need("jinja2")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    comparison, why = _compared(runs)
    overview = ""
    if len(runs) > 1:
        overview = portraits.svg(curves_figure(_labelled_curves(runs)))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return str(
        environment.get_template("report.html.j2").render(
            title=title,
            chapters=[_chapter(run) for run in runs],
            comparison=comparison,
            why=why,
            overview=overview,
            version=__version__,
            command=shlex.join(["semidfl", "report", *(str(run.folder) for run in runs), "--out", str(target)]),
        )
    )


def _compared(runs: Sequence[History]) -> tuple[Comparison | None, str]:
    """The paired tests, or why there are none."""
    if len(runs) < 2:
        return None, ""
    try:
        return compare(gather([run.folder for run in runs])), ""
    except SemiDFLError as error:
        return None, str(error)


def _labelled_curves(runs: Sequence[History]) -> dict[str, Any]:
    tested = {str(run.folder): run.table("accuracy") for run in runs}
    return {name: [(rounds, np.nan_to_num(values))] for name, (rounds, values) in tested.items() if rounds}


def _chapter(run: History) -> Chapter:
    values, summary = _result(run), run.summary or {}
    nothing = "no test" if run.status == "finished" else "no test yet"
    headline = f"{100 * values.mean():.2f} %" if len(values) else nothing
    rows, columns = run.clients.samples.get("clients", []), run.clients.samples.get("classes", [])
    return Chapter(
        name=run.name,
        facts=_facts(run, summary),
        headline=headline,
        interval=_interval(values),
        state=_state(run),
        figures={name: portraits.svg(draw(run)) for name, draw in _FIGURES.items()},
        pictures=_pictures(run),
        sample_rows=", ".join(map(str, rows)),
        sample_columns=", ".join(dict.fromkeys(map(str, columns))),
        clients=_client_rows(run, values)[:_ROWS],
        left_out=max(0, len(run.clients.own) - _ROWS),
        config=to_toml(run.config).strip(),
        commands=[_command(run, summary)],
    )


def _command(run: History, summary: dict[str, Any]) -> str:
    if "federation" in summary:
        return f"semidfl node --federation {summary['federation']}/federation.toml --name {summary['name']} --data PATH"
    return f"semidfl run {shlex.quote(str(run.folder / 'config.toml'))} --name {shlex.quote(run.name + '-again')}"


_FIGURES = {
    "curves": portraits.curves,
    "graph": portraits.graph_figure,
    "holdings": portraits.holdings_figure,
    "pseudo": portraits.pseudo_figure,
    "confusion": portraits.confusion_figure,
    "confusions": portraits.confusions_figure,
    "cost": portraits.cost_figure,
}


def _result(run: History) -> Any:
    """The accuracy of every client: the result's, or of the last test so far."""
    if run.summary:
        return np.array(tested_clients(run.summary), dtype=np.float64)
    values = np.nan_to_num(run.table("accuracy")[1])
    return values[-1] if len(values) else np.zeros(0)


def _interval(values: Any) -> str:
    if len(values) < 2:
        return ""
    low, high = bootstrap(100 * values)
    return f"± {100 * values.std():.2f} over {len(values)} clients; 95 % interval of the mean {low:.2f} to {high:.2f} %"


def _state(run: History) -> str:
    if run.status == "finished":
        return ""
    return f"not finished: {run.rounds} of {run.config.rounds} rounds; go on with `semidfl resume {run.folder}`"


def _facts(run: History, summary: dict[str, Any]) -> list[tuple[str, str]]:
    c, known = run.config, run.clients
    spent = sum(run.named("seconds")[1].get("round", []))
    sent = sum(map(sum, run.named("bytes_sent")[1].values())) / max(1, len(known.own))
    roles = ", ".join(f"{known.roles.count(r)} {r}" for r in "LMU" if r in known.roles)
    versions = ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    facts = [
        ("method", c.method if c.variant == "paper" else f"{c.method}, {c.variant}"),
        ("data", _data(c)),
        ("graph", f"{c.graph.topology}, {len(known.roles)} clients ({roles})"),
        ("rounds", f"{run.rounds} of {c.rounds}, a result is the mean of the last {c.evaluation.last} tests"),
        ("seed", str(c.seed)),
        ("time", f"{spent:,.1f} s, {spent / max(1, run.rounds):.3g} s a round"),
        ("sent", f"{sent / 1e6:,.1f} MB by a client (1 MB is 10⁶ bytes)"),
        ("device", str(summary.get("device", ""))),
        ("versions", versions),
    ]
    return [(name, value) for name, value in facts if value]


def _data(c: Config) -> str:
    if c.data.dataset == "own":  # so says the config of a peer whose data nobody shares out
        return "each peer's own"
    return f"{c.data.dataset}, {c.data.ratio:g} % labelled, Dirichlet α = {c.data.alpha:g}"


def _pictures(run: History) -> list[tuple[int, str]]:
    """The first and the last generated images, inside the file."""
    found = run.samples
    chosen = sorted({min(found), max(found)}) if found else []
    return [(t, base64.b64encode(found[t].read_bytes()).decode()) for t in chosen]


def _client_rows(run: History, values: Any) -> list[list[str]]:
    known, given, share = run.clients, _last(run, "pseudo_labels"), _last(run, "pseudo_precision")
    rows = []
    for k, i in enumerate(known.own):
        held = [sum(part[k]) if k < len(part) else 0 for part in (known.labelled, known.unlabelled)]
        right = share[k] if k < len(share) and given[k] and np.isfinite(share[k]) else None
        rows.append(
            [
                str(i),
                known.role(i),
                f"{held[0]:,}",
                f"{held[1] + (known.unknown[k] if k < len(known.unknown) else 0):,}",
                f"{given[k]:,.0f}" if k < len(given) else "",
                "" if right is None else f"{100 * right:.1f}",
                f"{100 * values[k]:.2f}" if k < len(values) else "",
            ]
        )
    return rows


def _last(run: History, name: str) -> Any:
    rounds, values = run.table(name)
    return values[-1] if rounds else np.zeros(0)
