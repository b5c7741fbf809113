"""A checkpoint in parts: each actor writes the state of its own clients, any actor can read what it needs.

    checkpoints/round-000010.safetensors             a whole state, written by one process
    checkpoints/2-of-3/round-000010.safetensors      the second of three parts

A round counts when it is there whole, or in all its parts. Each part names its clients, so a run goes on with any other
number of actors, or with none.
"""

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from semidfl.errors import CheckpointError
from semidfl.record import checkpoint
from semidfl.record.version import refuse_other_version, stamp

__all__ = ["begun", "damaged", "forget_others", "load", "load_latest", "rounds", "save"]


def save(
    folder: Path, part: int, parts: int, round: int, ids: Sequence[int], tensors: Mapping[str, Tensor], config: str
) -> None:
    """Write the state of the clients `ids` after `round`, as one of several parts (from 0)."""
    meta = {"config": config, "clients": " ".join(map(str, ids))} | stamp()
    checkpoint.save(folder / f"{part + 1}-of-{parts}", round, tensors, meta)


def rounds(folder: Path) -> list[int]:
    """The rounds that are there whole or in all parts, the newest first."""
    return sorted({round for round, _ in _complete(folder)}, reverse=True)


def begun(folder: Path) -> bool:
    """Whether a state was ever whole here: who is killed in the first leaves only some parts of that one."""
    return bool(rounds(folder)) or any(len(checkpoint.files(path)) > 1 for *_, path in _partial(folder))


def load(folder: Path, round: int, ids: Sequence[int], config: str) -> dict[str, Tensor]:
    """The state of the clients `ids` (on the CPU); one file is in memory at a time."""
    files = next((files for number, files in _complete(folder) if number == round), None)
    if files is None:
        raise CheckpointError(f"{folder} holds no whole checkpoint of round {round}")
    found: dict[str, dict[int, Tensor]] = {}
    for file in files:
        tensors, meta = checkpoint.load_model(file)
        anew = f"go on with that version, or start anew: semidfl run {folder.parent}/config.toml --overwrite"
        refuse_other_version(folder, meta, anew)
        if meta.get("config") != config:
            raise CheckpointError(f"{folder} holds a checkpoint of another config than config.toml")
        rows = _rows(tensors, meta)
        if list(rows) == list(ids):  # written by an actor with the same block: nothing to pick
            return tensors
        for name, x in tensors.items():
            found.setdefault(name, {}).update({i: x[rows[i]].clone() for i in ids if i in rows})
    if any(len(x) < len(ids) for x in found.values()):
        raise CheckpointError(f"the checkpoint of round {round} in {folder} lacks some clients")
    return {name: torch.stack([x[i] for i in ids]) for name, x in found.items()}


def load_latest(folder: Path, ids: Sequence[int], config: str) -> tuple[int, dict[str, Tensor]]:
    """The newest readable state of the clients `ids`, with its round."""
    there = rounds(folder)
    for round in there:
        try:
            return round, load(folder, round, ids, config)
        except CheckpointError as error:
            if not damaged(error):
                raise
            warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
    what = "no readable checkpoint" if there else "no checkpoint"
    raise CheckpointError(f"{folder} holds {what}: the run has to start anew (--overwrite)")


def damaged(error: CheckpointError) -> bool:
    """Whether an older checkpoint may do where this error came from: not with another config or version."""
    return "is damaged" in str(error) or "lacks some clients" in str(error) or "there is no file" in str(error)


def forget_others(folder: Path, parts: int) -> None:
    """Drop what another number of actors, or a single process, has left: a newer state is there in `parts` parts."""
    for _, _, count, path in _partial(folder):
        if count != parts:
            shutil.rmtree(path, ignore_errors=True)
    if parts > 0:
        for file in folder.glob("round-*.safetensors"):
            file.unlink(missing_ok=True)


def _rows(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> dict[int, int]:
    """Where each client stands; a whole state names none and holds all, in order."""
    if "clients" in meta:
        return {int(client): row for row, client in enumerate(meta["clients"].split())}
    return {i: i for i in range(len(next(iter(tensors.values()))))}


def _complete(folder: Path) -> Iterator[tuple[int, list[Path]]]:
    """Rounds with the files that make them up, a whole one first."""
    for number, file in checkpoint.files(folder).items():
        yield number, [file]
    sets: dict[int, dict[int, dict[int, Path]]] = {}
    for _, part, count, path in _partial(folder):
        sets.setdefault(count, {})[part] = checkpoint.files(path)
    for count, parts in sets.items():
        if len(parts) == count:
            for number in set.intersection(*(set(files) for files in parts.values())):
                yield number, [parts[part][number] for part in sorted(parts)]


def _partial(folder: Path) -> list[tuple[str, int, int, Path]]:
    names = ((re.fullmatch(r"(\d+)-of-(\d+)", path.name), path) for path in sorted(folder.glob("*-of-*")))
    return [(path.name, int(match[1]), int(match[2]), path) for match, path in names if match]
