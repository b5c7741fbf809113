"""A run folder as readers see it: follows metrics.jsonl as it grows, takes no lock and writes nothing.

The page looks at it every second while the run goes on, so only new bytes are read. A resume may cut the file and
write on: what was read last is compared with what now stands there, and if it differs all is read anew.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from semidfl import topology
from semidfl.config import Config, from_toml
from semidfl.errors import RunFolderError, SemiDFLError

__all__ = ["Clients", "History", "find_runs"]

Floats = npt.NDArray[np.float64]

_MARK = 128
"""bytes before the place reached that must still be the same"""
_DEEP = 4


class Clients:
    """What clients.json tells, or as much of it as the config does."""

    def __init__(self, folder: Path, config: Config) -> None:
        known = _json(folder / "clients.json") or _from_config(config)
        self.roles: str = known.get("roles", "")
        self.edges: list[tuple[int, int]] = [(i, j) for i, j in known.get("edges", [])]
        self.own: list[int] = known.get("own", list(range(len(self.roles))))
        self.classes: list[str] = known.get("classes", [])
        self.labelled: list[list[int]] = known.get("labelled", [])
        self.unlabelled: list[list[int]] = known.get("unlabelled", [])
        self.unknown: list[int] = known.get("unknown", [])
        self.samples: dict[str, list[Any]] = known.get("samples", {})

    def neighbours(self, i: int) -> list[int]:
        """Of client i, ascending."""
        return sorted({b if a == i else a for a, b in self.edges if i in (a, b)})

    def role(self, i: int) -> str:
        return self.roles[i] if i < len(self.roles) else "U"


class History:
    """Everything a run folder holds so far; `refresh` reads what is new."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._reading = threading.Lock()
        check_folder(self.folder)
        self._start()

    def _start(self) -> None:
        self.config = _config(self.folder)
        self.clients = Clients(self.folder, self.config)
        self.records: list[dict[str, Any]] = []
        self.weights: tuple[list[list[float]], set[int]] | None = None  # the last, and who was missing then
        self._offset, self._mark, self._rest = 0, b"", b""
        self._made = self._config_time()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def rounds(self) -> int:
        """Done so far."""
        return int(self.records[-1]["round"]) if self.records else 0

    def looked_at(self) -> int:
        """Samples that could get a pseudo-label in a round, 0 if that is not recorded."""
        known, most = self.clients, self.config.pseudo.pool
        rows = known.unlabelled or [[0]] * len(known.unknown)
        held = [sum(row) + more for row, more in zip(rows, known.unknown or [0] * len(rows), strict=True)]
        return sum(min(n, most or n) for n in held)

    @property
    def summary(self) -> dict[str, Any] | None:
        return _json(self.folder / "summary.json")

    @property
    def confusion(self) -> dict[str, Any] | None:
        return _json(self.folder / "confusion.json")

    @property
    def status(self) -> str:
        """finished, running, or stopped: whose process is gone without a result."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        return "running" if _alive(self.folder / ".lock") else "stopped"

    @property
    def samples(self) -> dict[int, Path]:
        """The pictures of generated images, by round."""
        found = (self.folder / "samples").glob("round-*.png")
        return {int(path.stem.removeprefix("round-")): path for path in sorted(found)}

    # --- following the file ---------------------------------------------------------------------

    def refresh(self) -> bool:
        """Read what was added; True where there is something new. Several threads may ask."""
        with self._reading:
            return self._refresh()

    def _refresh(self) -> bool:
        if self._config_time() != self._made:  # overwritten by a new run of the same name
            self._start()
        try:
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(max(0, self._offset - len(self._mark)))
                if file.read(len(self._mark)) != self._mark:
                    self._start()
                    file.seek(0)
                new = file.read()
        except FileNotFoundError:
            if self._offset:
                self._start()
            return False
        return self._take(new)

    def _take(self, new: bytes) -> bool:
        if not new:
            return False
        self._offset += len(new)
        self._mark = (self._mark + new)[-_MARK:]
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                number = len(self.records) + 1
                self._start()  # so that the next look says the same
                raise RunFolderError(f"line {number} of {self.folder / 'metrics.jsonl'} is damaged") from None
        return bool(lines)

    def _add(self, record: dict[str, Any]) -> None:
        """The figures of a round; of the weights, the bulk of a line, only the last are kept."""
        t = int(record["round"])
        while self.records and self.records[-1]["round"] >= t:
            self.records.pop()
        missing = {int(i) for i in record.get("absent") or []}
        if weights := record.pop("weights", None):
            self.weights = weights, missing
        if "thresholds" in record:
            record["thresholds"] = np.array(record["thresholds"], dtype=np.float32)
        self.records.append(record)

    def _config_time(self) -> tuple[int, int]:
        try:
            known = os.stat(self.folder / "config.toml")
        except FileNotFoundError:
            return 0, 0
        return known.st_ino, known.st_mtime_ns

    # --- figures --------------------------------------------------------------------------------

    def table(self, name: str) -> tuple[list[int], Floats]:
        """The rounds that have a figure, and it for every own client (T, C); NaN where there is none."""
        rows = [(r["round"], r[name]) for r in self.records if r.get(name) is not None]
        if not rows:
            return [], np.zeros((0, 0))
        width = len(rows[-1][1])
        whole = [(t, row) for t, row in rows if len(row) == width]
        return [t for t, _ in whole], np.array([row for _, row in whole], dtype=np.float64)

    def named(self, name: str) -> tuple[list[int], dict[str, list[float]]]:
        """A figure that has parts (seconds by phase, bytes by topic): the sum of each part over own clients."""
        rows = [(r["round"], r[name]) for r in self.records if r.get(name)]
        parts = list(dict.fromkeys(part for _, row in rows for part in row))
        return [t for t, _ in rows], {part: [_total(row.get(part, 0)) for _, row in rows] for part in parts}

    def mixing(self) -> dict[tuple[int, int], float]:
        """The last mixing weight that client i gave client j, for own clients i and all j that it heard."""
        if self.weights is None:
            return {}
        rows, missing = self.weights
        found: dict[tuple[int, int], float] = {}
        for i, row in zip(self.clients.own, rows, strict=False):
            heard = [j for j in sorted((i, *self.clients.neighbours(i))) if j not in missing or j == i]
            if len(heard) > len(row):
                return {}  # a graph that changes from round to round is not in clients.json
            found |= {(i, j): float(w or 0) for j, w in zip(heard, row, strict=False)}
        return found

    def absent(self) -> dict[int, int]:
        """Clients that did not answer in the last round, and for how many rounds in a row."""
        gone = {int(i): 0 for i in (self.records[-1].get("absent") or [])} if self.records else {}
        still = set(gone)
        for record in reversed(self.records):
            still &= set(record.get("absent") or [])
            if not still:
                break
            gone |= {i: gone[i] + 1 for i in still}
        return gone


def check_folder(folder: Path) -> None:
    """Refuse what is no run folder, with the reason."""
    if folder.is_file():
        raise RunFolderError(f"{folder} is a file, not a run folder: give the folder that holds config.toml")
    if not folder.is_dir():
        raise RunFolderError(f"there is no run folder {folder}: runs are in runs/NAME, `ls runs` shows them")
    if not (folder / "config.toml").is_file():
        raise RunFolderError(f"{folder} is not a run folder: config.toml is missing")


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The run folders among and under these places, a few levels deep."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if (place / "config.toml").is_file() or not place.is_dir():
            check_folder(place)
            found[place] = None
        else:
            found |= dict.fromkeys(_below(place, _DEEP))
    return list(found)


def _below(place: Path, deep: int) -> list[Path]:
    if (place / "config.toml").is_file():
        return [place]
    if not deep:
        return []
    try:
        folders = sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
    return [run for folder in folders for run in _below(folder, deep - 1)]


def _config(folder: Path) -> Config:
    try:
        return from_toml((folder / "config.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"cannot read {folder / 'config.toml'}: {error.strerror}") from None
    except (SemiDFLError, ValueError) as error:
        raise RunFolderError(
            f"{folder / 'config.toml'} is of another version of semidfl, or damaged: {error}"
        ) from None


def _from_config(config: Config) -> dict[str, Any]:
    """Of a folder without clients.json: what the config says of the graph, if that has a name of the package.

    A stranger's folder could name any code, or file: who only looks runs none and opens none.
    """
    if config.graph.topology not in topology.TOPOLOGIES:
        return {}
    try:
        graph = topology.build(config.graph, config.seed)
    except SemiDFLError:
        return {}
    return {"roles": graph.roles, "edges": graph.edges()}


def _json(path: Path) -> dict[str, Any] | None:
    """A small file, or nothing where it is not (yet) there or not to be read."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) else None


def _alive(lock: Path) -> bool:
    """Whether the process that locked the folder lives; never by locking it, which could turn a run away."""
    try:
        os.kill(int(lock.read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _total(value: Any) -> float:
    return float(sum(x or 0 for x in value)) if isinstance(value, list) else float(value or 0)
