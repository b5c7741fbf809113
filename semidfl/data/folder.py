"""A user's own folder of pictures: which files are there, and what their places say of label, site and test part.

Three layouts, told apart by what lies in the folder:

    classes   scans/CLASS/*.png      a folder a class, whatever lies below it; unlabeled/ (or unlabelled/) has no labels
    csv       scans/labels.csv       a file and its label a line; files without either have no label
    sites     shared/SITE/…          a folder a client, each in one of the layouts above

Beside them, test/ (as classes or csv) is the test part, and the classes may lie in train/. Nothing is opened here
but labels.csv.
"""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from semidfl.data.pictures import SUFFIXES
from semidfl.errors import DataError

__all__ = ["LABELS_CSV", "Listing", "Picture", "natural", "pictures_below", "scan"]

LABELS_CSV = "labels.csv"
_UNLABELLED = ("unlabeled", "unlabelled")
_TEST, _TRAIN = "test", "train"
_FILE_COLUMNS = ("file", "filename", "file_name", "image", "image_id", "path", "name", "id")
_LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "diagnosis", "y")
_LAYOUTS = (
    f"expected a folder for each class and, if wanted, unlabeled/; or images beside a {LABELS_CSV}; "
    "or a folder for each site, each like that"
)


@dataclass(frozen=True)
class Picture:
    """A file and what its place says."""

    path: Path
    label: str | None = None
    site: int = 0
    test: bool = False


@dataclass(frozen=True)
class Listing:
    """All pictures of a folder, in an order that depends on names alone."""

    root: Path
    layout: str
    pictures: tuple[Picture, ...]
    sites: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    """folders of classes without a picture"""
    absent: tuple[str, ...] = ()
    """files that a labels.csv names and that are not there, with file and line"""
    others: tuple[str, ...] = ()
    """files that are no pictures"""
    classes: tuple[str, ...] = field(default=())

    def counts(self) -> Counter[str]:
        """Pictures of each label."""
        return Counter(p.label for p in self.pictures if p.label is not None)

    def name(self, picture: Picture) -> str:
        """Its path below the folder."""
        return picture.path.relative_to(self.root).as_posix()


def scan(root: Path, classes: Sequence[str] = ()) -> Listing:
    """What is in the folder; `classes` gives the names and their order, else they are the labels found."""
    if not root.exists():
        raise DataError(f"there is no folder {root}: check the spelling, or create it; {_LAYOUTS}")
    if not root.is_dir():
        raise DataError(f"{root} is a file, not a folder of images; {_LAYOUTS}")
    try:
        listing = _sites(root) if _holds_sites(root) else _one(root)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be read: {error.strerror}") from None
    if not listing.pictures:
        raise DataError(f"{root} holds no images ({', '.join(sorted(SUFFIXES))}); {_LAYOUTS}")
    found = sorted(set(listing.counts()) | set(listing.empty), key=natural)
    return replace(listing, classes=tuple(classes) or tuple(found))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts class 10 after class 9."""
    parts = re.findall(r"\d+|\D+", text)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]


def pictures_below(folder: Path) -> list[Path]:
    """Every picture at any depth, in the order of names; hidden files and folders are left out."""
    return [path for path in _files(folder) if path.suffix.lower() in SUFFIXES]


def _files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """A link to a folder is followed, but not one to a folder that it lies in."""
    above |= {folder.resolve()}
    for entry in _entries(folder):
        if not entry.is_dir():
            yield entry
        elif entry.resolve() not in above:
            yield from _files(entry, above)


def _entries(folder: Path) -> list[Path]:
    """What lies directly in a folder, without the hidden, in natural order."""
    return sorted((folder / n for n in os.listdir(folder) if not n.startswith(".")), key=lambda p: natural(p.name))


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if entry.is_dir()]


# --- sites -------------------------------------------------------------------------------------------------


def _holds_sites(root: Path) -> bool:
    """Whether each subfolder is a client's data: some have unlabeled/ or labels.csv, or they share class names."""
    folders = [f for f in _folders(root) if f.name.lower() != _TEST]
    if (root / LABELS_CSV).exists() or any(f.name.lower() in _UNLABELLED for f in folders) or len(folders) < 2:
        return False
    inner = [{f.name for f in _folders(folder)} for folder in folders]
    marked = [bool({n.lower() for n in names} & set(_UNLABELLED)) for names in inner]
    marked = [m or (folder / LABELS_CSV).exists() for m, folder in zip(marked, folders, strict=True)]
    if not all(names or m for names, m in zip(inner, marked, strict=True)):
        return False
    names = Counter(name for site in inner for name in site)
    return any(marked) or any(count > 1 for count in names.values())


