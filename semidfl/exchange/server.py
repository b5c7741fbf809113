"""What a peer serves: its own published tensors, to its neighbours, over mutual TLS.

Nobody sends a peer anything unasked: tensors move only as answers, to questions that the receiver put. A question for
a round that is yet to come waits for it, no longer than the asker allows.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

import grpc

from semidfl.exchange.codec import CHUNK, PROTOCOL, Ask, Body, Bye, Head, Hello, decode, encode
from semidfl.exchange.refuse import Refusal, Refused, Tally
from semidfl.exchange.seal import Seal

__all__ = ["METHODS", "SERVICE", "Ledger", "Mailbox", "Server", "difference"]

SERVICE = "semidfl.Peer"
METHODS = ("fetch", "hello", "bye")
_QUESTION = 10.0
"""seconds in which a question must have come, once its line is open"""
_AT_ONCE = 8
"""questions of one peer that are answered at the same time"""


class Ledger(Protocol):
    """Where everything that leaves the machine is written down."""

    def sends(self, peer: str, topic: str, round: int, names: Collection[str], size: int, digest: bytes) -> None: ...

    def control(self, peer: str, size: int) -> None: ...


class Mailbox:
    """The last rounds of each topic, ready to be fetched. Lives in the network's thread."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.at = 0  # the round that this peer works on
        self.waits = True  # whether a round that is yet to come may be waited for: not while nobody works on it
        self._topics: dict[str, dict[int, Body | Callable[[], Body]]] = {}
        self._changed = asyncio.Condition()

    async def enter(self, t: int) -> None:
        """This peer goes on to another round: what it has not published of earlier ones will not come any more."""
        async with self._changed:
            self.at = t
            self._changed.notify_all()

    async def put(self, t: int, topic: str, body: Body | Callable[[], Body]) -> None:
        async with self._changed:
            rounds = self._topics.setdefault(topic, {})
            rounds[t] = body
            for old in sorted(rounds)[: -self.kept]:
                del rounds[old]
            self._changed.notify_all()

    async def get(self, t: int, topic: str, oldest: int, wait: float) -> tuple[int, Body] | None:
        """That of round t, waited for; else the newest that is not older than `oldest`."""
        until = time.monotonic() + wait
        async with self._changed:
            while self.waits and t not in self._topics.get(topic, {}) and self.at <= t:
                if (left := until - time.monotonic()) <= 0:
                    break
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    break
            rounds = self._topics.get(topic, {})
            found = t if t in rounds else max((r for r in rounds if r >= oldest), default=None)
            if found is None:
                return None
            body = rounds[found]
        if not isinstance(body, Body):  # made when it is first asked for, while others are answered
            rounds[found] = made = await asyncio.to_thread(body)
            return found, made
        return found, body


