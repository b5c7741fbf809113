"""What can be wrong with a peer: each function changes the process that it is called in, and nothing else.

The peer is otherwise an honest one, so it passes the barrier and knows the protocol: what must stop it is the check
that the fault is about.
"""

import asyncio
import os
import signal
import time
from typing import Any

import msgspec
import torch

from semidfl.exchange import codec, server
from semidfl.exchange import grpc as exchange
from semidfl.exchange.codec import CHUNK, Body, encode
from semidfl.node import identity, peer


class _Sealing:
    """Seals the head, which is what is written first."""

    def __init__(self, seal: Any, context: Any) -> None:
        self.seal, self.context, self.first = seal, context, True

    async def write(self, words: bytes) -> None:
        first, self.first = self.first, False
        await self.context.write(self.seal.close(words) if first and len(words) < 3000 else words)


def _answers(change: Any) -> None:
    """Answers are sent by `change(server, ask, context, round, body)`."""

    async def answer(self: Any, ask: Any, context: Any) -> None:
        found = await self.mailbox.get(ask.round, ask.topic, ask.oldest, ask.wait)
        t, body = found or (0, Body(b"", b"", ()))
        head = codec.Head(
            1,
            self.me,
            self.agreement,
            ask.nonce,
            t,
            ask.topic,
            self.mailbox.at,
            self.clients,
            len(body.data),
            body.digest,
        )
        await change(head, body, _Sealing(self.seal, context))

    server.Server._answer = answer  # type: ignore[method-assign]


def _bodies(change: Any) -> None:
    """Published tensors go through `change` first."""
    honest = exchange.encode_body
    exchange.encode_body = lambda tensors: honest(change(dict(tensors)))  # type: ignore[assignment]


def _with(head: Any, **values: Any) -> bytes:
    return encode(msgspec.structs.replace(head, **values))


def killed_before_sending() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _answers(change)


def killed_in_a_chunk() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(encode(head))
        for start in range(0, len(body.data), CHUNK):
            sending = asyncio.ensure_future(context.write(body.data[start : start + CHUNK]))
            if start:
                await asyncio.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)
            await sending

    _answers(change)


def slowly() -> None:
    """No fault, but time to see something happen."""
    _sleeps(0.1)


def slow() -> None:
    """Each round takes longer, but less than the deadline."""
    _sleeps(0.2)


def late() -> None:
    """Each round takes a little longer than the deadline."""
    _sleeps(0.9)


def too_slow() -> None:
    """Each round takes far longer than the deadline and a busy machine's training."""
    _sleeps(2.0)


def _sleeps(seconds: float) -> None:
    honest = exchange.GrpcExchange.share

    def share(self: Any, t: int, topic: str, tensors: Any) -> Any:
        if topic == "models":
            time.sleep(seconds)
        return honest(self, t, topic, tensors)

    exchange.GrpcExchange.share = share  # type: ignore[method-assign]


def wrong_certificate() -> None:
    """One of another authority, though with the right name."""
    _other_identity("other")


def expired_certificate() -> None:
    """A peer that does not look at its own certificate."""
    _other_identity("expired")


def _other_identity(folder: str) -> None:
    def load(cls: Any, path: Any, name: str) -> Any:
        place = path.parent / folder
        key, cert = ((place / f"{name}.{end}").read_bytes() for end in ("key", "crt"))
        return identity.Identity(name, key, cert, (path / "authority.crt").read_bytes())

    identity.Identity.load = classmethod(load)  # type: ignore[assignment,method-assign]
    peer.Identity = identity.Identity  # type: ignore[misc]


def wrong_id() -> None:
    """A valid certificate, but messages in the name of another."""
    honest = exchange.GrpcExchange.__init__

    def init(self: Any, plan: Any, *rest: Any) -> None:
        import dataclasses

        honest(self, dataclasses.replace(plan, me="a"), *rest)

    exchange.GrpcExchange.__init__ = init  # type: ignore[method-assign]


def not_a_number() -> None:
    _bodies(lambda tensors: {n: x * torch.nan if x.is_floating_point() else x for n, x in tensors.items()})


def infinite() -> None:
    _bodies(lambda tensors: {n: x + torch.inf if x.is_floating_point() else x for n, x in tensors.items()})


def far_off() -> None:
    _bodies(lambda tensors: {n: x + 1e30 if x.is_floating_point() else x for n, x in tensors.items()})


