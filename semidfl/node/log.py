"""A peer's log: plain lines on standard error, each with the time and the peer's name.

gRPC's core speaks of failed handshakes only on the process's standard error, where nobody counts. `Tap` reads that
stream, counts what it says of certificates, and lets all else through.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

from semidfl.exchange.refuse import handshake

__all__ = ["Tap", "make_log"]


def make_log(name: str, secure: bool, stream: IO[str] | None = None) -> logging.Logger:
    """Without TLS, every line says so."""
    mark = "" if secure else " INSECURE"
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name}{mark} %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = logging.Logger(f"semidfl.node.{name}", logging.INFO)
    log.addHandler(handler)
    return log


class Tap:
    """While entered, what is written to file descriptor 2 passes by here; `real` is where it goes on."""

    def __init__(self, on_certificate: Callable[[str], None]) -> None:
        self.on_certificate = on_certificate

    def __enter__(self) -> Self:
        sys.stderr.flush()
        self._kept = os.dup(2)
        self.real = os.fdopen(os.dup(self._kept), "w", buffering=1, encoding="utf-8", errors="replace")
        source, sink = os.pipe()
        os.dup2(sink, 2)
        os.close(sink)
        self._thread = threading.Thread(target=self._pump, args=(source,), name="stderr", daemon=True)
        self._thread.start()
        return self

    def _pump(self, source: int) -> None:
        with os.fdopen(source, "r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (words := _certificate(line)) is not None:
                    if words:
                        self.on_certificate(words)
                elif not _NOISE.match(line):
                    self.real.write(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr.flush()
        os.dup2(self._kept, 2)  # the pipe's last writing end closes, and the thread comes to its end
        os.close(self._kept)
        self._thread.join(2.0)


_NOISE = re.compile(r"[IWE]\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\]|WARNING: All log messages before absl")


def _certificate(line: str) -> str | None:
    """What gRPC says of a handshake that failed: the reason; "" where it only repeats one; None: another matter."""
    if "ssl_transport_security" not in line:
        return None
    return handshake(line) if "Handshake failed" in line else ""
