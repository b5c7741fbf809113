"""The deny list: names and certificate fingerprints that are refused, read again while the peer runs.

One a line, `#` starts a comment. A name shuts out a peer both ways; a fingerprint shuts out one certificate, so that
a peer whose key was stolen can come back with a new one.
"""

import logging
import time
from pathlib import Path

from semidfl.errors import IdentityError

__all__ = ["DenyList"]

_PAUSE = 1.0
"""seconds between two looks at the file"""


class DenyList:
    def __init__(self, path: Path, log: logging.Logger) -> None:
        self.path, self.log = path, log
        self._entries: frozenset[str] = frozenset()
        self._stamp: tuple[int, ...] | None = None  # of the file whose content is in force
        self._unread: tuple[int, ...] | None = None  # of one that could not be read, which is told once
        self._looked = -_PAUSE
        if path.exists():
            try:
                path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:  # else everybody on it would be let in
                raise IdentityError(f"the deny list {path} cannot be read ({error}): mend or remove it") from None

    def holds(self, name: str, fingerprint: str = "") -> bool:
        self._refresh()
        return name in self._entries or (fingerprint != "" and fingerprint in self._entries)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < _PAUSE:
            return
        self._looked = now
        stamp: tuple[int, ...] = ()
        try:
            stat = self.path.stat()
            # st_ctime changes also where only rights do.
            stamp = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            # Some editors begin a file with a mark that would become part of its first name.
            lines = self.path.read_text(encoding="utf-8").removeprefix("\ufeff").splitlines()
        except FileNotFoundError:
            # A list that vanishes while it is in force stays in force: nobody is let in by a lost file.
            if self._stamp is not None:
                self.log.warning("the deny list %s is gone: its last content stays in force", self.path)
                self._stamp = None
            return
        except (OSError, UnicodeDecodeError) as error:
            if stamp != self._unread:
                text = "the deny list %s cannot be read (%s): its last content stays in force"
                self.log.warning(text, self.path, error)
                self._unread = stamp
            return
        self._stamp = stamp
        words = (line.partition("#")[0].strip().lower().replace(":", "") for line in lines)
        entries = frozenset(word for word in words if word)
        if entries != self._entries:
            self.log.warning("deny list: %s", ", ".join(sorted(entries)) or "empty")
        self._entries = entries
