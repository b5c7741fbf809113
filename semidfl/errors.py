"""Everything that can go wrong in a way a user can mend.

SemiDFLError
├── ConfigError       a field has a value that is not legal
├── DataError         a data set is missing, damaged or cannot be split as asked
├── TopologyError     a graph is not connected or names clients that do not exist
├── RunFolderError    a run folder is missing, or cannot be written
│   └── InUseError    another process works in it
├── CheckpointError   a checkpoint is missing, damaged or belongs to another run
├── IdentityError     a key or certificate is missing, expired or not what it should be
├── FederationError   a federation file is not legal, or the peers cannot come together
└── Stopped           a run was interrupted; its checkpoint is written and says how to go on

The command line prints these as one line and leaves with exit code 2 (130 when stopped).
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FederationError",
    "IdentityError",
    "InUseError",
    "RunFolderError",
    "SemiDFLError",
    "Stopped",
    "TopologyError",
    "nearest",
]


class SemiDFLError(Exception):
    """Base of all errors that are the user's to mend, not the program's."""


class ConfigError(SemiDFLError):
    """A field has a value that is not legal."""


class DataError(SemiDFLError):
    """A data set is missing, damaged or cannot be split as asked."""


class TopologyError(SemiDFLError):
    """A graph is not connected or names clients that do not exist."""


class RunFolderError(SemiDFLError):
    """A run folder is missing, or cannot be written."""


class InUseError(RunFolderError):
    """Another process works in a run folder."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is in use by another process (pid {holder})")
        self.path = path


class CheckpointError(SemiDFLError):
    """A checkpoint is missing, damaged or belongs to another run."""


class IdentityError(SemiDFLError):
    """A key or certificate is missing, expired or not what it should be."""


class FederationError(SemiDFLError):
    """A federation file is not legal, or the peers cannot come together."""


class Stopped(SemiDFLError):
    """A run was interrupted; its checkpoint is written and says how to go on."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint like " (did you mean 'fig1'?)" where some known name is close, else nothing."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
