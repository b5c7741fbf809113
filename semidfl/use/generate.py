"""Images drawn from a run's consensus model: what the clients together have learnt that a class looks like."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from semidfl.data.dataset import Images
from semidfl.draws import Draws
from semidfl.errors import ConfigError, RunFolderError, nearest
from semidfl.record.atomic import explain
from semidfl.record.images import save_png
from semidfl.use.model import Trained

__all__ = ["class_number", "draw", "save_images"]

_PASS = 256
_ACROSS = 16


def class_number(trained: Trained, text: str) -> int:
    """A class by its name or number; where a name is a number, the name is meant."""
    names = trained.space.names
    if text in names:
        return names.index(text)
    if text.isdecimal() and int(text) < trained.space.classes:
        return int(text)
    legal = ", ".join(names) or f"0 to {trained.space.classes - 1}"
    raise ConfigError(f"--class {text} is not a class of this run{nearest(text, names)}: they are {legal}")


def draw(trained: Trained, classes: Sequence[int], count: int, seed: int = 0) -> Images:
    """`count` images of each class, (classes, count, ch, H, W); the same seed draws the same."""
    labels = torch.tensor(classes, device=trained.device).repeat_interleave(count)
    draws = Draws.of([seed], [0], trained.device)
    with torch.no_grad():
        images = trained.generator.sample(0, trained.params, labels, draws, _PASS)[0]
    return images.cpu().numpy().reshape(len(classes), count, *trained.space.shape)


def save_images(trained: Trained, classes: Sequence[int], images: Images, folder: Path) -> Path:
    """Each image as CLASS/NNNN.png, which is again a folder that a run can train on, and all on one sheet."""
    from PIL import Image

    names = folder_names(trained.space.names or [str(k) for k in range(trained.space.classes)])
    try:
        for k, some in zip(classes, images, strict=True):
            name = names[k]
            (folder / name).mkdir(parents=True, exist_ok=True)
            for number, image in enumerate(some):
                pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
                Image.fromarray(np.ascontiguousarray(pixels)).save(folder / name / f"{number:04d}.png")
    except OSError as error:
        raise RunFolderError(explain(folder, error)) from error
    sheet = folder / "sheet.png"
    save_png(sheet, _rows(images), scale=max(1, 64 // images.shape[-1]))
    return sheet


def folder_names(classes: Sequence[str]) -> list[str]:
    """A folder for each class, within the one above and not hidden; numbered where names would fall together."""
    plain = [re.sub(r"^\.|[^\w.-]+", "_", name) or "_" for name in classes]
    alike = len({name.casefold() for name in plain}) < len(plain)  # some file systems take no notice of case
    return [f"{k}-{name}" for k, name in enumerate(plain)] if alike else plain


def _rows(images: Images) -> Images:
    """A row a class; one class alone in a block. What does not fill the last row is white."""
    if len(images) > 1:
        return images[:, :_ACROSS]
    across = min(_ACROSS, max(1, round(images.shape[1] ** 0.5)))
    missing = -images.shape[1] % across
    padded = np.pad(images[0], ((0, missing), *((0, 0),) * 3), constant_values=255)
    return padded.reshape(-1, across, *padded.shape[1:])
