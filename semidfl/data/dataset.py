"""A data set in memory, as everything after this file sees it, and the reader of a user's own `.npz`.

Images stay bytes, channels first: a quarter of the memory of floats, and exact. `mean` and `std`
say how to turn them into the numbers that networks like.
"""

import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from semidfl.data.fingerprint import Prints, image_prints, sample_print
from semidfl.errors import DataError

__all__ = ["Dataset", "Images", "Labels", "load_npz"]

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
# A stray label such as 2**31 would otherwise make a network with that many outputs.
_MOST_CLASSES = 10_000
# All that numpy and zipfile raise on a file that is damaged, encrypted, pickled or no archive at all.
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Dataset:
    """Images and labels for training and testing; made only if they fit together."""

    name: str
    """of the catalogue, or the path of a file"""
    train_images: Images
    """(n, channels, height, width)"""
    train_labels: Labels
    """(n,), from 0; -1 where nobody knows"""
    test_images: Images
    """(m, channels, height, width)"""
    test_labels: Labels
    """(m,), from 0"""
    classes: tuple[str, ...]
    """the name of each label"""
    mean: tuple[float, ...]
    """of each channel, with pixels in [0, 1]"""
    std: tuple[float, ...]
    """of each channel, with pixels in [0, 1]"""
    sites: tuple[str, ...] = ()
    """where the data comes as one folder a client: their names, in the order of the clients"""
    owners: Labels | None = None
    """(n,), with sites: the client of each training sample"""

    def __post_init__(self) -> None:
        self._check_split("train", self.train_images, self.train_labels)
        self._check_split("test", self.test_images, self.test_labels)
        if self.test_images.shape[1:] != self.shape:
            self._refuse(f"test images are {_by(self.test_images.shape[1:])}, training images {_by(self.shape)}")
        if len(np.unique(self.train_labels[self.train_labels >= 0])) < 2:
            self._refuse("the training labels hold one class only, and a classifier needs at least two")
        if not len(self.mean) == len(self.std) == self.channels or min(self.std) <= 0:
            self._refuse(f"mean and std need one number for each of {self.channels} channels, std above 0")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @property
    def roles(self) -> str:
        """With sites, a letter a client, by what it holds: L only labels, U none, M both."""
        if self.owners is None:
            return ""
        known = [self.train_labels[self.owners == site] >= 0 for site in range(len(self.sites))]
        return "".join("L" if has.all() else "M" if has.any() else "U" for has in known)

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def height(self) -> int:
        return self.shape[1]

    @property
    def width(self) -> int:
        return self.shape[2]

    @cached_property
    def train_prints(self) -> Prints:
        """(n,), of the training images: to tell changed data by."""
        return image_prints(self.train_images)

    @cached_property
    def common_print(self) -> bytes:
        """Of what all clients share: the test images, and what the labels mean."""
        return sample_print(image_prints(self.test_images), self.test_labels) + "\0".join(self.classes).encode()

    def holding_out(self, count: int) -> "Dataset":
        """With `count` training samples to test on, the same ones always, in place of the test samples."""
        known = np.flatnonzero(self.train_labels >= 0)
        if count >= len(known):
            self._refuse(f"data.held_out = {count} leaves no label to train on: only {len(known)} are known")
        aside = np.random.RandomState(0).permutation(known)[:count]
        rest = np.delete(np.arange(len(self.train_labels)), aside)
        return replace(
            self,
            train_images=self.train_images[rest],
            train_labels=self.train_labels[rest],
            test_images=self.train_images[aside],
            test_labels=self.train_labels[aside],
            owners=None if self.owners is None else self.owners[rest],
        )

    def _check_split(self, split: str, images: Images, labels: Labels) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
            self._refuse(
                f"{split} images are {images.dtype} {images.shape}, expected uint8 (n, channels, height, width)"
            )
        if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
            self._refuse(f"{split} labels are {labels.dtype} {labels.shape}, expected int64 ({len(images)},)")
        if labels.min() < (-1 if split == "train" else 0) or labels.max() >= len(self.classes):
            self._refuse(
                f"{split} labels run from {labels.min()} to {labels.max()}, expected 0 to {len(self.classes) - 1}"
            )

    def _refuse(self, reason: str) -> None:
        raise DataError(f"data set {self.name}: {reason}")


