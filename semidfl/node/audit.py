"""Everything that left this machine, line by line in audit.jsonl, written before the first byte goes.

Each line carries the hash of the line before it, so that one taken out or changed later shows. At the end it does not:
that takes the last line's hash, noted elsewhere. `semidfl audit DIR` checks the chain, sums up and gives that hash.
Questions and other short words, which carry no tensors, are summed a round; so is what a peer asks for again and again,
lest it fill the disk.
"""

import datetime as dt
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semidfl.errors import RunFolderError
from semidfl.record.atomic import explain
from semidfl.record.folder import write_whole

__all__ = ["Audit", "Summary", "sum_up"]

FILE = "audit.jsonl"
_START = "0" * 64
_EACH = 4
"""times in a round that the same tensors get a line of their own"""


class Audit:
    """An open log; nothing is ever rewritten."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = threading.Lock()
        self._control: Counter[str] = Counter()
        self._sent: Counter[tuple[str, str, int, tuple[str, ...], int, str]] = Counter()
        try:
            last = _last_line(self.path)
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            if last and not last.endswith(b"\n"):  # a peer was killed while it wrote
                os.write(self._handle, b"\n")
                last += b"\n"
        except OSError as error:
            raise RunFolderError(explain(self.path, error)) from error
        self._previous = hashlib.sha256(last).hexdigest() if last else _START

    def sends(self, peer: str, topic: str, round: int, names: Collection[str], size: int, digest: bytes) -> None:
        """Tensors are about to go to a peer."""
        what = peer, topic, round, tuple(names), size, digest.hex()
        with self._lock:
            self._sent[what] += 1
            times = self._sent[what]
        if times <= _EACH:
            self._write(_line(*what))

    def control(self, peer: str, size: int) -> None:
        """A short word went to a peer."""
        with self._lock:
            self._control[peer] += size

    def flush(self, round: int) -> None:
        """Writes down the short words and what was asked for often since the last time; forces all to the disk."""
        with self._lock:
            sizes, self._control = self._control, Counter()
            sent, self._sent = self._sent, Counter()
        for what, times in sent.items():
            if (more := times - _EACH) > 0:
                entry = _line(*what)
                self._write({**entry, "bytes": more * entry["bytes"], "times": more})
        for peer, size in sorted(sizes.items()):
            self._write({"peer": peer, "topic": "control", "round": round, "tensors": [], "bytes": size})
        os.fsync(self._handle)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _write(self, entry: dict[str, Any]) -> None:
        time = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        with self._lock:
            line = json.dumps({"time": time, **entry, "previous": self._previous}).encode() + b"\n"
            try:
                write_whole(self._handle, line)
            except OSError as error:
                # What cannot be written down is not sent: the error goes up to whoever was about to send.
                raise RunFolderError(explain(self.path, error)) from error
            self._previous = hashlib.sha256(line).hexdigest()


def _line(peer: str, topic: str, round: int, names: Collection[str], size: int, digest: str) -> dict[str, Any]:
    what = {"peer": peer, "topic": topic, "round": round, "tensors": list(names)}
    return {**what, "bytes": size, "sha256": digest}


@dataclass
class Summary:
    """What `semidfl audit` says."""

    lines: int = 0
    broken: list[int] = field(default_factory=list)
    """numbers of the lines that do not follow from the one before"""
    first: str = ""
    last: str = ""
    end: str = _START
    """hash of the last line"""
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    """by peer and topic"""
    sizes: Counter[tuple[str, str]] = field(default_factory=Counter)
    tensors: dict[str, set[str]] = field(default_factory=dict)
    """names by topic"""


def sum_up(folder: Path) -> Summary:
    path = folder / FILE if folder.is_dir() else folder
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from None
    found, previous = Summary(), _START
    for number, line in enumerate(lines, start=1):
        found.lines += 1
        try:
            entry = json.loads(line)
            key = entry["peer"], entry["topic"]
            if entry["previous"] != previous:
                found.broken.append(number)
            found.first, found.last = found.first or entry["time"], entry["time"]
            found.messages[key] += entry.get("times", 1)
            found.sizes[key] += entry["bytes"]
            found.tensors.setdefault(entry["topic"], set()).update(entry["tensors"])
        except (ValueError, KeyError, TypeError):
            found.broken.append(number)
        previous = found.end = hashlib.sha256(line).hexdigest()
    return found


def _last_line(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().splitlines(keepends=True)
    return lines[-1] if lines else b""
