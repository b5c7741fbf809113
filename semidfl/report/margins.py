"""How far one method is ahead of the others in every setting of a table, and whether that could be chance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semidfl.record.card import tested_clients
from semidfl.report.stats import holm, wilcoxon

__all__ = ["Margin", "margins", "margins_text"]

Runs = Mapping[int, Mapping[str, Any]]
"""summaries by seed"""


@dataclass(frozen=True)
class Margin:
    setting: str
    other: str
    points: float
    """our mean accuracy less theirs, over the clients of the seeds that both have"""
    p: float
    """of Wilcoxon's signed-rank test over the pairs, after Holm's correction for all comparisons of the table; too
    small, since the clients of a run are not independent"""
    seeds: int


def margins(done: Mapping[str, Mapping[str, Runs]], ours: str) -> list[Margin]:
    """done: setting -> method -> its runs. Settings and methods without runs of both are left out."""
    found = []
    for setting, methods in done.items():
        for other, theirs in methods.items():
            shared = sorted(methods.get(ours, {}).keys() & theirs.keys())
            if other == ours or not shared:
                continue
            a, b = (np.concatenate([_clients(runs[seed]) for seed in shared]) for runs in (methods[ours], theirs))
            if not len(a) or len(a) != len(b):  # nothing to pair
                continue
            found.append(Margin(setting, other, float((a - b).mean()), wilcoxon(a, b), len(shared)))
    adjusted = holm([m.p for m in found])
    return [Margin(m.setting, m.other, m.points, p, m.seeds) for m, p in zip(found, adjusted, strict=True)]


def margins_text(found: Sequence[Margin], ours: str) -> str:
    """A pipe table: a row a setting, a column a method."""
    settings, others = (list(dict.fromkeys(x)) for x in ((m.setting for m in found), (m.other for m in found)))
    cells = {(m.setting, m.other): f"{m.points:+.2f} ({_p(m.p)})" for m in found}
    lines = [f"| {ours} less | " + " | ".join(others) + " |", "| --- |" + " ---: |" * len(others)]
    lines += [f"| {s} | " + " | ".join(cells.get((s, other), "") for other in others) + " |" for s in settings]
    return "\n".join(lines)


def _clients(summary: Mapping[str, Any]) -> Any:
    return 100 * np.array(tested_clients(dict(summary)), dtype=np.float64)


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
