"""Cohorts that meet over a network: the synchronous face that training sees, over gRPC in a thread of its own.

A peer publishes its tensors and asks each neighbour for theirs, all at once. Every wait has an end:

- a neighbour that is late is waited for up to the deadline of the round, then taken from a round before, with less
  weight, or left out;
- one that cannot be reached is tried again with growing pauses up to the deadline; in the next rounds the deadline
  halves, down to a short probe, so that a dead neighbour does not slow down the others for ever;
- one whose answer is refused is left out of that round; one that trickles also of the next, and each time of twice as
  many.

`Shared` then simply lacks it.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import TimeoutError as Expired
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from semidfl.errors import FederationError
from semidfl.exchange.base import Shared, mixed_before, mixing
from semidfl.exchange.client import Answer, Line, Neighbour, Unreachable, channel_options
from semidfl.exchange.codec import Body, Spec, encode_body
from semidfl.exchange.greet import Greeting
from semidfl.exchange.plan import Meeting, Plan
from semidfl.exchange.refuse import Refusal, Refused, Tally
from semidfl.exchange.seal import Seal
from semidfl.exchange.server import Ledger, Mailbox, Server, server_options
from semidfl.exchange.spare import Spared
from semidfl.node.identity import Identity
from semidfl.node.retry import pauses

__all__ = ["GrpcExchange"]

T = TypeVar("T")
_SLACK = 30.0
"""seconds after which a wait that should have ended by itself is broken off"""
_PROBE = 0.25
"""seconds that a neighbour gets that has not been there for many rounds"""


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
        self._tricklers = Spared(most=32)  # those who did not finish what they began
        self._specs: dict[str, Spec] = {}  # of each topic, all that this peer has shared under it
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
        spec = self._specs[topic] = Spec.of(tensors, optional).after(self._specs.get(topic))
        limit = self.plan.deadlines.round + 2 * self.plan.deadlines.transfer + _SLACK
        answers = self._do(self._meet(t, topic, encode_body(tensors), spec), limit)
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

    def collect(
        self, topic: str, tensors: Mapping[str, Tensor], oldest: int, names: Collection[str] | None = None
    ) -> dict[str, Answer]:
        """The newest that each neighbour, or each of these, has under a topic, without waiting for a new one."""
        spec = Spec.of(tensors, {})
        limit = self.plan.deadlines.round + 2 * self.plan.deadlines.transfer + _SLACK
        return self._do(self._collect(topic, spec, oldest, self._lines if names is None else names), limit)

    def hello(self, least: int, restarted: bool = False) -> dict[str, str]:
        """The barrier: waits for the neighbours, compares, and says who is missing and why.

        Where the others are under way, enough of them will do: whoever is not there is not waited for any longer.
        After a restart that is so from the beginning, and none of them is kept waiting meanwhile.
        """
        return self._do(self._greeting.barrier(least, restarted), self.plan.deadlines.hello + _SLACK)

    def finish(self) -> set[str]:
        """Says goodbye and serves until the neighbours have done so, too; returns those that have not."""
        return self._do(self._greeting.linger(), self.plan.deadlines.linger + _SLACK)

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
        self._server = grpc.aio.server(options=server_options(len(plan.neighbours)))
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
        self._greeting = Greeting(plan, self._lines, self._handlers, self.tally, self.log, self.at)

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
        if t < (again := self._tricklers.until(name)):
            meeting.missing[name] = f"slow: asked again in round {again}"
            return None
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
            if refused.reason is Refusal.SLOW:
                self._tricklers.fails(name, t)
            return None
        finally:
            meeting.waited[name] = meeting.waited.get(name, 0.0) + time.monotonic() - started
        self._absent[name] = 0
        self._tricklers.answers(name)
        self.at[name] = answer.at
        return self._timely(name, t, topic, answer, spec)

    async def _insist(self, name: str, t: int, topic: str, spec: Spec, until: float) -> Answer:
        """Asks until there is an answer or the time is up."""
        # An older round's second mixing says nothing that its first of this round does not say better.
        oldest = t if mixed_before(topic) else max(0, t - self.plan.staleness)
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

    def _timely(self, name: str, t: int, topic: str, answer: Answer, spec: Spec) -> Answer | None:
        meeting = self.meeting
        if answer.tensors is None:
            meeting.missing[name] = f"late: it is in round {answer.at}"
            return None
        if lacking := spec.needed - answer.tensors.keys():
            meeting.missing[name] = f"late: its {topic} of round {answer.round} have no {min(lacking)}"
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

    async def _collect(self, topic: str, spec: Spec, oldest: int, names: Collection[str]) -> dict[str, Answer]:
        async def one(name: str) -> Answer | None:
            transfer, rounds = self.plan.deadlines.transfer, self.plan.rounds
            try:
                ready = self.plan.deadlines.round  # a whole state may take a while to be made
                return await self._lines[name].fetch(rounds, topic, oldest, spec, 0.0, transfer, rounds, ready)
            except Refused as refused:
                self.tally.note(name, refused)
            except Unreachable:
                pass
            return None

        answers = await asyncio.gather(*map(one, names))
        found = zip(names, answers, strict=True)
        # Of another round a part may be lacking, which is no offence, but no help here either.
        return {name: a for name, a in found if a and a.tensors is not None and spec.needed <= a.tensors.keys()}


def _optional(topic: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a neighbour may send or not: its accuracy, known only once it has generated something to judge by."""
    if not mixing(topic):
        return {}
    clients = next(iter(own.values())).shape[0]
    return {"accuracy": own.get("accuracy", torch.zeros(clients, dtype=torch.float64))}
