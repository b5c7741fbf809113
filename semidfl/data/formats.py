"""The file formats of the published data sets: IDX (MNIST) and CIFAR's binary batches.

CIFAR also travels as PNGs, one image a row; `batch_from_png` turns them back into the published
batches byte for byte, so that one list of hashes holds wherever the files come from.
"""

import json
import math
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from semidfl.data.dataset import Images, Labels
from semidfl.errors import DataError

__all__ = ["CIFAR_LABELS", "batch_from_png", "optional", "pack_batch", "parse_batch", "parse_idx"]

# Misspelt in the package that holds them.
CIFAR_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}
_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE


def optional(module: str, package: str) -> Any:
    """A module that the core does without; where it is missing, the error says what to install."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(f"{package} is not installed (`pip install {package}`)") from None


def parse_idx(content: bytes, name: str) -> Images:
    """The array in an IDX file of bytes: two zeros, type 8, the number of axes, then each length."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{name} is no IDX file of bytes: it begins with {content[:4]!r}")
    axes = content[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:start]) if len(content) >= start else ()
    if not shape or len(content) != start + math.prod(shape):
        raise DataError(f"{name} is damaged: its header says {shape}, but it has {len(content)} bytes")
    # A copy, because an array over bytes is read-only and torch warns of that.
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def parse_batch(content: bytes, name: str) -> tuple[Images, Labels]:
    """Images (n, 3, 32, 32) and labels (n,) of a CIFAR-10 batch: records of a label and three planes."""
    if not content or len(content) % _RECORD:
        raise DataError(f"{name} is damaged: {len(content)} bytes are not a whole number of {_RECORD}-byte records")
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE).copy(), records[:, 0].astype(np.int64)


def pack_batch(rows: Images, labels: list[int]) -> bytes:
    """The binary batch of images as rows of pixels (n, 1024, 3): label first, then red, green, blue."""
    planes = rows.transpose(0, 2, 1).reshape(len(rows), -1)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], planes], axis=1).tobytes()


def batch_from_png(path: Path) -> bytes:
    """The binary batch that `data_batch_K.png` or `test_batch.png` was made from; labels lie beside it."""
    image = optional("PIL.Image", "pillow")
    with image.open(path) as picture:
        rows = np.asarray(picture.convert("RGB"))  # (n, 1024, 3)
    split, _, number = path.stem.replace("data_batch", "train").partition("_")
    labels = json.loads((path.parent / CIFAR_LABELS[split]).read_text())
    first = (int(number) - 1) * len(rows) if split == "train" else 0
    return pack_batch(rows, labels[first : first + len(rows)])
