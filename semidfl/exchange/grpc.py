"""Cohorts that meet over a network: the synchronous face that training sees, over gRPC in a thread of its own.

A peer publishes its tensors and asks each neighbour for theirs, all at once. Every wait has an end:

- a neighbour that is late is waited for up to the deadline of the round, then taken from a round before, with less
  weight, or left out;
- one that cannot be reached is tried again with growing pauses up to the deadline; in the next rounds the deadline
  halves, down to a short probe, so that a dead neighbour does not slow down the others for ever;
- one whose answer is refused is left out of that round.

`Shared` then simply lacks it.
"""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as Expired
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from semidfl.errors import FederationError
from semidfl.exchange.base import Shared
from semidfl.exchange.client import Answer, Line, Neighbour, Unreachable, channel_options
from semidfl.exchange.codec import CHUNK, LARGEST_CONTROL, PROTOCOL, Body, Hello, Spec, encode_body
from semidfl.exchange.refuse import Refusal, Refused, Tally
from semidfl.exchange.seal import Seal
from semidfl.exchange.server import Ledger, Mailbox, Server, difference
from semidfl.node.identity import Identity
from semidfl.node.retry import pauses

__all__ = ["Deadlines", "GrpcExchange", "Plan"]

T = TypeVar("T")
_SLACK = 30.0
"""seconds after which a wait that should have ended by itself is broken off"""
_EVERY = 5.0
"""seconds between two lines of the log that say who is waited for"""
_PROBE = 0.25
"""seconds that a neighbour gets that has not been there for many rounds"""


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
    wire: str = "fp32"


@dataclass
class Meeting:
    """What became of the neighbours in a round."""

    missing: dict[str, str] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    received: int = 0
    present: set[str] = field(default_factory=set)