def _sites(root: Path) -> Listing:
    folders = [f for f in _folders(root) if f.name.lower() != _TEST]
    parts = [_one(folder) for folder in folders]
    pictures = [replace(p, site=site) for site, part in enumerate(parts) for p in part.pictures]
    pictures += _test_part(root)
    others = tuple(entry.name for entry in _entries(root) if entry.is_file())
    return Listing(
        root,
        "sites",
        tuple(pictures),
        tuple(folder.name for folder in folders),
        # A class that one site lacks others may have.
        tuple(sorted({name for part in parts for name in part.empty} - {p.label for p in pictures})),
        tuple(name for part in parts for name in part.absent),
        others + tuple(f"{part.root.name}/{name}" for part in parts for name in part.others),
    )


# --- one client's folder -----------------------------------------------------------------------------------


def _one(root: Path) -> Listing:
    if (root / LABELS_CSV).exists():
        return _from_csv(root)
    folders = _class_folders(root)
    pictures: list[Picture] = []
    empty = []
    for folder in folders:
        paths = pictures_below(folder)
        label = None if folder.name.lower() in _UNLABELLED else folder.name
        pictures += [Picture(path, label) for path in paths]
        if not paths and label is not None:
            empty.append(label)
    # Pictures that lie loose have no label either.
    loose = [entry for entry in _entries(root) if entry.is_file()]
    pictures += [Picture(path) for path in loose if path.suffix.lower() in SUFFIXES]
    known = {p.path for p in pictures} | set(_files(root / _TEST) if (root / _TEST).is_dir() else ())
    others = tuple(path.relative_to(root).as_posix() for path in _files(root) if path not in known)
    return Listing(root, "classes", (*pictures, *_test_part(root)), empty=tuple(empty), others=others)


def _class_folders(root: Path) -> list[Path]:
    """The folders of the classes and of what has none; train/ beside test/ is looked into."""
    folders = [f for f in _folders(root) if f.name.lower() != _TEST]
    if {f.name.lower() for f in folders} - {*_UNLABELLED} == {_TRAIN}:  # beside others, it is a class: of vehicles
        return [f for top in folders for f in (_folders(top) if top.name.lower() == _TRAIN else [top])]
    return folders


def _test_part(root: Path) -> list[Picture]:
    folder = root / _TEST
    if not folder.is_dir():
        return []
    return [replace(p, test=True) for p in _one(folder).pictures]


# --- labels.csv --------------------------------------------------------------------------------------------


def _from_csv(root: Path) -> Listing:
    held_out = root / _TEST
    paths = [p for p in pictures_below(root) if not p.is_relative_to(held_out)]
    labels, absent = _read_labels(root / LABELS_CSV, paths, root)
    pictures = [Picture(path, labels.get(path)) for path in paths]
    others = [p for p in _files(root) if p.suffix.lower() not in SUFFIXES and not p.is_relative_to(held_out)]
    names = tuple(p.relative_to(root).as_posix() for p in others if p != root / LABELS_CSV)
    return Listing(root, "csv", (*pictures, *_test_part(root)), absent=tuple(absent), others=names)


def _read_labels(file: Path, paths: Sequence[Path], root: Path) -> tuple[dict[Path, str], list[str]]:
    """The label of each picture that has one, and the files that are named but not there."""
    rows = _rows(file)
    header = [cell.strip().lower() for cell in next(rows, (0, []))[1]]
    name_at, label_at = (_column(file, header, legal) for legal in (_FILE_COLUMNS, _LABEL_COLUMNS))
    known = {path.relative_to(root).as_posix(): path for path in paths}
    stems = Counter(Path(name).with_suffix("").as_posix() for name in known)
    # Many tables name pictures without the suffix.
    known |= {
        Path(n).with_suffix("").as_posix(): p
        for n, p in known.items()
        if stems[Path(n).with_suffix("").as_posix()] == 1
    }
    labels: dict[Path, str] = {}
    lines: dict[Path, int] = {}
    absent = []
    for line, row in rows:
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if len(cells) <= max(name_at, label_at):
            raise DataError(
                f"{file}, line {line}: {len(cells)} cells where the header has {len(header)}; mend the line"
            )
        name, label = cells[name_at].removeprefix("./"), cells[label_at]
        label = "" if label.lower() in _UNLABELLED else label
        path = known.get(name)
        if path is None:
            absent.append(f"{name} ({file.relative_to(root.parent).as_posix()}, line {line})")
        elif path in lines and labels.get(path, "") != label:
            raise DataError(
                f"{file}, line {line}: {name} has the label {label!r}, but in line {lines[path]} "
                f"{labels.get(path, '')!r}; keep one of them"
            )
        else:
            lines[path] = line
            if label:
                labels[path] = label
    return labels, absent


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Every row with the number of its line; commas, semicolons and tabs all part cells."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text: save it as UTF-8") from None
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num} is no row of a table: {error}") from None


def _column(file: Path, header: Sequence[str], legal: Sequence[str]) -> int:
    for name in legal:
        if name in header:
            return header.index(name)
    raise DataError(
        f"{file}: the first line {','.join(header)[:60]!r} names no column {legal[0]!r}; "
        f"expected `file,label` (other names for it: {', '.join(legal[1:])})"
    )
