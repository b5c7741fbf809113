"""The run's model card, carried along with what is exported."""

import shutil
from pathlib import Path

from semidfl.errors import RunFolderError
from semidfl.record.atomic import explain

__all__ = ["copy_card"]


def copy_card(run: Path, folder: Path) -> Path | None:
    """A copy in the folder of an export; nothing where the run has none."""
    source, target = run / "model_card.md", folder / "model_card.md"
    if not source.exists():
        return None
    try:
        if source.resolve() != target.resolve():
            shutil.copyfile(source, target)
    except OSError as error:
        raise RunFolderError(explain(target, error)) from error
    return target
