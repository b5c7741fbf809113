"""What `semidfl data check` tells of a folder of images: what is in it, what is wrong with it, what it costs."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semidfl.config import DataConfig
from semidfl.data.faults import NOTE, STOP, Fault, content_faults, file_faults
from semidfl.data.own import Own, dataset_of, own_folder, parts_of
from semidfl.errors import DataError

__all__ = ["FolderReport", "Site", "check_folder"]


@dataclass(frozen=True)
class Site:
    """A client's part."""

    name: str
    role: str
    """L labelled, U unlabelled, M both"""
    labelled: int
    unlabelled: int


@dataclass(frozen=True)
class FolderReport:
    name: str
    layout: str
    """classes, csv or sites"""
    shape: tuple[int, int, int]
    """channels, height, width that a run will work on"""
    sizes: dict[str, int]
    """how many images had which size"""
    classes: tuple[str, ...]
    train_counts: tuple[int, ...]
    """labelled training images of each class"""
    test_counts: tuple[int, ...]
    """test images of each class"""
    unlabelled: int
    sites: tuple[Site, ...]
    memory: int
    """bytes of all images in a run"""
    faults: tuple[Fault, ...]

    @property
    def usable(self) -> bool:
        """Whether a run would take it as it is."""
        return all(fault.kind != STOP for fault in self.faults)

    @property
    def clean(self) -> bool:
        """Whether there is nothing to mend."""
        return all(fault.kind == NOTE for fault in self.faults)


def check_folder(path: Path, data: DataConfig, seed: int = 0) -> FolderReport:
    """Reads every image; raises only where there is no folder or nothing in it."""
    own = own_folder(path, data, cache=None)
    faults = [*content_faults(own.listing, own.pictures), *file_faults(own.listing, own.unreadable)]
    if all(fault.kind != STOP for fault in faults):
        try:
            dataset_of(own, data.test, seed)  # as a run would
        except DataError as error:
            faults.append(Fault(STOP, str(error)))
    channels, height, width = own.pixels.images.shape[1:]
    train, test, unlabelled, sites = _counts(own, data.test, seed, whole=all(f.kind != STOP for f in faults))
    return FolderReport(
        str(path),
        own.listing.layout,
        (channels, height, width),
        own.pixels.sizes,
        own.listing.classes,
        train,
        test,
        unlabelled,
        sites,
        own.pixels.images.nbytes,
        tuple(sorted(faults, key=lambda fault: ("stop", "mend", "note").index(fault.kind))),
    )


def _counts(
    own: Own, percent: float, seed: int, whole: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[Site, ...]]:
    names = own.listing.classes
    if not whole:  # no split can be made: what there is, by label
        train, test = (Counter(p.label for p in own.pictures if p.test is part) for part in (False, True))
        return tuple(train[n] for n in names), tuple(test[n] for n in names), train[None], ()
    parts = parts_of(own, percent, seed)
    known = parts.labels >= 0
    train_counts, test_counts = (
        tuple(np.bincount(labels, minlength=len(names)).tolist()) for labels in (parts.labels[known], parts.test_labels)
    )
    sites = []
    for k, name in enumerate(own.listing.sites):
        held = known[parts.owners == k]
        role = "L" if held.all() else "M" if held.any() else "U"
        sites.append(Site(name, role, int(held.sum()), int((~held).sum())))
    return train_counts, test_counts, int((~known).sum()), tuple(sites)
