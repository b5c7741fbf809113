"""Generated images as one picture: a grid, for instance a row a client and a column a class."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from semidfl.errors import RunFolderError
from semidfl.record.atomic import explain, replacing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["grid", "save_png"]

_GAP = 2
"""pixels of white between two images, after scaling"""


def grid(images: NDArray[np.uint8], scale: int = 1) -> "Image":
    """A picture of `images` (rows, cols, ch, H, W), 1 or 3 channels, each pixel drawn `scale` wide and high."""
    from PIL import Image

    if images.ndim != 5 or images.shape[2] not in (1, 3) or images.dtype != np.uint8:
        raise ValueError(f"need uint8 (rows, cols, 1 or 3, H, W), got {images.dtype} {images.shape}")
    large = images.repeat(scale, axis=3).repeat(scale, axis=4)
    gap = ((0, 0), (0, 0), (0, 0), (0, _GAP), (0, _GAP))
    tiles = np.pad(large, gap, constant_values=255)
    rows, cols, channels, height, width = tiles.shape
    flat = tiles.transpose(0, 3, 1, 4, 2).reshape(rows * height, cols * width, channels)  # (H, W, ch)
    flat = flat[:-_GAP, :-_GAP]
    return Image.fromarray(np.ascontiguousarray(flat[..., 0] if channels == 1 else flat))


def save_png(path: Path, images: NDArray[np.uint8], scale: int = 1) -> None:
    """Write the grid of `images` as a PNG, whole or not at all."""
    picture = grid(images, scale)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temp:
            picture.save(temp, format="PNG")
    except OSError as error:
        raise RunFolderError(explain(path, error)) from error
