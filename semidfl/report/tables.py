"""A table of results as Markdown, CSV and LaTeX: our number, the paper's beside it, and the difference.

Ours is mean ± standard deviation over the clients (mean over the seeds) ± standard deviation over the seeds.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from semidfl.report.published import Number

__all__ = ["Entry", "Score", "Table", "converged", "csv_text", "latex", "markdown", "score"]

DASH = "-----"
"""the paper's sign for a run that did not converge"""


@dataclass(frozen=True)
class Score:
    """What the runs of one cell gave, in percent."""

    mean: float
    over_clients: float
    over_seeds: float
    """NaN with one seed"""
    seeds: int
    converged: bool
    by_seed: tuple[float, ...] = ()
    lost: int = 0
    """seeds that did not converge"""

    @property
    def others(self) -> float:
        """The mean of those that did."""
        return fmean(sorted(self.by_seed)[self.lost :])


@dataclass(frozen=True)
class Entry:
    """One cell: its place, what is known of it, and the paper's number."""

    row: tuple[str, ...]
    column: str
    facts: Mapping[str, object]
    """further columns of the CSV"""
    score: Score | None
    """None: not run yet"""
    paper: tuple[Number | None, ...] = ()
    """empty: the paper has none; (None,): the paper has a dash"""
    base: Score | None = None
    """of our own, to compare with where the paper has none"""

    @property
    def difference(self) -> float:
        """Ours less the paper's or the base, in points; NaN where one is missing or did not converge."""
        if self.score is None or not self.score.converged:
            return math.nan
        if self.base is not None:
            return self.score.mean - self.base.mean if self.base.seeds == self.score.seeds else math.nan
        return self.score.mean - self.paper[0][0] if self.paper and self.paper[0] is not None else math.nan


@dataclass(frozen=True)
class Table:
    """All that is to be printed."""

    title: str
    heads: tuple[str, ...]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    """paragraphs under the table"""


def score(summaries: Sequence[Mapping[str, Any]], classes: int) -> Score | None:
    """The cell of these runs, one a seed. A mean under 1.5 / classes has not converged: the paper prints a dash."""
    if not summaries:
        return None
    means = [100 * _accuracy(s) for s in summaries]
    clients = fmean(100 * float(s["std_over_clients"] or 0) for s in summaries)
    seeds, lost = stdev(means) if len(means) > 1 else math.nan, sum(not converged(s, classes) for s in summaries)
    return Score(fmean(means), clients, seeds, len(means), fmean(means) >= 150 / classes, tuple(means), lost)


def converged(summary: Mapping[str, Any], classes: int) -> bool:
    """Whether a run is better than half as much again as chance."""
    return _accuracy(summary) >= 1.5 / classes


def _accuracy(summary: Mapping[str, Any]) -> float:
    """A run that ended in NaN has no accuracy: it counts as none at all."""
    return float(summary["accuracy"] or 0)


def markdown(table: Table) -> str:
    """A pipe table and its notes; lines within a cell are parted by <br>."""
    columns, rows = _layout(table)
    lines = [f"# {table.title}", "", "| " + " | ".join([*table.heads, *columns]) + " |"]
    lines.append("|" + " --- |" * len(table.heads) + " ---: |" * len(columns))
    for row, cells in rows.items():
        words = [*row, *("<br>".join(_lines(cells.get(column))) for column in columns)]
        lines.append("| " + " | ".join(word.replace("|", r"\|") for word in words) + " |")
    return "\n".join([*lines, *(text for note in table.notes for text in ("", note))]) + "\n"


def csv_text(table: Table) -> str:
    """A line a cell, numbers in percent and not rounded; what is not known is empty."""
    out = io.StringIO()
    names = list(table.entries[0].facts) if table.entries else []
    numbers = ["mean", "std_over_clients", "std_over_seeds", "seeds", "converged", "by_seed"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *numbers, "paper_mean", "paper_std", "paper_converged", "difference"])
    for entry in table.entries:
        writer.writerow([*entry.facts.values(), *_score_cells(entry.score), *_paper_cells(entry)])
    return out.getvalue()


def latex(table: Table) -> str:
    """A tabular for booktabs, in a table environment."""
    columns, rows = _layout(table)
    head = " & ".join(map(_tex, [*table.heads, *columns]))
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table*}",
        "\\centering",
        "\\footnotesize",
        f"\\caption{{{_tex(table.title)}}}",
        f"\\begin{{tabular}}{{{'l' * len(table.heads)}{'r' * len(columns)}}}",
        "\\toprule",
        f"{head} \\\\",
        "\\midrule",
    ]
    for row, cells in rows.items():
        words = [*map(_tex, row), *(_tex_cell(_lines(cells.get(column))) for column in columns)]
        lines.append(" & ".join(words) + " \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", "\\end{table*}"]
    return "\n".join([*lines, *(f"% {text}" for note in table.notes for text in note.splitlines())]) + "\n"


def _layout(table: Table) -> tuple[list[str], dict[tuple[str, ...], dict[str, Entry]]]:
    """The columns, and the cells of every row by column, both in the order of the entries."""
    columns = list(dict.fromkeys(entry.column for entry in table.entries))
    rows: dict[tuple[str, ...], dict[str, Entry]] = {}
    for entry in table.entries:
        rows.setdefault(entry.row, {})[entry.column] = entry
    return columns, rows


def _lines(entry: Entry | None) -> list[str]:
    """Ours, the paper's, the difference: as many lines as are known."""
    if entry is None:
        return [""]
    lines = [_ours(entry.score)]
    if entry.score and entry.score.converged and entry.score.lost:
        lines.append(f"{entry.score.lost} of {entry.score.seeds} seeds {DASH}, else {entry.score.others:.2f}")
    if entry.paper:
        number = entry.paper[0]
        lines.append("paper " + (DASH if number is None else f"{number[0]:.2f} ± {number[1]:.2f}"))
    if not math.isnan(entry.difference):
        lines.append(f"{entry.difference:+.2f}")
    return lines


def _ours(score: Score | None) -> str:
    if score is None:
        return "not run"
    if not score.converged:
        return DASH
    seeds = "" if math.isnan(score.over_seeds) else f" ± {score.over_seeds:.2f}"
    return f"{score.mean:.2f} ± {score.over_clients:.2f}{seeds}"


def _score_cells(score: Score | None) -> list[object]:
    if score is None:
        return [""] * 6
    numbers = [_plain(x) for x in (score.mean, score.over_clients, score.over_seeds)]
    return [*numbers, score.seeds, str(score.converged).lower(), " ".join(f"{x:.2f}" for x in score.by_seed)]


def _paper_cells(entry: Entry) -> list[object]:
    if not entry.paper:
        return ["", "", "", _plain(entry.difference)]
    mean, std = entry.paper[0] or ("", "")
    return [mean, std, str(entry.paper[0] is not None).lower(), _plain(entry.difference)]


def _plain(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def _tex_cell(lines: list[str]) -> str:
    words = [_tex(line) for line in lines]
    return words[0] if len(words) == 1 else "\\shortstack[r]{" + "\\\\".join(words) + "}"


_TEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "#": r"\#",
        "_": r"\_",
        "$": r"\$",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "α": r"$\alpha$",
    }
)


def _tex(text: str) -> str:
    # In text, -1.20 would be set with a hyphen.
    sign = "$-$" if text.startswith("-") and text != DASH else ""
    return sign + text[len(sign) > 0 :].translate(_TEX)