def wrong_shape() -> None:
    _bodies(lambda tensors: {n: torch.cat([x, x], 1) if x.dim() > 1 else x for n, x in tensors.items()})


def wrong_names() -> None:
    _bodies(lambda tensors: {f"{n}s": x for n, x in tensors.items()})


def oversize() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(_with(head, size=2**36))
        for _ in range(10_000):
            await context.write(b"\0" * CHUNK)

    _answers(change)


def huge_message() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(b"\0" * (3 * CHUNK))

    _answers(change)


def garbage() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(os.urandom(300))

    _answers(change)


def unsealed_garbage() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        await context.context.write(os.urandom(300))

    _answers(change)


def foreign_seal() -> None:
    """A head that is signed with a key that nobody knows."""
    from semidfl.node.identity import _new_key

    async def change(head: Any, body: Body, context: Any) -> None:
        context.seal._key = _new_key()
        await context.write(encode(head))

    _answers(change)


def garbage_body() -> None:
    """With a hash that fits."""
    import hashlib

    async def change(head: Any, body: Body, context: Any) -> None:
        data = os.urandom(len(body.data))
        await context.write(_with(head, digest=hashlib.sha256(data).digest()))
        for start in range(0, len(data), CHUNK):
            await context.write(data[start : start + CHUNK])

    _answers(change)


def changed_body() -> None:
    """One byte is not what was hashed."""

    async def change(head: Any, body: Body, context: Any) -> None:
        data = bytearray(body.data)
        if data:
            data[-1] ^= 1
        await context.write(encode(head))
        for start in range(0, len(data), CHUNK):
            await context.write(bytes(data[start : start + CHUNK]))

    _answers(change)


_FIRST: list[tuple[Any, Body]] = []


def replay() -> None:
    """The first answer ever given, again and again."""

    async def change(head: Any, body: Body, context: Any) -> None:
        if body.data and not _FIRST:
            _FIRST.append((head, body))
        head, body = _FIRST[0] if _FIRST else (head, body)
        await context.write(encode(head))
        for start in range(0, len(body.data), CHUNK):
            await context.write(body.data[start : start + CHUNK])

    _answers(change)


def old_round() -> None:
    """The first models ever, as an answer to each question."""

    async def change(head: Any, body: Body, context: Any) -> None:
        if body.data and not _FIRST:
            _FIRST.append((head, body))
        if _FIRST:
            body = _FIRST[0][1]
            head = msgspec.structs.replace(head, round=_FIRST[0][0].round, size=len(body.data), digest=body.digest)
        await context.write(encode(head))
        for start in range(0, len(body.data), CHUNK):
            await context.write(body.data[start : start + CHUNK])

    _answers(change)


def slow_loris() -> None:
    """A stream that trickles."""

    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(encode(head))
        await asyncio.sleep(60)

    _answers(change)


def single_bytes() -> None:
    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(encode(head))
        for k in range(len(body.data)):
            await context.write(body.data[k : k + 1])

    _answers(change)


def far_ahead() -> None:
    """Claims a round that there is not."""

    async def change(head: Any, body: Body, context: Any) -> None:
        await context.write(_with(head, at=10**8, round=10**8))

    _answers(change)


def many_questions() -> None:
    """Asks far more than it needs, all at once."""
    honest = exchange.GrpcExchange._meet

    async def meet(self: Any, t: int, topic: str, body: Any, spec: Any) -> Any:
        line = self._lines["a"]
        flood = [line.fetch(t + 1, topic, t + 1, spec, 1.0, 1.0, self.plan.rounds) for _ in range(50)]
        _, answers = await asyncio.gather(
            asyncio.gather(*flood, return_exceptions=True), honest(self, t, topic, body, spec)
        )
        return answers

    exchange.GrpcExchange._meet = meet  # type: ignore[method-assign]


def ahead_and_silent() -> None:
    """Says that it is in the last round of 24, and nothing at all when it is asked for its models of then."""
    honest = server.Mailbox.get

    async def get(self: Any, t: int, topic: str, oldest: int, wait: float) -> Any:
        if topic == "state":
            await asyncio.sleep(60)
        return await honest(self, t, topic, oldest, wait)

    server.Mailbox.get = get  # type: ignore[method-assign]
    server.encode = lambda message: _with(message, at=24)  # type: ignore[assignment]
