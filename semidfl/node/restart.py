"""A peer that starts again: its run folder as it was left, if that is of the same federation and the same data."""

import hashlib
from pathlib import Path

from semidfl.cohort import Cohort
from semidfl.config import Config, config_hash, to_toml
from semidfl.errors import CheckpointError
from semidfl.node import audit
from semidfl.node.federation import Federation
from semidfl.record import checkpoint
from semidfl.record.folder import RunFolder
from semidfl.record.version import refuse_other_version

__all__ = ["SENT_BEFORE", "open_folder", "sent", "take_up"]

SENT_BEFORE = "sent before"
"""of the marks, the bytes that the audit log, which outlives an overwrite, knew before this run"""


def open_folder(path: Path, config: Config, overwrite: bool) -> RunFolder:
    """The run folder, new or as it was left."""
    if not overwrite and (path / "config.toml").is_file():
        return RunFolder.open(path)
    return RunFolder.create(path, to_toml(config), overwrite)


def take_up(kept: RunFolder, config: Config, federation: Federation, cohort: Cohort) -> tuple[int, dict[str, str]]:
    """Takes up the last checkpoint; how many rounds it has done, and the marks that this run's checkpoints bear."""
    done, terms = 0, _terms(federation)
    before = str(sent(kept.path))
    if checkpoint.files(kept.checkpoints):
        done, tensors, meta = checkpoint.load_latest(kept.checkpoints)
        refuse_other_version(kept.checkpoints, meta, "go on with that version, or pass --overwrite to start anew")
        if meta.get("config") != config_hash(config):
            raise CheckpointError(f"{kept.checkpoints} is of another config: pass --overwrite to start anew")
        if other := [name for name, mark in terms.items() if meta.get(name, mark) != mark]:
            raise CheckpointError(
                f"{kept.checkpoints} is of a federation file with other {' and '.join(other)}: "
                "put that file back, or pass --overwrite to start anew"
            )
        cohort.restore(tensors)
        before = meta.get(SENT_BEFORE, "0")
    kept.truncate(done)
    if (text := to_toml(config)) != kept.config_toml:  # where and how it is computed is as asked for now
        kept.write_text("config.toml", text)
    return done, terms | {SENT_BEFORE: before}


def sent(folder: Path) -> int:
    """Bytes that have left this machine, by the audit log."""
    return sum(audit.sum_up(folder).sizes.values()) if (folder / audit.FILE).exists() else 0


def _terms(federation: Federation) -> dict[str, str]:
    """A hash of each of the things that all peers agree on, but for the config, which has its own."""
    terms = {name: text for name, text in federation.terms.items() if name != "config"}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in terms.items()}
