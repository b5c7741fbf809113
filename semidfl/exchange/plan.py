"""What an exchange over a network has to know, and what it reports of a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from semidfl.exchange.client import Neighbour

__all__ = ["Deadlines", "Meeting", "Plan"]


@dataclass(frozen=True)
class Deadlines:
    """How long a peer waits, in seconds."""

    hello: float = 300.0
    """for the neighbours at the start"""
    round: float = 60.0
    """for a neighbour's part of a round"""
    transfer: float = 60.0
    """for a message to arrive, once it has begun"""
    linger: float = 60.0
    """at the end, for neighbours that may still ask"""
    alone: float = 600.0
    """with fewer neighbours than the quorum, before this peer stops"""


@dataclass(frozen=True)
class Plan:
    """What the exchange has to know of the federation."""

    me: str
    listen: str
    clients: tuple[int, ...]
    neighbours: tuple[Neighbour, ...]
    agreement: str
    terms: Mapping[str, str]
    rounds: int
    deadlines: Deadlines = field(default_factory=Deadlines)
    staleness: int = 2
    """rounds that a neighbour's tensors may be behind"""
    discount: float = 0.5
    """weight of tensors one round behind, of what fresh ones have"""


@dataclass
class Meeting:
    """What became of the neighbours in a round."""

    missing: dict[str, str] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    received: int = 0
    present: set[str] = field(default_factory=set)
