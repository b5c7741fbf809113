"""Which runs the page may show: those in the folders it was opened on, also ones that begin later."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from semidfl.errors import SemiDFLError
from semidfl.record.history import History, find_runs

__all__ = ["Library"]

_FRESH = 1.0
"""seconds for which a list of the runs holds"""


class Library:
    """The runs that the page may show, by the name it shows them under."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._open: dict[Path, History] = {}
        self._names: tuple[float, dict[str, Path]] = (-_FRESH, {})

    def names(self, wanted: str = "") -> dict[str, Path]:
        """Newest runs first, looked for once a second however many tabs ask, and when one asks for a new run."""
        when, names = self._names
        if time.monotonic() - when >= _FRESH or (wanted and wanted not in names):
            names = self._find()
            self._names = time.monotonic(), names
        return names

    def _find(self) -> dict[str, Path]:
        """A name that occurs twice is told apart by its path."""
        try:
            found = find_runs(self._places)
        except SemiDFLError:  # a folder was removed meanwhile
            found = [run for place in self._places if Path(place).is_dir() for run in find_runs([place])]
        found.sort(key=_begun, reverse=True)
        alike = [run.resolve().name for run in found]
        return {str(run) if alike.count(run.resolve().name) > 1 else run.resolve().name: run for run in found}

    def warm(self) -> None:
        """Read the run that a visitor sees first, before one comes."""
        for name in list(self.names())[:1]:
            with suppress(SemiDFLError):
                self.open(name).refresh()

    def open(self, name: str) -> History:
        folder = self.names()[name]
        if folder not in self._open:
            self._open[folder] = History(folder)
        return self._open[folder]


def _begun(folder: Path) -> float:
    """When a run was begun: an order that does not change while runs go on."""
    try:
        return (folder / "config.toml").stat().st_mtime
    except OSError:
        return 0.0
