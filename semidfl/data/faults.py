"""What may be wrong with a user's folder, said in one line each with what to do about it.

Some faults stop a run (`STOP`), some it can do without but should be mended (`MEND`), some one should know (`NOTE`).
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from semidfl.data.folder import Listing, Picture
from semidfl.errors import DataError, nearest

__all__ = ["MEND", "NOTE", "STOP", "Fault", "content_faults", "file_faults", "refuse", "typos"]

STOP, MEND, NOTE = "stop", "mend", "note"
_CLOSE = 0.84
_RARE = 0.02
_SKEWED = 10
_NAMED = 5


@dataclass(frozen=True)
class Fault:
    kind: str
    """stop, mend or note"""
    text: str
    """what, where and what to do, in one line"""


def refuse(listing: Listing, readable: Sequence[Picture]) -> None:
    """Raises the first fault that stops a run."""
    for fault in content_faults(listing, readable):
        if fault.kind == STOP:
            raise DataError(fault.text)


def content_faults(listing: Listing, readable: Sequence[Picture]) -> Iterator[Fault]:
    """Of labels and classes."""
    root, counts = listing.root, Counter(p.label for p in readable if p.label is not None and not p.test)
    yield from typos(listing)
    for name in listing.empty:
        yield Fault(STOP, f"{root}: class {name!r} has no images: put some into its folder, or remove the folder")
    broken = [n for n in listing.counts() if not counts[n] and n not in listing.empty]
    for name in broken:
        only = any(p.label == name and p.test for p in readable)
        why = (
            "has images in test/ only: add some to train on" if only else "has no image that can be read: replace them"
        )
        yield Fault(STOP, f"{root}: class {name!r} {why}, or remove it")
    learnt = [name for name in listing.classes if counts[name]]
    if not counts:
        yield Fault(
            STOP,
            f"{root}: no image has a label: put some into a folder for each class, or add a labels.csv "
            "(a peer of role U needs none)",
        )
    elif len(learnt) < 2:
        yield Fault(
            STOP,
            f"{root}: all labels are of one class, {learnt[0]!r}: a classifier needs two or more; label others too",
        )
    elif max(counts.values()) > _SKEWED * min(counts[name] for name in learnt):
        (most, many), (least, few) = counts.most_common()[0], counts.most_common()[-1]
        yield Fault(
            NOTE,
            f"classes are unbalanced: {many} labels of {most!r}, {few} of {least!r}; more of the rare ones help most",
        )
    yield from untestable(listing, readable)


def untestable(listing: Listing, readable: Sequence[Picture]) -> Iterator[Fault]:
    """Images to test on whose class nobody knows."""
    if number := sum(p.test and p.label is None for p in readable):
        where = f"{listing.root}/test"
        yield Fault(STOP, f"{where}: {number} images have no label, and testing needs it: label or remove them")


def typos(listing: Listing) -> Iterator[Fault]:
    """Labels that are not among data.classes, or rare ones that look like a misspelling of a frequent one."""
    counts = listing.counts()
    for name, count in counts.items():
        where = f"{listing.root}: label {name!r} ({count} image{'s' * (count > 1)}, such as {_example(listing, name)})"
        if name not in listing.classes:
            hint = nearest(name, listing.classes)
            yield Fault(STOP, f"{where} is not among data.classes{hint}: correct it, or add it there")
        elif (meant := _meant(name, counts)) and set(listing.classes) == set(counts) | set(listing.empty):
            yield Fault(
                STOP,
                f"{where} looks like a misspelt {meant!r} ({counts[meant]} images): correct it, "
                "or name all classes with --data.classes",
            )


def _meant(name: str, counts: Counter[str]) -> str:
    """The frequent label that a rare one was probably meant to be, or nothing."""
    others = [
        other for other in counts if counts[other] > counts[name] or (counts[other] == counts[name] and other < name)
    ]
    for other in others:
        if other.casefold() == name.casefold():
            return other
    others = [o for o in others if counts[name] <= max(1, _RARE * counts[o]) and counts[o] >= 3]
    # "grade 1" and "grade 2" are neighbours, not typos.
    close = get_close_matches(name, [o for o in others if _numbers(o) == _numbers(name)], n=1, cutoff=_CLOSE)
    return close[0] if close else ""


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def _example(listing: Listing, label: str) -> str:
    return next(listing.name(p) for p in listing.pictures if p.label == label)


def file_faults(listing: Listing, unreadable: dict[str, str]) -> Iterator[Fault]:
    """Of the files themselves."""
    for name, why in unreadable.items():
        yield Fault(MEND, f"{name} cannot be read and is skipped ({why}): replace or remove it")
    for name in listing.absent:
        yield Fault(MEND, f"{name} is not there and is skipped: add it, or remove the line")
    yield from _duplicates(listing)
    if others := listing.others:
        yield Fault(NOTE, f"{len(others)} files are no images and are left out: {_some(others)}")


def _duplicates(listing: Listing) -> Iterator[Fault]:
    """Files with the same bytes; worse, with different labels, or both trained and tested on."""
    harmless = 0
    for group in _alike([p.path for p in listing.pictures]):
        same = [listing.pictures[place] for place in group]
        names = _some([listing.name(p) for p in same])
        if len({p.label for p in same if p.label is not None}) > 1:
            yield Fault(MEND, f"the same image has different labels: {names}; keep the right one")
        elif len({p.test for p in same}) > 1:
            yield Fault(NOTE, f"the same image is trained and tested on: {names}; remove it from one of them")
        else:
            harmless += 1
            if harmless <= _NAMED:
                yield Fault(NOTE, f"the same image {len(same)} times: {names}; one is enough")
    if harmless > _NAMED:
        yield Fault(NOTE, f"{harmless - _NAMED} more images are there several times")


def _alike(paths: Sequence[Path]) -> list[list[int]]:
    """Groups of places with equal content; only files of equal length are read."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for place, path in enumerate(paths):
        with suppress(OSError):  # a link that leads nowhere is reported as unreadable
            by_size[path.stat().st_size].append(place)
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for places in by_size.values():
        for place in places if len(places) > 1 else []:
            try:
                by_content[hashlib.blake2b(paths[place].read_bytes()).digest()].append(place)
            except OSError:
                continue  # reported as unreadable
    return [group for group in by_content.values() if len(group) > 1]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
