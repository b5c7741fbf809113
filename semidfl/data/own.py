"""A folder of pictures as a data set: decoded, a part kept for testing, and where it has sites, one client each."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from semidfl.config import Config, DataConfig
from semidfl.data.dataset import Dataset, Images, Labels
from semidfl.data.faults import refuse, typos, untestable
from semidfl.data.folder import Listing, Picture, scan
from semidfl.data.pictures import Pixels, Shape, read_pictures
from semidfl.errors import DataError

__all__ = [
    "Own",
    "Parts",
    "class_names",
    "dataset_of",
    "held_out",
    "load_folder",
    "load_site",
    "own_folder",
    "parts_of",
    "with_sites",
]

_PURPOSE = 0x74657374  # "test": keeps these draws apart from all others of the same seed
_NAMED = 3


@dataclass(frozen=True)
class Own:
    """A folder after decoding: the pictures that could be read, with their bytes."""

    listing: Listing
    pixels: Pixels

    @property
    def pictures(self) -> list[Picture]:
        """Those that could be read, in the order of `pixels.images`."""
        return [self.listing.pictures[place] for place in self.pixels.good]

    @property
    def unreadable(self) -> dict[str, str]:
        """Names and reasons of the others."""
        return {self.listing.name(self.listing.pictures[i]): why for i, why in self.pixels.failures.items()}


def own_folder(path: Path, data: DataConfig, cache: Path | None) -> Own:
    """Find and decode everything in the folder."""
    return _own(path, class_names(data.classes), data.size, data.channels, cache)


def _own(path: Path, classes: Sequence[str], size: int | tuple[int, int], channels: int, cache: Path | None) -> Own:
    listing, kept = scan(path, classes), None
    if cache is not None:
        name = hashlib.sha256(f"{path.resolve()} {size} {channels}".encode()).hexdigest()[:16]
        kept = cache / "folders" / f"{name}.npz"
    return Own(listing, read_pictures([p.path for p in listing.pictures], size, channels, kept))


def class_names(text: str) -> tuple[str, ...]:
    """The names in data.classes."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if "" in names or len(set(names)) < len(names):
        raise DataError(f"data.classes = {text!r} is not legal: names with commas between, each once")
    return names


def load_folder(path: Path, data: DataConfig, seed: int, cache: Path | None = None) -> Dataset:
    """The data set in a folder; pictures that cannot be read are skipped with a warning that names them."""
    own = own_folder(path, data, cache)
    refuse(own.listing, own.pictures)
    _warn(own)
    return dataset_of(own, data.test, seed)


@dataclass(frozen=True)
class Parts:
    """The arrays of a folder; of one site alone, labels and test part may be empty."""

    images: Images
    labels: Labels
    """-1 where there is none"""
    owners: Labels
    test_images: Images
    test_labels: Labels


def parts_of(own: Own, percent: float, seed: int) -> Parts:
    """Training and test part: what lies in test/, else a share of the labelled pictures."""
    number = {name: k for k, name in enumerate(own.listing.classes)}
    labels = np.array([-1 if p.label is None else number[p.label] for p in own.pictures], dtype=np.int64)
    owners = np.array([p.site for p in own.pictures], dtype=np.int64)
    test = np.array([p.test for p in own.pictures], dtype=np.bool_)
    if not test.any():
        test = held_out(labels, owners, percent, seed)
    images = own.pixels.images
    return Parts(images[~test], labels[~test], owners[~test], images[test], labels[test])


def dataset_of(own: Own, percent: float, seed: int) -> Dataset:
    """The data set, if there is enough of everything."""
    listing, parts = own.listing, parts_of(own, percent, seed)
    if not len(parts.test_labels):
        raise DataError(
            f"{listing.root}: {(parts.labels >= 0).sum()} labels are too few to keep one for testing: "
            "label some more images (two a class at least), or put labelled ones into test/"
        )
    if bare := [name for k, name in enumerate(listing.sites) if not (parts.owners == k).any()]:
        raise DataError(f"{listing.root}: site {bare[0]!r} holds no image to train on: add some, or remove its folder")
    half = (0.5,) * parts.images.shape[1]
    return Dataset(
        str(listing.root),
        parts.images,
        parts.labels,
        parts.test_images,
        parts.test_labels,
        listing.classes,
        mean=half,
        std=half,
        sites=listing.sites,
        owners=parts.owners if listing.sites else None,
    )


def load_site(
    path: Path, classes: Sequence[str], shape: Shape, percent: float = 20.0, seed: int = 0, cache: Path | None = None
) -> Parts:
    """One real site's folder, which may lack labels and so a test part; classes and shape are what all agreed on."""
    own = _own(path, classes, shape[1:], shape[0], cache)
    if wrong := next(chain(typos(own.listing), untestable(own.listing, own.pictures)), None):
        raise DataError(wrong.text)
    _warn(own)
    return parts_of(own, percent, seed)


def held_out(labels: Labels, sites: Labels, percent: float, seed: int) -> npt.NDArray[np.bool_]:
    """(n,): a share of the labelled samples, in proportion to classes and sites; each keeps one of every class."""
    known = np.flatnonzero(labels >= 0)
    chosen = np.zeros(len(labels), dtype=np.bool_)
    if not len(known):
        return chosen
    groups, member, sizes = np.unique(
        sites[known] * (labels.max() + 1) + labels[known], return_inverse=True, return_counts=True
    )
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, _PURPOSE))))
    counts = _shares(sizes, max(1, round(len(known) * percent / 100)), random)
    for group in range(len(groups)):
        chosen[random.permutation(known[member == group])[: counts[group]]] = True
    return chosen


def _shares(sizes: npt.NDArray[np.int64], total: int, random: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Whole numbers near total * sizes / sum(sizes), each below its size, by largest remainder, ties by lot."""
    wanted = sizes * (total / sizes.sum())
    counts: npt.NDArray[np.int64] = np.minimum(np.floor(wanted), sizes - 1).astype(np.int64)
    lot = random.permutation(len(sizes))
    for group in lot[np.argsort(-(wanted - counts)[lot], kind="stable")]:
        if counts.sum() < total and counts[group] < sizes[group] - 1:
            counts[group] += 1
    return counts


def with_sites(config: Config, data: Dataset) -> Config:
    """The config of a run on data that lies in sites: one client each, its role by what it holds."""
    if not data.sites:
        return config
    graph, count = config.graph, len(data.sites)
    if graph.clients != count:
        raise DataError(
            f"{data.name} holds {count} sites ({_some(data.sites)}), but graph.clients = {graph.clients}: "
            f"add --clients {count} --topology full (or ring, line, star, a file of edges)"
        )
    if graph.roles not in ("", data.roles):
        raise DataError(
            f"graph.roles = {graph.roles!r}, but by their labels the sites are {data.roles!r}: leave it out"
        )
    return replace(config, graph=replace(graph, roles=data.roles))


def _warn(own: Own) -> None:
    if bad := own.unreadable:
        names = _some([f"{name}: {why}" for name, why in bad.items()])
        warnings.warn(f"{len(bad)} images that cannot be read are skipped ({names})", stacklevel=3)
    if absent := own.listing.absent:
        warnings.warn(f"{len(absent)} images of labels.csv are not there ({_some(absent)})", stacklevel=3)


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:_NAMED]) + ("; …" if len(names) > _NAMED else "")
