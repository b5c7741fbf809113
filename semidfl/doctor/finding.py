"""One thing that was looked at."""

from dataclasses import dataclass

__all__ = ["BAD", "NOTE", "OK", "Finding"]

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True)
class Finding:
    what: str
    state: str
    """ok, note or bad"""
    text: str
    """what was found"""
    advice: str = ""
    """what to do, where there is something to do"""
