"""The version that wrote a file with tensors, and what it says of the images that the network in it takes."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semidfl.data.shards import Space
from semidfl.errors import CheckpointError

__all__ = ["FORMAT", "refuse_other_version", "space_of", "stamp"]

FORMAT = "2"
"""of the files with tensors; another number means that they cannot be read"""


def stamp(space: Space | None = None) -> dict[str, str]:
    """What goes into the metadata of a file with tensors."""
    from semidfl import __version__

    text = {"format": FORMAT, "version": __version__}
    return text if space is None else text | {"space": json.dumps(asdict(space))}


def space_of(meta: Mapping[str, str]) -> Space:
    """The space that `stamp` wrote."""
    fields: dict[str, Any] = json.loads(meta["space"])
    tuples: dict[str, Any] = {name: tuple(x) for name, x in fields.items() if isinstance(x, list)}
    return Space(**(fields | tuples))


def refuse_other_version(path: Path, meta: Mapping[str, str], advice: str) -> None:
    """An error where a file is of a version that this one cannot read."""
    from semidfl import __version__

    if meta.get("format") != FORMAT:
        wrote = meta.get("version", "of an earlier time")
        raise CheckpointError(f"{path} was written by semidfl {wrote}, which {__version__} cannot read: {advice}")
