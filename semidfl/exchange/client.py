"""The way to one neighbour: asks, and checks all that is answered before it is believed."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from torch import Tensor

from semidfl.exchange.codec import CHUNK, PROTOCOL, Ask, Bye, Head, Hello, Spec, decode, decode_body, encode
from semidfl.exchange.refuse import Refusal, Refused, handshake, plain
from semidfl.exchange.seal import Seal
from semidfl.exchange.server import METHODS, SERVICE, Ledger

__all__ = ["Answer", "Line", "Neighbour", "Unreachable", "channel_options"]

_SOON = 1.0
"""seconds in which a neighbour that has something to say begins to say it"""


@dataclass(frozen=True)
class Neighbour:
    """A peer whose clients are neighbours of ours."""

    name: str
    address: str
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a neighbour gave: tensors of a round, or none; and where it is."""

    round: int
    at: int
    tensors: Mapping[str, Tensor] | None
    size: int = 0


class Unreachable(Exception):
    """No answer: nobody there, the connection broke, or the time was up."""


def channel_options(name: str, secure: bool) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", CHUNK + 4096),
        # How soon a lost neighbour is looked for again is for `pauses` to say.
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Not a pause: the time that one attempt gets. A distant peer needs several round trips for TCP and TLS.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_http_proxy", 0),
    ]
    return [*options, ("grpc.ssl_target_name_override", name)] if secure else options