def load_npz(path: Path) -> Dataset:
    """A user's own data: x_train, y_train (-1: no label), x_test, y_test and, if wanted, the names in `classes`."""
    arrays = _read_arrays(path)
    train, test = (_images(path, name, arrays[name]) for name in ("x_train", "x_test"))
    train_labels, test_labels = (_labels(path, name, arrays[name]) for name in ("y_train", "y_test"))
    for split, images, labels in (("train", train, train_labels), ("test", test, test_labels)):
        if len(images) != len(labels):
            raise DataError(f"{path}: x_{split} holds {len(images)} images, but y_{split} {len(labels)} labels")
    count = int(max(train_labels.max(), test_labels.max())) + 1
    classes = _class_names(path, arrays["classes"]) if "classes" in arrays else tuple(map(str, range(count)))
    if len(absent := np.setdiff1d(np.arange(len(classes)), train_labels)):
        some = ", ".join(classes[k] for k in absent[:5]) + (", …" if len(absent) > 5 else "")
        warnings.warn(
            f"{path}: nothing in y_train is of class {some}, which nobody can learn: labels count from 0, without gaps",
            stacklevel=2,
        )
    half = (0.5,) * train.shape[1]
    return Dataset(str(path), train, train_labels, test, test_labels, classes, mean=half, std=half)


def _read_arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    expected = f"expected an .npz archive with the arrays {', '.join(_ARRAYS)}"
    name = ""
    try:
        # A pickle in an archive runs code when read; plain arrays need none.
        with zipfile.ZipFile(path) as probe, np.load(path, allow_pickle=False) as archive:
            if missing := [array for array in _ARRAYS if array not in archive]:
                raise DataError(f"{path}: {missing[0]} is missing (it holds {probe.namelist()}); {expected}")
            arrays = {}
            for name in (*_ARRAYS, *({"classes"} & set(archive))):
                arrays[name] = archive[name]
            return arrays
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; {expected}") from None
    except _UNREADABLE as error:
        raise DataError(f"{path}: {name or 'the file'} cannot be read ({error}); {expected}") from None


def _images(path: Path, name: str, array: npt.NDArray[np.generic]) -> Images:
    """Pixels from (n, H, W) or (n, H, W, ch) to (n, ch, H, W)."""
    expected = "expected uint8 of shape (n, H, W) or (n, H, W, ch) with ch 1 or 3"
    if array.dtype != np.uint8:
        raise DataError(f"{path}: {name} is {array.dtype}{_nan(array)}; {expected}, pixels from 0 to 255")
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise DataError(f"{path}: {name} has the shape {array.shape}; {expected}, at least one image")
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2), dtype=np.uint8)


def _labels(path: Path, name: str, array: npt.NDArray[np.generic]) -> Labels:
    least = -1 if name == "y_train" else 0
    expected = f"expected whole numbers from 0{' (-1: no label)' if least else ''}, of shape (n,)"
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{path}: {name} is {array.dtype}{_nan(array)}; {expected}")
    if array.ndim != 1 or not len(array):
        raise DataError(f"{path}: {name} has the shape {array.shape}; {expected}, at least one")
    low, high = int(array.min()), int(array.max())
    if low < least or high >= _MOST_CLASSES:
        raise DataError(f"{path}: {name} runs from {low} to {high}; {expected} and below {_MOST_CLASSES}")
    return array.astype(np.int64)


def _class_names(path: Path, array: npt.NDArray[np.generic]) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind != "U":
        raise DataError(f"{path}: classes is {array.dtype} {array.shape}; expected one name (text) a class")
    return tuple(str(word) for word in array)


def _nan(array: npt.NDArray[np.generic]) -> str:
    floating = np.issubdtype(array.dtype, np.floating)
    return " and holds NaN" if floating and np.isnan(array.astype(np.float64)).any() else ""


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
