"""What is refused, why, and how often: one enum, one exception, one tally.

What others say of it is written in the log, so it is made harmless first.
"""

import logging
import re
import threading
from collections import Counter
from enum import StrEnum

__all__ = ["Refusal", "Refused", "Tally", "handshake", "plain"]

_LONGEST = 500


def plain(text: str) -> str:
    """On one line and not for ever: no line ends that forge a line of the log, no codes that steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST])


def handshake(words: str) -> str:
    """Why two peers do not trust each other, of all that gRPC says of it."""
    if found := re.search(r"OPENSSL_internal:(\w+)(?:: ([^:]+))?", words):
        what, detail = found[1], (found[2] or "OK").strip()  # "OK": all is well with the own side
        told = detail if what == "CERTIFICATE_VERIFY_FAILED" and detail != "OK" else what.replace("_", " ").lower()
    else:
        told = words.rpartition(": ")[2].strip() or words
    return told[:120]


class Refusal(StrEnum):
    """Every reason for which something that came over the network is not taken."""

    CERTIFICATE = "certificate"  # unknown authority, expired, or of another name than the one that was called
    WRONG_ID = "wrong-id"  # a message claims another name than its certificate has
    STRANGER = "stranger"  # a peer of the federation, but no neighbour
    DENIED = "denied"  # on the deny list
    PROTOCOL = "protocol"  # another version of the protocol
    DISAGREES = "disagrees"  # another config, class list or graph
    GARBAGE = "garbage"  # bytes that are no message
    OVERSIZE = "oversize"  # larger than what is expected could be
    NAMES = "names"  # tensors that were not asked for, or not all that were
    SHAPE = "shape"  # of another shape or type than expected
    NOT_FINITE = "not-finite"  # NaN or infinity
    RANGE = "range"  # numbers far beyond any that training makes
    HASH = "hash"  # content that does not fit its hash
    REPLAY = "replay"  # an answer to another question, or to one of an earlier round
    SLOW = "slow"  # a transfer that trickles
    BUSY = "busy"  # too many questions at once


class Refused(Exception):
    """Something that came over the network is not taken."""

    def __init__(self, reason: Refusal, text: str) -> None:
        self.reason, self.text = reason, plain(text)
        super().__init__(f"{reason}: {self.text}")


class Tally:
    """Counts refusals and writes each to the log; safe to use from several threads."""

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._said: Counter[tuple[str, str]] = Counter()

    def note(self, who: str, refused: Refused) -> None:
        """Logs the first, second, fourth, eighth … of a kind: a flood of refusals must not fill the disk."""
        with self._lock:
            self.counts[refused.reason.value] += 1
            self._said[who, refused.reason.value] += 1
            count = self._said[who, refused.reason.value]
        if count & (count - 1) == 0:
            self.log.warning("refused %s from %s: %s (%d of this kind)", refused.reason, who, refused.text, count)

    def snapshot(self) -> dict[str, int]:
        """How often each reason was met so far."""
        with self._lock:
            return dict(self.counts)
