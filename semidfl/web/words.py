"""What the charts show, in sentences: for who reads before looking, for screen readers, and for tests."""

from collections.abc import Iterable
from statistics import median

import numpy as np

from semidfl.experiment import first_test
from semidfl.record.history import History
from semidfl.web.network import GONE

__all__ = ["accuracy_words", "amount", "duration", "labels_words", "network_words", "pace", "time_words", "traffic"]


def accuracy_words(run: History) -> str:
    rounds, values = run.table("accuracy")
    if not rounds:
        first = first_test(run.config)
        return f"The first test comes after round {first}." if run.rounds < first else "Nothing to test with here."
    last = 100 * values[-1][np.isfinite(values[-1])]
    if not last.any():
        return f"No model gives a right answer after round {rounds[-1]}: training may have diverged."
    if len(last) == 1:
        return f"{last[0]:.1f} % after round {rounds[-1]}."
    return f"Mean {last.mean():.1f} %, clients from {last.min():.1f} to {last.max():.1f} %, after round {rounds[-1]}."


def network_words(run: History) -> str:
    absent = run.absent()
    some = [
        f"client {i} {'gone' if n >= GONE else 'late'} ({n} round{'s' * (n > 1)})" for i, n in sorted(absent.items())
    ]
    if some:
        text = ", ".join(some)
        return f"{text[0].upper()}{text[1:]}."
    if len(run.clients.own) < len(run.clients.roles):
        return f"Seen from client {', '.join(map(str, run.clients.own))}: edges as wide as the models weigh."
    return f"{len(run.clients.roles)} clients, {len(run.clients.edges)} edges, as wide as the models weigh in mixing."


def labels_words(run: History) -> str:
    rounds, values = run.table("pseudo_labels")
    if not rounds:
        return f"Pseudo-labels begin in round {run.config.pseudo.start}."
    total, given = run.looked_at(), int(values[-1].sum())
    return f"{given:,} of {total:,} samples in round {rounds[-1]}." if total else f"{given:,} in round {rounds[-1]}."


def right_share(run: History) -> float | None:
    """Right pseudo-labels of the last round among those whose truth is known."""
    last = next((r for r in reversed(run.records) if "pseudo_given" in r), None)
    if last is not None:
        right, wrong = (int(np.sum(last[f"pseudo_{part}"])) for part in ("right", "wrong"))
        return right / (right + wrong) if right + wrong else None
    rounds, share = run.table("pseudo_precision")  # a folder of an older version
    known = share[-1][np.isfinite(share[-1])] if rounds else np.zeros(0)
    return float(known.mean()) if len(known) else None


def time_words(run: History) -> str:
    _, parts = run.named("seconds")
    whole = parts.pop("round", [])
    if not whole:
        return "No round is done yet."
    slowest = max(parts, key=lambda name: sum(parts[name]), default="")
    share = 100 * sum(parts.get(slowest, [])) / max(sum(whole), 1e-9)
    return f"{duration(sum(whole))} in all, {pace(run):.2f} s a round; most in {slowest} ({share:.0f} %)."


def traffic(run: History) -> tuple[float, float]:
    """Bytes that an own client sends in a round (the last), and has sent in all."""
    _, parts = run.named("bytes_sent")
    totals = (
        np.array(list(parts.values()), dtype=np.float64).sum(0) / max(1, len(run.clients.own)) if parts else np.zeros(0)
    )
    return (float(totals[-1]), float(totals.sum())) if len(totals) else (0.0, 0.0)


def pace(run: History) -> float:
    """Seconds a round, of the last ones."""
    last = [r["seconds"].get("round", 0.0) for r in run.records[-20:] if r.get("seconds")]
    return float(median(last)) if last else 0.0


def duration(seconds: float) -> str:
    """0.4 s, 48 s, 4:53 min, 1:02 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def amount(size: float) -> str:
    """Bytes as 512 B, 4.2 kB, 1.6 MB: powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def roles_words(run: History) -> str:
    """2 L, 2 M, 6 U."""
    counted: Iterable[str] = (f"{run.clients.roles.count(r)} {r}" for r in "LMU" if r in run.clients.roles)
    return ", ".join(counted)