class GrpcExchange:
    """An `Exchange` over mutual TLS (or, with no identity, in the clear); use it in a `with` block."""

    def __init__(
        self,
        plan: Plan,
        identity: Identity | None,
        ledger: Ledger,
        log: logging.Logger,
        denied: Callable[[str, str], bool] = lambda name, fingerprint: False,
    ) -> None:
        self.plan, self.identity, self.ledger, self.log, self.denied = plan, identity, ledger, log, denied
        self.tally = Tally(log)
        self._seal = Seal(identity, denied)
        self.at: dict[str, int] = {}  # the round that each neighbour was last seen in
        self.meeting = Meeting()
        self.port = 0
        self._t = 0
        self._absent: Counter[str] = Counter()  # rounds in a row in which a neighbour could not be reached
        self._taken: dict[tuple[str, str], int] = {}  # last round taken of a neighbour and topic
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="exchange", daemon=True)

    # --- from the training thread ---------------------------------------------------------------------------------

    def __enter__(self) -> "GrpcExchange":
        self._thread.start()
        try:
            self._do(self._start(), 10.0)
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._do(self._stop(), 10.0)
        finally:
            self._end_loop()

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        """Publish, ask all neighbours, give what came in time."""
        self.enter(t)
        optional = _optional(topic, tensors)
        spec = Spec.of(tensors, optional, self.plan.wire)
        limit = self.plan.deadlines.round + self.plan.deadlines.transfer + _SLACK
        answers = self._do(self._meet(t, topic, encode_body(tensors, self.plan.wire), spec), limit)
        return self._joined(t, tensors, optional, answers)

    def enter(self, t: int) -> None:
        """This peer works on round t now."""
        if t != self._t:
            self._t = t
            self._do(self._mailbox.enter(t), 10.0)

    def publish(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> None:
        """Have something ready for whoever asks; it is encoded only then."""
        kept = dict(tensors)
        self._do(self._mailbox.put(t, topic, lambda: encode_body(kept)), 10.0)

    def collect(self, topic: str, tensors: Mapping[str, Tensor], oldest: int) -> dict[str, Answer]:
        """The newest that each neighbour has under a topic, without waiting for any."""
        spec = Spec.of(tensors, {}, "fp32")
        return self._do(self._collect(topic, spec, oldest), self.plan.deadlines.transfer + _SLACK)

    def hello(self, least: int) -> dict[str, str]:
        """The barrier: waits for the neighbours, compares, and says who is missing and why."""
        return self._do(self._barrier(least), self.plan.deadlines.hello + _SLACK)

    def finish(self) -> set[str]:
        """Says goodbye and serves until the neighbours have done so, too; returns those that have not."""
        return self._do(self._linger(), self.plan.deadlines.linger + _SLACK)

    def report(self) -> Meeting:
        """What became of the neighbours since the last report."""
        meeting, self.meeting = self.meeting, Meeting()
        return meeting

    def _do(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        """Runs in the network's thread. The limit is the last resort: what waits in there has deadlines itself."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit)
        except Expired:
            future.cancel()
            raise FederationError(f"the exchange did not come back within {limit:g} s") from None

    def _joined(
        self, t: int, own: Mapping[str, Tensor], optional: Mapping[str, Tensor], answers: Mapping[str, Answer]
    ) -> Shared:
        """Rows of own clients and neighbours in ascending order of client."""
        clients = {peer.name: peer.clients for peer in self.plan.neighbours}
        ids, ages = list(self.plan.clients), [0] * len(self.plan.clients)
        rows = {name: [x] for name, x in own.items()}
        for who, answer in answers.items():
            assert answer.tensors is not None
            ids += clients[who]
            ages += [max(0, t - answer.round)] * len(clients[who])
            for name, parts in rows.items():
                # Who has measured nothing yet counts as good as we are.
                found = answer.tensors.get(name, optional.get(name))
                assert found is not None
                if name not in answer.tensors:
                    found = found.mean().expand(len(clients[who]))
                parts.append(found.to(own[name].device, own[name].dtype))
        order = sorted(range(len(ids)), key=ids.__getitem__)
        tensors = {name: torch.cat(parts)[order] for name, parts in rows.items()}
        trust = None
        if any(ages):
            trust = torch.tensor([self.plan.discount ** ages[k] for k in order], dtype=torch.float64)
        return Shared(tuple(ids[k] for k in order), tensors, trust)

    # --- in the network's thread ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        plan = self.plan
        self._mailbox = Mailbox(kept=plan.staleness + 2)
        longest = plan.deadlines.round + plan.deadlines.transfer + _SLACK
        self._handlers = Server(
            plan.me,
            plan.agreement,
            plan.terms,
            list(plan.clients),
            {peer.name for peer in plan.neighbours},
            self._mailbox,
            self.ledger,
            self.tally,
            self.denied,
            self._seal,
            longest,
        )
        options = [
            ("grpc.max_receive_message_length", LARGEST_CONTROL),
            ("grpc.max_send_message_length", CHUNK + 4096),
            ("grpc.max_concurrent_streams", 64),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.so_reuseport", 0),  # two peers on one port would take turns
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((self._handlers.handlers(),))
        try:
            self.port = self._bind()
        except RuntimeError:
            raise FederationError(
                f"cannot listen on {plan.listen}: is another peer running there, "
                "or is it an address of others' (then give `listen`)?"
            ) from None
        await self._server.start()
        self._lines = {peer.name: self._line(peer) for peer in plan.neighbours}

    def _bind(self) -> int:
        if self.identity is None:
            return int(self._server.add_insecure_port(self.plan.listen))
        own = self.identity
        pair = [(own.key, own.certificate)]
        credentials = grpc.ssl_server_credentials(pair, own.authority, require_client_auth=True)
        return int(self._server.add_secure_port(self.plan.listen, credentials))

    def _line(self, peer: Neighbour) -> Line:
        own = self.identity
        options = channel_options(peer.name, own is not None)
        if own is None:
            channel = grpc.aio.insecure_channel(peer.address, options)
        else:
            credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
            channel = grpc.aio.secure_channel(peer.address, credentials, options)
        return Line(self.plan.me, peer, self.plan.agreement, channel, self.ledger, self._seal)

    async def _stop(self) -> None:
        for line in self._lines.values():
            await line.close()
        await self._server.stop(0.5)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    async def _meet(self, t: int, topic: str, body: Body, spec: Spec) -> dict[str, Answer]:
        await self._mailbox.put(t, topic, body)
        names = list(self._lines)
        answers = await asyncio.gather(*(self._ask(name, t, topic, spec) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def _ask(self, name: str, t: int, topic: str, spec: Spec) -> Answer | None:
        """A neighbour's part, or None: then the report says why."""
        meeting, plan = self.meeting, self.plan
        if self._absent[name] and name in meeting.missing:
            return None  # it could not be reached under an earlier topic of this round
        patience = max(plan.deadlines.round / 2 ** min(self._absent[name], 30), min(_PROBE, plan.deadlines.round))
        started = time.monotonic()
        until = started + max(0.0, patience - meeting.waited.get(name, 0.0))
        try:
            answer = await self._insist(name, t, topic, spec, until)
        except Unreachable as error:
            meeting.missing[name] = str(error)
            self._absent[name] += 1
            return None
        except Refused as refused:
            self.tally.note(name, refused)
            meeting.missing[name] = f"refused: {refused.reason}"
            return None
        finally:
            meeting.waited[name] = meeting.waited.get(name, 0.0) + time.monotonic() - started
        self._absent[name] = 0
        self.at[name] = answer.at
        return self._timely(name, t, topic, answer)

    async def _insist(self, name: str, t: int, topic: str, spec: Spec, until: float) -> Answer:
        """Asks until there is an answer or the time is up."""
        oldest = max(0, t - self.plan.staleness)
        for pause in pauses():
            try:
                wait = max(0.0, until - time.monotonic())
                transfer = self.plan.deadlines.transfer
                return await self._lines[name].fetch(t, topic, oldest, spec, wait, transfer, self.plan.rounds)
            except Unreachable:
                if time.monotonic() + pause >= until:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError  # pauses never end

    def _timely(self, name: str, t: int, topic: str, answer: Answer) -> Answer | None:
        meeting = self.meeting
        if answer.tensors is None:
            meeting.missing[name] = f"late: it is in round {answer.at}"
            return None
        if answer.round < self._taken.get((name, topic), 0):
            refused = Refused(Refusal.REPLAY, f"{topic} of round {answer.round} after one of a later round")
            self.tally.note(name, refused)
            meeting.missing[name] = f"refused: {refused.reason}"
            return None
        self._taken[name, topic] = answer.round
        meeting.received += answer.size
        meeting.missing.pop(name, None)
        meeting.present.add(name)
        if answer.round < t:
            meeting.stale[name] = t - answer.round
        return answer

    async def _collect(self, topic: str, spec: Spec, oldest: int) -> dict[str, Answer]:
        async def one(name: str) -> Answer | None:
            transfer, rounds = self.plan.deadlines.transfer, self.plan.rounds
            try:
                return await self._lines[name].fetch(rounds, topic, oldest, spec, 0.0, transfer, rounds)
            except Refused as refused:
                self.tally.note(name, refused)
            except Unreachable:
                pass
            return None

        answers = await asyncio.gather(*map(one, self._lines))
        found = zip(self._lines, answers, strict=True)
        return {name: a for name, a in found if a is not None and a.tensors is not None}

    # --- coming and going -----------------------------------------------------------------------------------------

    async def _barrier(self, least: int) -> dict[str, str]:
        until = time.monotonic() + self.plan.deadlines.hello
        why = dict.fromkeys(self._lines, "not heard of yet")
        tasks = [asyncio.create_task(self._greet(name, until, why)) for name in self._lines]
        said = time.monotonic()
        while why and time.monotonic() < until:
            await asyncio.wait(tasks, timeout=0.2)
            if len(why) == len(tasks) and all(reason.startswith("disagrees") for reason in why.values()):
                break  # it is this peer's own file that is wrong
            if why and time.monotonic() - said > _EVERY:
                said = time.monotonic()
                self.log.info("waiting for %s", "; ".join(f"{who} ({reason})" for who, reason in why.items()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What a peer said of itself explains more than that it has left.
        why |= {who: f"disagrees: {text}" for who, text in self._handlers.disputes.items() if who in why}
        if len(self._lines) - len(why) < min(least, len(self._lines)):
            text = "; ".join(f"{who}: {reason}" for who, reason in why.items())
            raise FederationError(
                f"too few neighbours came (deadlines.hello is {self.plan.deadlines.hello:g} s): {text}"
            )
        return why

    async def _greet(self, name: str, until: float, why: dict[str, str]) -> None:
        """Until the neighbour is there and agrees; `why` then no longer names it."""
        for pause in pauses(most=1.0):
            try:
                terms, nonce = dict(self.plan.terms), os.urandom(16)
                mine = Hello(PROTOCOL, self.plan.me, self.plan.agreement, nonce, self._mailbox.at, terms)
                theirs = await self._lines[name].hello(mine, max(0.1, min(5.0, until - time.monotonic())))
                if theirs.agreement == self.plan.agreement:
                    self.at[name] = min(theirs.at, self.plan.rounds)
                    del why[name]
                    return
                why[name] = f"disagrees: {difference(self.plan.terms, theirs.terms)}"
                self.tally.note(name, Refused(Refusal.DISAGREES, why[name]))
            except Refused as refused:
                why[name] = f"refused: {refused}"
                self.tally.note(name, refused)
            except Unreachable as error:
                why[name] = str(error)
            await asyncio.sleep(pause)

    async def _linger(self) -> set[str]:
        until = time.monotonic() + self.plan.deadlines.linger
        tasks = [asyncio.create_task(self._part(name, until)) for name in self._lines]
        said = time.monotonic()
        while (waiting := set(self._lines) - self._handlers.gone) and time.monotonic() < until:
            await asyncio.sleep(0.05)
            if time.monotonic() - said > _EVERY:
                said = time.monotonic()
                self.log.info("done; still serving %s", ", ".join(sorted(waiting)))
        # All neighbours are done, or time is up; a last moment for our own goodbyes.
        await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return waiting

    async def _part(self, name: str, until: float) -> None:
        for pause in pauses():
            try:
                await self._lines[name].bye(self.plan.rounds, 2.0)
                return
            except (Refused, Unreachable):
                if time.monotonic() + pause > until or name in self._handlers.gone:
                    return
                await asyncio.sleep(pause)


def _optional(topic: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a neighbour may send or not: its accuracy, known only once it has generated something to judge by."""
    if topic != "models":
        return {}
    clients = next(iter(own.values())).shape[0]
    return {"accuracy": own.get("accuracy", torch.zeros(clients, dtype=torch.float64))}
