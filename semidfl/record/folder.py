"""The folder of a run: plain files, one writer at a time, nothing half-written that a resume cannot mend.

    runs/NAME/config.toml     the settings, complete
              clients.json    who is there and holds what (record/clients.py)
              metrics.jsonl   one line of JSON a round
              summary.json    the result, once the run has ended
              confusion.json  what the trained models take for what
              model_card.md   the result in words: data, recipe, accuracy, limits
              report.html     all of it to look at
              checkpoints/    the last two states, to resume from
              models/         the trained networks
              samples/        pictures of the generator's work
              tensorboard/    with --log tensorboard

Whoever opens the folder holds a lock on it until it is closed or the process dies.
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from semidfl.errors import InUseError, RunFolderError
from semidfl.record.atomic import explain, make_folder, replacing, sync

__all__ = ["RunFolder", "clean", "read_records", "write_whole"]

_FOLDERS = ("checkpoints", "models", "samples")
# Made from the models by other commands, and as old as they.
_DERIVED = ("exports", "generated")
# In the order in which an overwrite removes them: config.toml, which makes the folder a run, last.
_FILES = (
    "report.html",
    "model_card.md",
    "confusion.json",
    "clients.json",
    "summary.json",
    "metrics.jsonl",
    "config.toml",
)


class RunFolder:
    """An open run folder. Made by `create` or `open`; use it in a `with` block, which gives the lock back."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._metrics = -1

    @classmethod
    def create(cls, path: str | Path, config_toml: str, overwrite: bool = False) -> Self:
        """A new run. A folder that already holds one is refused, or emptied of it with `overwrite`."""
        path = Path(path)
        with _plain_errors(path):
            make_folder(path)
            folder = cls(path, _lock(path))
            try:
                folder._begin(config_toml, overwrite)
            except BaseException:
                folder.close()
                raise
        return folder

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """A run that exists, to resume it; call `truncate` before the first `append`."""
        path = Path(path)
        if path.is_file():
            raise RunFolderError(f"{path} is a file, not a run folder")
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {path}")
        if not (path / "config.toml").is_file():
            raise RunFolderError(f"{path} is not a run folder: config.toml is missing")
        with _plain_errors(path):
            folder = cls(path, _lock(path))
            try:
                folder._make_folders()
            except BaseException:
                folder.close()
                raise
        return folder

    def _begin(self, config_toml: str, overwrite: bool) -> None:
        if overwrite:
            self._remove_run()
        elif _holds_run(self.path):
            raise RunFolderError(
                f"{self.path} already holds a run: resume it with `semidfl resume {self.path}`, "
                "choose another --name, or pass --overwrite"
            )
        self._make_folders()
        self.write_text("config.toml", config_toml)

    def _make_folders(self) -> None:
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)

    def _remove_run(self) -> None:
        # Only what a run writes: the folder may hold a user's own notes.
        for name in (*_FOLDERS, *_DERIVED, "tensorboard"):
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)

    @property
    def checkpoints(self) -> Path:
        """Where `checkpoint.save` and `checkpoint.load_latest` work."""
        return self.path / "checkpoints"

    @property
    def models(self) -> Path:
        """Where the trained networks go."""
        return self.path / "models"

    @property
    def samples(self) -> Path:
        """Where pictures of generated images go."""
        return self.path / "samples"

    @property
    def config_toml(self) -> str:
        """The settings as they were written when the run began."""
        return (self.path / "config.toml").read_text(encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl; other processes see it at once, the disk at the next `sync`."""
        line = json.dumps(clean(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        with _plain_errors(self.path / "metrics.jsonl"):
            if self._metrics < 0:
                self._metrics = os.open(self.path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            write_whole(self._metrics, line)

    def sync(self) -> None:
        """Force metrics.jsonl to the disk. Before each checkpoint, so that no checkpoint is ahead of its metrics."""
        if self._metrics >= 0:
            with _plain_errors(self.path / "metrics.jsonl"):
                os.fsync(self._metrics)
                sync(self.path)  # its name, too, which a new file could else lose

    def records(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl so far; a half-written last one is left out."""
        return read_records(self.path)

    def truncate(self, last_round: int) -> None:
        """Forget the rounds after `last_round`, the one of the checkpoint, and a half-written last line."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = _lines_until(lines, last_round)
        if any(_round(line) <= last_round for line in lines[kept:]):
            raise RunFolderError(f"line {kept + 1} of {path} is damaged: remove it to go on")
        self._refuse_lost(_round(lines[kept - 1]) if kept else 0, last_round)
        with _plain_errors(path):
            self._forget_states(last_round)
            if path.exists():
                os.truncate(path, sum(map(len, lines[:kept])))
                sync(path)

    def _refuse_lost(self, there: float, last_round: int) -> None:
        """The result is a mean over rounds: one that is lost would change it, and nothing would show."""
        if there < last_round:
            lost = f"round {last_round}" if there == last_round - 1 else f"rounds {there + 1:g} to {last_round}"
            raise RunFolderError(
                f"{self.path / 'metrics.jsonl'} has lost {lost}, which the checkpoint has done: put the file back, "
                f"remove the checkpoints after round {there:g} to do these rounds again, or start anew (--overwrite)"
            )

    def _forget_states(self, last_round: int) -> None:
        """A part of one that was given up must not be taken for a part of the one that will be written in its place."""
        for file in self.checkpoints.rglob("round-*.safetensors"):
            if int(file.stem.removeprefix("round-")) > last_round:
                file.unlink(missing_ok=True)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        text = json.dumps(clean(summary), allow_nan=False, ensure_ascii=False, indent=2)
        self.write_text("summary.json", text + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file of the folder, whole or not at all."""
        path = self.path / name
        with _plain_errors(path), replacing(path) as temp:
            temp.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Give the lock back. Closing twice does no harm."""
        if self._lock >= 0:
            # Unlocked by name, not only by closing: a forked child that still lives has the handle too.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
        if self._metrics >= 0:
            os.close(self._metrics)
        self._metrics = self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run, also while another process writes them: no lock is needed."""
    metrics = Path(path) / "metrics.jsonl"
    if not metrics.exists():
        return []
    lines = metrics.read_bytes().splitlines(keepends=True)
    records = [_parse(line) for line in lines]
    if records and records[-1] is None:
        records.pop()
    if None in records:
        raise RunFolderError(f"line {records.index(None) + 1} of {metrics} is damaged")
    return [record for record in records if record is not None]


def _holds_run(path: Path) -> bool:
    return any((path / name).exists() for name in _FILES) or any((path / "checkpoints").glob("*.safetensors"))


def _lock(path: Path) -> int:
    """An open handle of `.lock`, locked; the system gives it back even when the process is killed."""
    # Never removed: a second process could then lock a file that no longer has the name.
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.pread(handle, 32, 0).decode(errors="replace") or "not yet known"
        os.close(handle)
        raise InUseError(path, holder) from None
    except BaseException:
        os.close(handle)
        raise
    return handle


def write_whole(handle: int, line: bytes) -> None:
    """Append a line, or, where the disk has no room for all of it, nothing."""
    before = os.fstat(handle).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except BaseException:
        os.ftruncate(handle, before)
        raise


def _lines_until(lines: list[bytes], last_round: int) -> int:
    """How many lines stand before the first that is unreadable or of a later round."""
    for index, line in enumerate(lines):
        record = _parse(line)
        if record is None or record.get("round", last_round) > last_round:
            return index
    return len(lines)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None where the line is damaged or was not written to its end."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _round(line: bytes) -> float:
    return float((_parse(line) or {}).get("round", math.inf))


def clean(value: Any) -> Any:
    """The same value in JSON's terms: arrays and tensors as lists, NaN and infinity, which it lacks, as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(explain(path, error)) from error
