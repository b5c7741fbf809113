"""Summaries of finished runs, a line of JSON each: small enough to be kept with the tables that were made from them.

Lines are only added, under a lock, so that processes which run parts of a table side by side can share the file. Of a
run's lines the last counts. What a killed writer left of a line is skipped.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from semidfl.errors import RunFolderError
from semidfl.record.atomic import explain
from semidfl.record.folder import clean, write_whole

__all__ = ["add_summaries", "read_summaries"]


def read_summaries(path: Path) -> dict[str, dict[str, Any]]:
    """By the hash of the run's config; nothing where there is no file."""
    return _parsed(path, path.read_bytes()) if path.exists() else {}


def add_summaries(path: Path, summaries: Iterable[Mapping[str, Any]]) -> None:
    """As one more line each, unless the file says the same of that run already."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            content = path.read_bytes()
            known = _parsed(path, content)
            new = [brief for brief in map(clean, summaries) if known.get(brief["config"]) != brief]
            lines = [json.dumps(brief, allow_nan=False, ensure_ascii=False) + "\n" for brief in new]
            os.ftruncate(handle, content.rfind(b"\n") + 1)  # what a killed writer left
            write_whole(handle, "".join(lines).encode())
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise RunFolderError(explain(path, error)) from error


def _parsed(path: Path, content: bytes) -> dict[str, dict[str, Any]]:
    found = {}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            summary = dict(json.loads(line))
            found[str(summary["config"])] = summary
        except (ValueError, TypeError, KeyError):
            raise RunFolderError(f"line {number} of {path} is damaged: remove it") from None
    return found
