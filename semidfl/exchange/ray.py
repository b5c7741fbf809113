"""Cohorts in the actors of a cluster: each sends every other actor the rows that this one needs, once.

Only clients with a neighbour elsewhere are sent. A parcel travels through the object store, so actors on one machine
read it from shared memory; whoever waits for a parcel is woken when it comes, or when the driver calls the round off.
This file knows no Ray: how a parcel is posted is given, which lets threads stand for actors in tests.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semidfl.errors import SemiDFLError
from semidfl.exchange.base import Shared

__all__ = ["CalledOff", "Mailbox", "Parcel", "RayExchange"]

Parcel = dict[str, npt.NDArray[np.uint8]]
"""The bytes of some rows of every tensor; their type and shape the receiver knows from its own."""

Key = tuple[int, str]
"""A round and a topic."""


class CalledOff(SemiDFLError):
    """The round cannot be finished: another actor is lost."""


class Mailbox:
    """Parcels that have come and not been taken. Every start or restart of the actors is an epoch of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parcels: dict[Key, dict[int, Parcel]] = {}
        self._epoch, self._open = 0, False

    def begin(self, epoch: int) -> None:
        """Forget all; from now on only what belongs to this epoch is let in."""
        with self._changed:
            if epoch != self._epoch:  # parcels of others who began earlier may be here already
                self._parcels.clear()
            self._epoch, self._open = epoch, True

    def call_off(self) -> None:
        """Wake who waits and refuse to wait, until the next epoch begins."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def put(self, epoch: int, key: Key, sender: int, parcel: Parcel) -> None:
        with self._changed:
            if epoch > self._epoch:  # the sender has heard of the new epoch first
                self._parcels.clear()
                self._epoch, self._open = epoch, False
            if epoch == self._epoch:
                self._parcels.setdefault(key, {})[sender] = parcel
                self._changed.notify_all()

    def take(self, key: Key, senders: Sequence[int]) -> list[Parcel]:
        """The parcels of all senders, as soon as they are there."""
        with self._changed:
            while self._open and not all(sender in self._parcels.get(key, {}) for sender in senders):
                self._changed.wait()
            if not self._open:
                raise CalledOff(f"round {key[0]} was called off while {key[1]!r} were awaited")
            parcels = self._parcels.pop(key, {})
        return [parcels[sender] for sender in senders]


class RayExchange:
    """The exchange of one actor."""

    def __init__(
        self,
        own: Sequence[int],
        sends: Mapping[int, Sequence[int]],
        receives: Mapping[int, Sequence[int]],
        post: Callable[[int, Key, Parcel], None],
        mail: Mailbox,
    ) -> None:
        """`own` ids of this actor; by other actor, the own ids that go there and the ids that come from there."""
        self._sends = {peer: [list(own).index(i) for i in ids] for peer, ids in sends.items()}
        self._senders = list(receives)
        others = [i for ids in receives.values() for i in ids]
        self.ids = tuple(sorted([*own, *others]))
        place = {client: position for position, client in enumerate(self.ids)}
        self._own, self._others = [place[i] for i in own], [place[i] for i in others]
        self._post, self._mail = post, mail
        self._spent, self._waited = 0.0, 0.0
        self._bytes: dict[str, int] = {}

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        started = time.perf_counter()
        for peer, rows in self._sends.items():
            parcel = {name: _bytes_of(x[rows]) for name, x in tensors.items()}
            self._bytes[topic] = self._bytes.get(topic, 0) + sum(x.nbytes for x in parcel.values())
            self._post(peer, (t, topic), parcel)
        posted = time.perf_counter()
        parcels = self._mail.take((t, topic), self._senders)
        self._waited += time.perf_counter() - posted
        shared = Shared(self.ids, {name: self._joined(x, [p[name] for p in parcels]) for name, x in tensors.items()})
        self._spent += time.perf_counter() - started
        return shared

    def _joined(self, own: Tensor, parts: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
        """Own rows and those that came, in the order of ids (M, …)."""
        if not parts:
            return own
        together = own.new_empty((len(self.ids), *own.shape[1:]))
        together[self._own] = own
        came = torch.from_numpy(np.concatenate(parts)).view(own.dtype).view(-1, *own.shape[1:])
        together[self._others] = came.to(own.device)
        return together

    def reset(self) -> dict[str, Any]:
        """What was sent to other actors since the last reset, and how long it took; waiting is a part of that."""
        told = {"bytes": self._bytes, "seconds": self._spent, "waited": self._waited}
        self._bytes, self._spent, self._waited = {}, 0.0, 0.0
        return told


def _bytes_of(x: Tensor) -> npt.NDArray[np.uint8]:
    """As plain bytes: numpy has no bfloat16."""
    found: npt.NDArray[np.uint8] = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return found
