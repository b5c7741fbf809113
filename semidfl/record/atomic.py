"""Files that are there whole or not at all, and plain words for what a file system may answer.

A reader, or a run that was killed, sees the old file or the new one, never half of one: the new content goes to a
hidden file beside it, is forced to the disk, and takes the name in one step.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

__all__ = ["WORDS", "explain", "make_folder", "replacing", "sync"]

WORDS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "the file would be larger than allowed here",
    errno.EACCES: "no permission to write there: choose another folder, or ask its owner",
    errno.EPERM: "no permission to write there: choose another folder, or ask its owner",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of that path is a file, not a folder",
    errno.EEXIST: "that is a file, not a folder",
    errno.EISDIR: "that is a folder, not a file",
}
"""what a user can do something about"""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a temporary path to write; its file becomes `path` when the block ends well, else it goes."""
    # One fixed name: what a killed process left behind is overwritten by the next write, not piled up.
    temp = path.with_name(f".{path.name}.tmp")
    try:
        yield temp
        sync(temp)
        os.replace(temp, path)
        sync(path.parent)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """With its parents, and all their names on the disk: a file in it could else be lost with the folder."""
    new = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explain(path: Path | str | None, error: OSError) -> str:
    """One line for a user: which path, where it is known, what is wrong, and where possible what to do."""
    words = WORDS.get(error.errno or 0) or error.strerror or str(error)
    return f"cannot write{'' if path is None else f' {path}'}: {words}"
