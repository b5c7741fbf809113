"""Pictures of what a table's runs generated last: kept beside it, since the runs stay where they were made."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from semidfl.config import config_hash
from semidfl.errors import SemiDFLError
from semidfl.record.atomic import explain, replacing
from semidfl.report.plans import Cell

__all__ = ["keep_pictures", "picture_of"]


def picture_of(run: str, out: Path) -> Path:
    """Where the picture of the run with this hash is kept."""
    return out / f"generated-{run}.png"


def keep_pictures(cells: Iterable[Cell], runs: Path, out: Path) -> list[Path]:
    """Of the first seed of each cell, if it generates: a row a client, columns that run through the classes."""
    files = []
    for run in dict.fromkeys(config_hash(cell.configs[0]) for cell in cells):
        if drawn := sorted((runs / run / "samples").glob("round-*.png")):
            picture = picture_of(run, out)
            try:
                with replacing(picture) as temp:
                    shutil.copyfile(drawn[-1], temp)
            except OSError as error:
                raise SemiDFLError(explain(picture, error)) from error
            files.append(picture)
    return files