class Line:
    def __init__(self, me: str, peer: Neighbour, agreement: str, channel: Any, ledger: Ledger, seal: Seal) -> None:
        self.me, self.peer, self.agreement, self.ledger, self.seal = me, peer, agreement, ledger, seal
        self._channel = channel
        fetch, hello, bye = (f"/{SERVICE}/{method}" for method in METHODS)
        self._fetch = channel.unary_stream(fetch)
        self._hello, self._bye = channel.unary_unary(hello), channel.unary_unary(bye)

    async def fetch(
        self,
        t: int,
        topic: str,
        oldest: int,
        spec: Spec,
        wait: float,
        transfer: float,
        newest: int,
        ready: float = _SOON,
    ) -> Answer:
        """What the neighbour published of round t, or the nearest it has from `oldest` to `newest`.

        It may `wait` for the round; then its head must come within `ready` seconds or a part of the wait, and all of it
        within `transfer` seconds.
        """
        self._allowed()
        ask = Ask(PROTOCOL, self.me, self.agreement, os.urandom(16), t, topic, oldest, wait)
        words = encode(ask)
        self.ledger.control(self.peer.name, len(words))
        # A neighbour that has vanished without a word must not cost a whole transfer.
        soon = wait + min(transfer, max(ready, wait / 4))
        call = self._fetch(words, timeout=soon + transfer)
        head: Head | None = None
        try:
            head = self._checked(await asyncio.wait_for(call.read(), soon), ask, newest)
            if not head.size:
                return Answer(0, head.at, None)
            spec = spec if head.round == t else spec.of_another_round
            data = await self._body(call, head, spec, transfer)
            tensors = await asyncio.to_thread(decode_body, data, head.digest, spec, len(head.clients))
            return Answer(head.round, head.at, tensors, head.size)
        except TimeoutError:
            raise Unreachable("no answer in time") from None
        except grpc.aio.AioRpcError as error:
            if head is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Refused(Refusal.SLOW, f"{topic} did not arrive within {transfer:g} s") from None
            raise _translated(error) from None
        except Exception as error:
            raise _surprise(error) from error
        finally:
            call.cancel()

    def _checked(self, words: Any, ask: Ask, newest: int) -> Head:
        """A head that answers our question."""
        head = decode(Head, self.seal.open(words, self.peer.name))
        self._known(head.sender, head.agreement)
        if head.nonce != ask.nonce or head.topic != ask.topic:
            raise Refused(Refusal.REPLAY, f"an answer to another question, of topic {head.topic!r}")
        if head.at > newest:
            raise Refused(Refusal.REPLAY, f"it claims to be in round {head.at} of {newest}")
        if head.size and not (ask.oldest <= head.round <= newest):
            raise Refused(Refusal.REPLAY, f"{head.topic} of round {head.round} where {ask.oldest} is the oldest wanted")
        if head.size and tuple(head.clients) != self.peer.clients:
            raise Refused(Refusal.WRONG_ID, f"it speaks for clients {head.clients!r:.40}, not {self.peer.clients}")
        return head

    async def _body(self, call: Any, head: Head, spec: Spec, transfer: float) -> bytearray:
        """The chunks, into memory of a size that was checked first."""
        most = spec.most(len(self.peer.clients))
        if head.size > most:
            raise Refused(Refusal.OVERSIZE, f"{head.size} bytes announced, {most} are the most that can be")
        data, end, until = bytearray(head.size), 0, time.monotonic() + transfer
        while end < head.size:
            try:
                chunk = await asyncio.wait_for(call.read(), until - time.monotonic())
            except TimeoutError:
                raise Refused(Refusal.SLOW, f"{end} of {head.size} bytes in {transfer:g} s") from None
            # Full chunks only: a stream of single bytes would be work without end.
            if not isinstance(chunk, bytes) or len(chunk) != min(CHUNK, head.size - end):
                raise Refused(Refusal.GARBAGE, f"a stream of {head.size} bytes broke off or went wrong at {end}")
            data[end : end + len(chunk)] = chunk
            end += len(chunk)
        return data

    async def hello(self, mine: Hello, timeout: float) -> Hello:
        """The neighbour's answer at the barrier; whether it agrees is for the caller to see."""
        self._allowed()
        words = encode(mine)
        self.ledger.control(self.peer.name, len(words))
        try:
            answer = decode(Hello, self.seal.open(await self._hello(words, timeout=timeout), self.peer.name))
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None
        except Exception as error:
            raise _surprise(error) from error
        if answer.sender != self.peer.name:
            raise Refused(Refusal.WRONG_ID, f"{answer.sender!r} answers in the place of {self.peer.name!r}")
        if answer.nonce != mine.nonce:
            raise Refused(Refusal.REPLAY, "an answer to another hello")
        return answer

    async def bye(self, t: int, timeout: float) -> None:
        words = encode(Bye(PROTOCOL, self.me, self.agreement, t))
        self.ledger.control(self.peer.name, len(words))
        try:
            await self._bye(words, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None

    async def close(self) -> None:
        await self._channel.close()

    def _allowed(self) -> None:
        if self.seal.denied(self.peer.name, ""):
            raise Refused(Refusal.DENIED, f"{self.peer.name} is on the deny list")

    def _known(self, sender: str, agreement: str) -> None:
        if sender != self.peer.name:
            raise Refused(Refusal.WRONG_ID, f"{sender!r} answers in the place of {self.peer.name!r}")
        if agreement != self.agreement:
            raise Refused(Refusal.DISAGREES, f"agreement {agreement!r:.40} there, {self.agreement} here")


_UNTRUSTED = ("certificate", "Hostname Verification", "Custom verification", "handshake failed")


def _surprise(error: Exception) -> Exception:
    """Whatever a neighbour's bytes may cause that nobody thought of: it is refused, and training goes on."""
    return error if isinstance(error, Refused) else Refused(Refusal.GARBAGE, f"{type(error).__name__}: {error!s:.100}")


def _translated(error: Any) -> Exception:
    """gRPC's answer in our terms."""
    code, details = error.code(), plain(str(error.details() or ""))
    if code is grpc.StatusCode.UNAVAILABLE and any(word.lower() in details.lower() for word in _UNTRUSTED):
        return Refused(Refusal.CERTIFICATE, handshake(details))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Refused(Refusal.OVERSIZE, details[:120])
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Unreachable(f"it refuses us: {details[:60]}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable("no answer in time")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        return Unreachable(f"not reachable ({details.rpartition(': ')[2][:60]})")
    return Refused(Refusal.GARBAGE, f"{code.name}: {details[:100]}")