class Server:
    """The handlers. Each first finds out who asks, and whether that may be."""

    def __init__(
        self,
        me: str,
        agreement: str,
        terms: Mapping[str, str],
        clients: list[int],
        neighbours: Collection[str],
        mailbox: Mailbox,
        ledger: Ledger,
        tally: Tally,
        denied: Callable[[str, str], bool],
        seal: Seal,
        longest: float,
    ) -> None:
        self.me, self.agreement, self.terms, self.clients = me, agreement, dict(terms), clients
        self.neighbours, self.mailbox, self.ledger, self.tally = neighbours, mailbox, ledger, tally
        self.denied, self.seal, self.longest = denied, seal, longest
        self.secure = seal.identity is not None
        self.begun = False  # whether a neighbour trains already: it has asked for tensors
        self.gone: set[str] = set()  # those that need nothing more
        self.disputes: dict[str, str] = {}  # in what those differ that have said hello and do not agree
        self._open: Counter[str] = Counter()

    def handlers(self) -> Any:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                # Questions are read as streams of one message, so that their reading can have an end.
                "fetch": grpc.stream_stream_rpc_method_handler(self.fetch),
                "hello": grpc.stream_unary_rpc_method_handler(self.hello),
                "bye": grpc.stream_unary_rpc_method_handler(self.bye),
            },
        )

    async def fetch(self, words: Any, context: Any) -> None:
        """Streams a head, and after it the chunks of what was asked for."""
        try:
            ask = decode(Ask, await _read(words, context))
            with self._admitted(ask.sender, context):
                self._agreed(ask.agreement)
                self.begun = True
                await asyncio.wait_for(self._answer(ask, context), self.longest)
        except Refused as refused:
            await self._refuse(refused, context)
        except TimeoutError:  # whoever asks and does not read
            await self._refuse(Refused(Refusal.SLOW, "an answer was not taken in time"), context)

    async def _answer(self, ask: Ask, context: Any) -> None:
        left = context.time_remaining()
        found = await self.mailbox.get(ask.round, ask.topic, ask.oldest, min(ask.wait, left or ask.wait))
        t, body = found or (0, Body(b"", b"", ()))
        size = len(body.data)
        head = Head(
            PROTOCOL, self.me, self.agreement, ask.nonce, t, ask.topic, self.mailbox.at, self.clients, size, body.digest
        )
        words = self.seal.close(encode(head))
        self.ledger.control(ask.sender, len(words))
        if size:
            self.ledger.sends(ask.sender, ask.topic, t, body.names, size, body.digest)
        await context.write(words)
        view = memoryview(body.data)
        for start in range(0, size, CHUNK):
            await context.write(bytes(view[start : start + CHUNK]))

    async def hello(self, words: Any, context: Any) -> bytes:
        """Says what this peer holds for agreed and where it is, also to one that holds otherwise."""
        try:
            asked = decode(Hello, await _read(words, context))
            with self._admitted(asked.sender, context):
                self.gone.discard(asked.sender)  # it is back
                self._compare(asked)
                mine = Hello(PROTOCOL, self.me, self.agreement, asked.nonce, self.mailbox.at, self.terms)
                answer = self.seal.close(encode(mine))
                self.ledger.control(asked.sender, len(answer))
                return answer
        except Refused as refused:
            await self._refuse(refused, context)
            raise

    def _compare(self, asked: Hello) -> None:
        self.disputes.pop(asked.sender, None)
        if asked.agreement != self.agreement:
            self.disputes[asked.sender] = text = difference(self.terms, asked.terms)
            self.tally.note(asked.sender, Refused(Refusal.DISAGREES, text))

    async def bye(self, words: Any, context: Any) -> bytes:
        """A neighbour has all it needs."""
        try:
            bye = decode(Bye, await _read(words, context))
            with self._admitted(bye.sender, context):
                self._agreed(bye.agreement)
                self.gone.add(bye.sender)
                return b""
        except Refused as refused:
            await self._refuse(refused, context)
            raise

    @contextmanager
    def _admitted(self, claimed: str, context: Any) -> Iterator[None]:
        """The certificate has the claimed name, which is that of a neighbour, and nothing speaks against it."""
        if self.secure:
            proof = context.auth_context()
            names = [name.decode(errors="replace") for name in proof.get("x509_subject_alternative_name", ())]
            if names != [claimed]:
                raise Refused(Refusal.WRONG_ID, f"claims to be {claimed!r}, the certificate says {names!r:.80}")
            from semidfl.node.identity import fingerprint

            pem = b"".join(proof.get("x509_pem_cert", ()))
            if self.denied(claimed, fingerprint(pem)):
                raise Refused(Refusal.DENIED, f"{claimed} is on the deny list")
        elif self.denied(claimed, ""):
            raise Refused(Refusal.DENIED, f"{claimed} is on the deny list")
        if claimed not in self.neighbours:
            raise Refused(Refusal.STRANGER, f"{claimed!r} is no neighbour")
        if self._open[claimed] >= _AT_ONCE:
            raise Refused(Refusal.BUSY, f"{claimed} asks more than {_AT_ONCE} things at once")
        self._open[claimed] += 1
        try:
            yield
        finally:
            self._open[claimed] -= 1

    def _agreed(self, agreement: str) -> None:
        if agreement != self.agreement:
            raise Refused(Refusal.DISAGREES, f"agreement {agreement!r:.40} there, {self.agreement} here")

    async def _refuse(self, refused: Refused, context: Any) -> None:
        self.tally.note(context.peer() if not self.secure else _caller(context), refused)
        # The reason, not the text: a stranger need not learn what stands in our federation file.
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused.reason.value)


async def _read(words: Any, context: Any) -> bytes:
    """The question; whoever opens a line and does not ask is cut off."""
    try:
        return bytes(await asyncio.wait_for(anext(words), _QUESTION))
    except TimeoutError:
        raise Refused(Refusal.SLOW, f"no question within {_QUESTION:g} s") from None
    except StopAsyncIteration:  # the line broke, or whoever asked has given up: no fault of anybody's
        await context.abort(grpc.StatusCode.CANCELLED, "no question came")
        raise


def _caller(context: Any) -> str:
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return b",".join(names).decode(errors="replace")[:80] or context.peer()


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first line in which two peers' terms differ."""
    for name, text in ours.items():
        pairs = zip_longest(text.splitlines(), theirs.get(name, "").splitlines(), fillvalue="")
        for here, there in pairs:
            if here != there:
                return f"{name}: {here[:60]!r} here, {there[:60]!r} there"
    return "in nothing that it says"
