"""The actors of a run as one thing: placed, given their blocks, asked all at once, replaced when they are lost."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from semidfl import __version__
from semidfl.cluster.actors import MAIL, Host
from semidfl.cluster.partition import Blocks, blocks_of
from semidfl.cluster.start import Place, place_of
from semidfl.config import Config
from semidfl.errors import SemiDFLError
from semidfl.exchange.ray import CalledOff
from semidfl.topology import Topology

__all__ = ["Fleet", "Lost", "merged"]

_PATIENCE = 300.0
"""seconds for an actor to find a place and to come up"""
_ANSWER = 60.0
"""seconds for an actor that may be lost to say that it is not"""


class Lost(Exception):
    """An actor, or the node that it was on, is gone."""


class Fleet:
    """As many actors as were asked for, or fewer where a lost one finds no place again."""

    def __init__(self, ray: Any, config: Config, graph: Topology, folder: Path, place: Place) -> None:
        self.ray, self.config, self.graph, self.folder, self.place = ray, config, graph, folder.resolve(), place
        self.actors: list[Any] = []
        self.blocks: Blocks
        self.epoch = 0
        self.device = ""
        self._mark = self.folder / f".seen-{secrets.token_hex(8)}"  # an actor that sees it sees the folder
        self._mark.touch()

    def start(self, count: int) -> None:
        """Bring up `count` actors, or say why not."""
        self._add(min(count, self.graph.clients))
        if len(self.actors) < min(count, self.graph.clients):
            raise SemiDFLError(
                f"only {len(self.actors)} of {count} actors ({self.place.words()}) found a place within "
                f"{_PATIENCE:.0f} s: ask for fewer (compute.actors) or add nodes"
            )

    def settle(self, done: int) -> None:
        """Give every actor its block, as it was after round `done`."""
        self.epoch += 1
        self.blocks = blocks_of(self.graph, len(self.actors))
        for surplus in self.actors[len(self.blocks.members) :]:
            self.ray.kill(surplus)
        del self.actors[len(self.blocks.members) :]
        blocks, peers = self.ray.put(self.blocks), self.actors
        self.ask([a.host.remote(self.epoch, blocks, b, peers, done) for b, a in enumerate(self.actors)])

    def everyone(self, method: str, *args: Any) -> list[Any]:
        """What every actor answers, in the order of blocks."""
        return self.ask([getattr(actor, method).remote(*args) for actor in self.actors])

    def ask(self, calls: Sequence[Any]) -> list[Any]:
        """The results of all calls. When one fails, the others are called off and the error is told plainly."""
        open_calls, found = list(calls), {}
        while open_calls:
            ready, open_calls = self.ray.wait(open_calls, num_returns=1, timeout=1.0)  # so that signals are heard
            for call in ready:
                try:
                    found[call] = self.ray.get(call)
                except self.ray.exceptions.RayTaskError as error:
                    self._call_off()
                    cause = error.cause
                    if isinstance(cause, CalledOff):  # another one is lost, and its own call will say so
                        continue
                    raise (cause if isinstance(cause, SemiDFLError) else error) from None
                except self.ray.exceptions.RayError as error:
                    self._call_off()
                    raise Lost(str(error).strip().splitlines()[0]) from error
        if len(found) < len(calls):
            raise Lost("a round was called off")
        return [found[call] for call in calls]

    def mend(self) -> int:
        """Replace the actors that do not answer; returns how many did not."""
        before = len(self.actors)
        self.actors = self._answering(self.actors, _ANSWER)
        gone = before - len(self.actors)
        # A lost node takes its places with it, but that may be known only after a while.
        while (count := min(before, self._room()) - len(self.actors)) > 0 and not self._add(count):
            pass
        if not self.actors:
            raise SemiDFLError(f"all {before} actors are lost, and no new one found a place in {_PATIENCE:.0f} s")
        return gone

    def _room(self) -> int:
        return place_of(self.ray, self.config).room

    def close(self) -> None:
        """Leave no actor behind."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        self._mark.unlink(missing_ok=True)

    def _add(self, count: int) -> bool:
        """Bring up more actors; whether there was room for them all the while, though some may not have come."""
        kind = self.ray.remote(concurrency_groups={MAIL: 4})(Host).options(**self.place.needs)
        arguments = (self.config, self.folder, self.place)
        new = [kind.remote(*arguments) for _ in range(count)]
        there = self.actors
        self.actors = [*there, *new]  # so that `close` finds them, whatever happens
        self.actors = [*there, *self._answering(new, _PATIENCE, lambda: self._room() >= len(there) + count)]
        return self._room() >= len(there) + count

    def _answering(self, asked: Sequence[Any], patience: float, worth: Callable[[], bool] = lambda: True) -> list[Any]:
        """Those that answer in time, and as long as it is worth waiting; the others are given up."""
        calls = {actor.facts.options(concurrency_group=MAIL).remote(self._mark.name): actor for actor in asked}
        end, waiting, facts = time.monotonic() + patience, list(calls), {}
        while waiting and time.monotonic() < end and worth():
            ready, waiting = self.ray.wait(waiting, num_returns=1, timeout=1.0)
            for call in ready:
                try:
                    facts[calls[call]] = self.ray.get(call)
                except self.ray.exceptions.RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, SemiDFLError) else error) from None
                except self.ray.exceptions.RayError:
                    continue
        for actor in asked:
            if actor not in facts:
                self.ray.kill(actor)
        self._check(list(facts.values()))
        return [actor for actor in asked if actor in facts]

    def _check(self, facts: Sequence[Mapping[str, Any]]) -> None:
        if not all(fact["sees"] for fact in facts):
            raise SemiDFLError(
                f"not every node sees {self.folder}: checkpoints and models are written there by the actors, so the "
                "run folder must lie on a file system that all nodes share"
            )
        ours = {"semidfl": __version__, "torch": str(torch.__version__).partition("+")[0]}
        if strange := [fact["versions"] for fact in facts if fact["versions"] != ours]:
            raise SemiDFLError(f"the cluster has other versions than the driver: {strange[0]}, here {ours}")
        self.device = ", ".join(sorted({fact["device"] for fact in facts})) or self.device

    def _call_off(self) -> None:
        for actor in self.actors:
            actor.call_off.options(concurrency_group=MAIL).remote()


def merged(records: Sequence[Any], members: Sequence[Sequence[int]]) -> Any:
    """The figures of all blocks as one: lists by client, of single numbers the largest, which all had to wait for."""
    first = records[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for record in records for name in record)
        return {name: _one(name, records, members) for name in names}
    by_block = list(zip(records, members, strict=True))
    if isinstance(first, list) and all(len(record) == len(ids) for record, ids in by_block):
        rows = dict(pair for record, ids in by_block for pair in zip(ids, record, strict=True))
        return _padded([rows[i] for i in sorted(rows)])
    numbers = all(isinstance(record, int | float) for record in records)
    return max(records) if numbers else first


def _one(name: str, records: Sequence[Mapping[str, Any]], members: Sequence[Sequence[int]]) -> Any:
    there = [(record[name], ids) for record, ids in zip(records, members, strict=True) if name in record]
    return merged([value for value, _ in there], [ids for _, ids in there])


def _padded(rows: list[Any]) -> list[Any]:
    """Rows of mixing weights are as wide as the block's largest neighbourhood; in memory, as the graph's."""
    if not all(isinstance(row, list) for row in rows):
        return rows
    widest = max(map(len, rows))
    return [row + [0.0] * (widest - len(row)) for row in rows]
