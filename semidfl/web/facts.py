"""The page's tables: runs side by side, and the settings of one."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from semidfl.config import to_toml
from semidfl.record.history import History
from semidfl.web import words
from semidfl.web.look import Look

__all__ = ["details", "table"]


def table(runs: Sequence[tuple[str, History]], look: Look) -> str:
    """A row a run, with the colour of its line."""
    heads = ["run", "method", "data", "accuracy, %", "± clients", "round", "time", "sent a client"]
    rows = []
    for k, (name, run) in enumerate(runs):
        tested, values = run.table("accuracy")
        last = 100 * values[-1] if tested else None
        spent = sum(run.named("seconds")[1].get("round", []))
        rows.append(
            [
                f"<i style='--c:{look.series[k % 7]}'></i>{escape(name)}",
                escape(run.config.method),
                escape(Path(run.config.data.dataset).name),
                "–" if last is None else f"{last.mean():.2f}",
                "–" if last is None else f"{last.std():.2f}",
                f"{run.rounds:,} of {run.config.rounds:,}",
                words.duration(spent),
                words.amount(words.traffic(run)[1]),
            ]
        )
    head = "".join(f"<th scope='col'>{name}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table class='runs'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def details(run: History) -> str:
    """Where the run is, how to go on with it, what it ran on, and every setting."""
    where = run.folder.resolve()
    summary = run.summary or {}
    facts = [f"<p>Folder <code>{escape(str(where))}</code></p>"]
    if run.status == "stopped":
        facts.append(f"<p>Go on with <code>semidfl resume {escape(str(run.folder))}</code></p>")
    if summary:
        versions = ", ".join(f"{k} {v}" for k, v in summary.get("versions", {}).items())
        facts.append(f"<p>{escape(str(summary.get('device', '')))}; {escape(versions)}</p>")
    config = escape(to_toml(run.config).strip())
    return f"<details><summary>Settings</summary>{''.join(facts)}<pre class='config'>{config}</pre></details>"
