"""Tensors on disk: safetensors with text beside them and a checksum over all of it, written whole or not at all.

The last two checkpoints are kept. A full disk leaves the last good one; a damaged newest one falls back to the one
before. The checksum is there because safetensors notices a short file, but not a flipped byte.
"""

import json
import re
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from semidfl.errors import CheckpointError
from semidfl.record.atomic import explain, make_folder, replacing

__all__ = ["files", "load_latest", "load_model", "on_cpu", "save", "save_model"]

_KEPT = 2
_CHECKSUM = "crc32"


def save(folder: Path, round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> None:
    """Write the state after `round` and drop all but the last two."""
    save_model(folder / f"round-{round:06d}.safetensors", tensors, meta)
    _prune(folder, round)


def load_latest(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, str]]:
    """The newest readable checkpoint: its round, tensors (on the CPU) and text."""
    rounds = files(folder)
    for number in sorted(rounds, reverse=True):
        try:
            return number, *load_model(rounds[number])
        except CheckpointError as error:
            warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
    what = "no readable checkpoint" if rounds else "no checkpoint"
    raise CheckpointError(f"{folder} holds {what}: the run has to start anew (--overwrite)")


def save_model(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> None:
    """Write tensors and text to one file, whole or not at all."""
    ready = on_cpu(tensors)
    text = {**meta, _CHECKSUM: _checksum(ready, meta)}
    try:
        make_folder(path.parent)
        with replacing(path) as temp:
            save_file(ready, temp, text)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{explain(path, _os_error(error))}; what was there before is kept") from error


def load_model(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (on the CPU) and text of a file that `save_model` or `save` wrote, checked."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            meta = dict(file.metadata() or {})
    except FileNotFoundError:
        # safetensors says so of a file that may not be read, too.
        raise CheckpointError(
            f"no permission to read {path}" if path.exists() else f"there is no file {path}"
        ) from None
    # What a damaged header makes of names and sizes is not foreseeable, nor are the errors.
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    expected = meta.pop(_CHECKSUM, None)
    if expected != _checksum(tensors, meta):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
    return tensors, meta


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain copies where needed: safetensors takes neither other devices nor views of one storage."""
    ready: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        ready[name] = plain
    return ready


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """CRC-32 of names, types, shapes, text and all bytes, in the order of names."""
    names = sorted(tensors)
    head = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    value = zlib.crc32(json.dumps([head, sorted(meta.items())]).encode())
    for name in names:
        # As bytes first: numpy has no bfloat16.
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def files(folder: Path) -> dict[int, Path]:
    """The checkpoints that are there, by their rounds."""
    names = ((re.fullmatch(r"round-(\d+)\.safetensors", path.name), path) for path in folder.glob("round-*"))
    return {int(match[1]): path for match, path in names if match}


def _prune(folder: Path, latest: int) -> None:
    """Keep `latest` and the one before; later ones are of a future that a resume gave up."""
    rounds = files(folder)
    kept = sorted(number for number in rounds if number <= latest)[-_KEPT:]
    for number, path in rounds.items():
        if number not in kept:
            path.unlink(missing_ok=True)
    for leftover in folder.glob(".round-*.tmp"):
        leftover.unlink(missing_ok=True)


def _os_error(error: Exception) -> OSError:
    """safetensors hides the system's answer in its text: "... (os error 28)"."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]) if found else 0, str(error))
