"""A site's own data, and nothing that only others could know: a folder of images (docs/own-data.md), or an .npz.

    x_train   (n, H, W) or (n, H, W, ch) uint8
    y_train   (n,) labels, -1 for a sample without one; may be left out where there are none (role U)
    x_test, y_test   held-out samples with labels, to score this peer's model by; may be left out

Which classes there are, how large images are and how they are normalised comes from the federation file.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from semidfl.data import own
from semidfl.data.dataset import _UNREADABLE, Images, Labels, _images
from semidfl.data.fingerprint import client_prints, image_prints, sample_print
from semidfl.data.shards import Index, Shards, Space
from semidfl.data.sources import cache_folder
from semidfl.errors import DataError

__all__ = ["Site", "load_site"]


@dataclass(frozen=True)
class Site:
    """What one peer holds."""

    images: Images  # (n, ch, H, W)
    labels: Labels  # (n,), -1 where there is none
    test_images: Images  # (m, ch, H, W), m may be 0
    test_labels: Labels  # (m,)

    def shards(self, device: torch.device) -> Shards:
        labelled, unlabelled = ([np.flatnonzero(mask)] for mask in (self.labels >= 0, self.labels < 0))
        images, labels = torch.from_numpy(self.images).to(device), torch.from_numpy(self.labels).to(device)
        tested = sample_print(image_prints(self.test_images), self.test_labels)
        prints = client_prints(image_prints(self.images), self.labels, labelled, unlabelled, tested)
        return Shards(images, labels, Index.of(labelled, device), Index.of(unlabelled, device), prints)


def load_site(
    path: Path, space: Space, role: str, classes: Sequence[str] = (), percent: float = 20.0, seed: int = 0
) -> Site:
    """The data of a site, as its role in the federation says that it has them.

    `classes` are the names that a folder's labels must be of; `percent` of them are held out where it has no test/.
    """
    site = _folder(path, space, role, classes, percent, seed) if path.is_dir() else _archive(path, space, role)
    _check_role(path, role, site.labels)
    return site


def _folder(path: Path, space: Space, role: str, classes: Sequence[str], percent: float, seed: int) -> Site:
    parts = own.load_site(path, classes, space.shape, percent, seed, cache_folder())
    labels = np.full_like(parts.labels, -1) if role == "U" else parts.labels
    return Site(parts.images, labels, parts.test_images, parts.test_labels)


def _archive(path: Path, space: Space, role: str) -> Site:
    arrays = _read(path)
    if "x_train" not in arrays:
        raise DataError(f"{path}: x_train is missing (it holds {', '.join(sorted(arrays)) or 'nothing'})")
    images = _pixels(path, "x_train", arrays["x_train"], space)
    labels = np.full(len(images), -1, dtype=np.int64)
    if role != "U":
        if "y_train" not in arrays:
            raise DataError(f"{path}: y_train is missing, and role {role} says that this peer has labels")
        labels = _labels(path, "y_train", arrays["y_train"], len(images), space.classes, least=-1)
    test, truth = np.zeros((0, *space.shape), dtype=np.uint8), np.zeros(0, dtype=np.int64)
    if "x_test" in arrays and "y_test" in arrays:
        test = _pixels(path, "x_test", arrays["x_test"], space)
        truth = _labels(path, "y_test", arrays["y_test"], len(test), space.classes, least=0)
    return Site(images, labels, test, truth)


def _check_role(path: Path, role: str, labels: Labels) -> None:
    bare, known = int((labels < 0).sum()), int((labels >= 0).sum())
    if role == "L" and bare:
        raise DataError(f"{path}: {bare} samples have no label, but role L says that all have: make it M")
    if role != "U" and not known:
        raise DataError(f"{path}: no sample has a label, but role {role} says that some have: make it U")


def _read(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    name = ""
    try:
        # A pickle in an archive runs code when read; plain arrays need none.
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            arrays = {}
            for name in {"x_train", "y_train", "x_test", "y_test"} & set(archive):
                arrays[name] = archive[name]
            return arrays
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file or folder") from None
    except _UNREADABLE as error:
        raise DataError(f"{path}: {name or 'the file'} cannot be read ({error}); expected an .npz archive") from None


def _pixels(path: Path, name: str, array: npt.NDArray[np.generic], space: Space) -> Images:
    images = _images(path, name, array)
    if images.shape[1:] != space.shape:
        found, wanted = ("x".join(map(str, shape)) for shape in (images.shape[1:], space.shape))
        raise DataError(
            f"{path}: {name} holds images of {found}, the federation's are {wanted} (channels, height, width)"
        )
    return images


def _labels(path: Path, name: str, array: npt.NDArray[np.generic], count: int, classes: int, least: int) -> Labels:
    if not np.issubdtype(array.dtype, np.integer) or array.shape != (count,):
        raise DataError(f"{path}: {name} is {array.dtype} {array.shape}, expected whole numbers of shape ({count},)")
    labels = array.astype(np.int64)
    if len(labels) and (labels.min() < least or labels.max() >= classes):
        raise DataError(f"{path}: {name} runs from {labels.min()} to {labels.max()}, expected {least} to {classes - 1}")
    return labels
