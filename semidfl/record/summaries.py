"""Summaries of finished runs, a line of JSON each: small enough to be kept with the tables that were made from them.

Lines are only added, each in one write, so that processes which run parts of a table side by side, or on different
machines one after the other, can share the file. Of a run's lines the last counts.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semidfl.errors import RunFolderError
from semidfl.record.atomic import explain
from semidfl.record.folder import clean, write_whole

__all__ = ["add_summary", "read_summaries"]


def read_summaries(path: Path) -> dict[str, dict[str, Any]]:
    """By the hash of the run's config; nothing where there is no file."""
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            summary = dict(json.loads(line))
            found[str(summary["config"])] = summary
        except (ValueError, TypeError, KeyError):
            raise RunFolderError(f"line {number} of {path} is damaged: remove it") from None
    return found


def add_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """As one more line, unless the file says the same of this run already."""
    brief = clean(summary)
    if read_summaries(path).get(brief["config"]) == brief:
        return
    line = json.dumps(brief, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            write_whole(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise RunFolderError(explain(path, error)) from error
