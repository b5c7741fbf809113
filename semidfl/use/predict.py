"""What a trained classifier says of pictures on disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from semidfl.data.folder import pictures_below
from semidfl.data.pictures import decode_all
from semidfl.errors import DataError
from semidfl.use.model import Trained

__all__ = ["Prediction", "pictures_of", "predict"]

_BLOCK = 1024
"""pictures in memory at a time"""


@dataclass(frozen=True)
class Prediction:
    file: str
    label: str
    """the most probable class; empty where the picture cannot be read"""
    probability: float
    probabilities: dict[str, float]
    """of every class"""
    error: str = ""
    """why it cannot be read"""


def pictures_of(source: Path) -> list[Path]:
    """The picture, or all in the folder."""
    if source.is_dir():
        found = pictures_below(source)
        if not found:
            raise DataError(f"{source} holds no images")
        return found
    if not source.exists():
        raise DataError(f"there is no image or folder {source}: check the spelling")
    return [source]


def predict(trained: Trained, paths: list[Path]) -> Iterator[Prediction]:
    """One answer a picture, in their order."""
    space = trained.space
    names = space.names or tuple(map(str, range(space.classes)))
    for start in range(0, len(paths), _BLOCK):
        block = paths[start : start + _BLOCK]
        images = decode_all(block, space.shape)
        good = [image for image in images if not isinstance(image, str)]
        answers = iter(trained.predict(torch.from_numpy(np.stack(good))).tolist() if good else [])
        for path, image in zip(block, images, strict=True):
            if isinstance(image, str):
                yield Prediction(str(path), "", 0.0, {}, image)
                continue
            p = next(answers)
            best = max(range(len(p)), key=p.__getitem__)
            yield Prediction(str(path), names[best], p[best], dict(zip(names, p, strict=True)))
