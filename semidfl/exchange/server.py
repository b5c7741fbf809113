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
from typing import Any, Protocol, TypeVar

import grpc

from semidfl.exchange.codec import CHUNK, LARGEST_CONTROL, PROTOCOL, Ask, Body, Bye, Head, Hello, decode, encode
from semidfl.exchange.refuse import Refusal, Refused, Tally
from semidfl.exchange.seal import Seal
from semidfl.node.identity import parsed

__all__ = ["METHODS", "SERVICE", "Ledger", "Mailbox", "Server", "difference", "server_options"]

Question = TypeVar("Question", Ask, Hello, Bye)
SERVICE = "semidfl.Peer"
METHODS = ("fetch", "hello", "bye")
_QUESTION = 10.0
"""seconds in which a question must have come, once its line is open"""
_AT_ONCE = 8
"""questions of one peer that are answered at the same time"""


def server_options(neighbours: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", LARGEST_CONTROL),
        ("grpc.max_send_message_length", CHUNK + 4096),
        # A neighbour needs one connection, and another while one that broke has not been missed yet. Without an end,
        # anybody could use up the files and the memory of this process.
        ("grpc.max_allowed_incoming_connections", 4 * neighbours + 16),
        ("grpc.max_concurrent_streams", 12),
        # Soon the place of who does not finish is free again; a caller gives its attempt no longer either.
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.so_reuseport", 0),  # two peers on one port would take turns
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


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
            ask = await self._question(Ask, words, context)
            with self._turn(ask.sender):
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
            asked = await self._question(Hello, words, context)
            with self._turn(asked.sender):
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
            bye = await self._question(Bye, words, context)
            with self._turn(bye.sender):
                self._agreed(bye.agreement)
                self.gone.add(bye.sender)
                return b""
        except Refused as refused:
            await self._refuse(refused, context)
            raise

    async def _question(self, kind: type[Question], words: Any, context: Any) -> Question:
        """A neighbour's question. Who calls is looked at before: what others ask is not read, for it takes memory."""
        caller = self._certified(context) if self.secure else None
        asked = decode(kind, await _read(words, context))
        if caller is None:
            self._welcome(asked.sender, "")
        elif asked.sender != caller:
            raise Refused(Refusal.WRONG_ID, f"claims to be {asked.sender!r}, the certificate says {caller!r}")
        return asked

    def _certified(self, context: Any) -> str:
        """The neighbour whose certificate it is; TLS has looked at its dates only when the line was opened."""
        shown = parsed(b"".join(context.auth_context().get("x509_pem_cert", ())))
        self._welcome(shown.name, shown.fingerprint)
        if not shown.is_valid:
            raise Refused(Refusal.CERTIFICATE, f"the certificate of {shown.name} was valid until {shown.ends:%Y-%m-%d}")
        return shown.name

    def _welcome(self, name: str, fingerprint: str) -> None:
        if self.denied(name, fingerprint):
            raise Refused(Refusal.DENIED, f"{name} is on the deny list")
        if name not in self.neighbours:
            raise Refused(Refusal.STRANGER, f"{name!r} is no neighbour")

    @contextmanager
    def _turn(self, claimed: str) -> Iterator[None]:
        """One of the few questions that a peer may have open."""
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
        self.tally.note(_caller(context) if self.secure else _address(context), refused)
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
    return b",".join(names).decode(errors="replace")[:80] or _address(context)


def _address(context: Any) -> str:
    """Without the port, which is another one with each connection, and would be a new name in the log."""
    return str(context.peer()).rpartition(":")[0]


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first line in which two peers' terms differ."""
    for name, text in ours.items():
        pairs = zip_longest(text.splitlines(), theirs.get(name, "").splitlines(), fillvalue="")
        for here, there in pairs:
            if here != there:
                return f"{name}: {here[:60]!r} here, {there[:60]!r} there"
    return "in nothing that it says"
