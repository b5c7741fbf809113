"""What callers cost that mean harm, or have no business here: places, memory, lines of the log."""

import contextlib
import datetime as dt
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from exchanges import LOG, Pages, at_once, peers_of, rows_of

from semidfl.exchange import server
from semidfl.exchange.codec import PROTOCOL, Ask, encode
from semidfl.exchange.grpc import GrpcExchange
from semidfl.exchange.plan import Deadlines
from semidfl.exchange.refuse import Refusal, Refused
from semidfl.node import identity
from semidfl.node.files import allow_many_files


@contextlib.contextmanager
def line_of(exchange: GrpcExchange, folder: Path | None, name: str) -> Iterator[Callable[[Any], list[bytes]]]:
    """`name` asks an exchange, past all that an honest peer would look at first."""
    options = [("grpc.ssl_target_name_override", exchange.plan.me), ("grpc.use_local_subchannel_pool", 1)]
    if folder is None:
        channel = grpc.insecure_channel(exchange.plan.listen, options[1:])
    else:
        own = identity.Identity.load(folder, name)
        credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        channel = grpc.secure_channel(exchange.plan.listen, credentials, options)
    with channel:
        fetch = channel.stream_stream(f"/{server.SERVICE}/fetch")
        yield lambda questions: list(fetch(questions, timeout=20.0))


def ask_of(name: str, agreement: str = "agreed") -> Iterator[bytes]:
    return iter([encode(Ask(PROTOCOL, name, agreement, os.urandom(16), 1, "models", 0, 0.0))])


def still_open(sockets: list[socket.socket]) -> int:
    found = 0
    for one in sockets:
        try:
            found += one.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            found += 1
        except OSError:
            pass
    return found


def test_connections_that_never_say_anything(keys: Path) -> None:
    """They get few places and lose them again; whoever was there before is not disturbed."""
    made = peers_of(keys, [(0,), (1,)], deadlines=Deadlines(hello=20.0, round=15.0, transfer=15.0, linger=0.5))
    host, port = made[0].plan.listen.split(":")
    with made[0], made[1], contextlib.ExitStack() as ends:
        assert at_once([lambda x=x: x.share(1, "models", rows_of(x)) for x in made])[0].ids == (0, 1)
        sockets = [ends.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
        for one in sockets:
            one.setblocking(False)
        until = time.monotonic() + 4.0
        while still_open(sockets) > 40 and time.monotonic() < until:
            time.sleep(0.05)
        assert still_open(sockets) <= 40
        assert at_once([lambda x=x: x.share(2, "models", rows_of(x)) for x in made])[0].ids == (0, 1)
        until = time.monotonic() + 30.0
        while still_open(sockets) and time.monotonic() < until:
            time.sleep(0.1)
        assert still_open(sockets) == 0


def test_as_many_files_as_may_be() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] // 2, limits[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("denied", [False, True])
def test_a_question_of_one_that_may_not_ask_is_not_even_read(keys: Path, denied: bool) -> None:
    made = peers_of(keys, [(0,), (1,)])[0]
    name, said = ("two", "denied") if denied else ("three", "stranger")
    exchange = GrpcExchange(made.plan, made.identity, Pages(), LOG, lambda who, _: denied and who == "two")
    never = threading.Event()
    with exchange, line_of(exchange, keys, name) as asks:
        try:
            with pytest.raises(grpc.RpcError) as error:
                asks(iter(lambda: never.wait(30.0), True))  # type: ignore[arg-type]
        finally:
            never.set()
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, said)
    assert exchange.tally.snapshot() == {said: 1}


def test_a_certificate_that_ends_while_its_line_stands(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today = dt.datetime

    class NextYear(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return today.now(tz) + dt.timedelta(days=370)

    one = peers_of(keys, [(0,), (1,)])[0]
    with one, line_of(one, keys, "two") as asks:
        one.publish(1, "models", {"classifier": torch.ones(1, 4)})
        assert len(asks(ask_of("two"))) == 2
        monkeypatch.setattr(dt, "datetime", NextYear)
        with pytest.raises(grpc.RpcError) as error:
            asks(ask_of("two"))
        monkeypatch.undo()
    assert error.value.details() == "certificate"
    assert one.tally.snapshot() == {"certificate": 1}


def test_no_line_of_the_log_for_each_connection(caplog: pytest.LogCaptureFixture) -> None:
    one = peers_of(None, [(0,), (1,)])[0]
    one.tally.log = logging.getLogger("heard")
    with one, caplog.at_level("WARNING"):
        for _ in range(12):
            with line_of(one, None, "three") as asks, pytest.raises(grpc.RpcError):
                asks(ask_of("three"))
    assert one.tally.snapshot() == {"stranger": 12}
    assert caplog.text.count("refused stranger") == 4  # the first, second, fourth and eighth


FORGED = "no\n2026-01-01 00:00:00 one all is well\x1b[2J\u202e"


def test_what_others_say_cannot_forge_a_line_of_the_log(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hello(self: Any, words: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, FORGED)

    monkeypatch.setattr(server.Server, "hello", hello)
    made = peers_of(keys, [(0,), (1,)], deadlines=Deadlines(hello=3.0, linger=0.5))
    with made[0], made[1]:
        why = made[0].hello(0)["two"]
    assert why.startswith("it refuses us: no ")
    assert why.isprintable()
    refused = Refused(Refusal.GARBAGE, FORGED + "x" * 10_000)
    assert str(refused).isprintable()
    assert len(refused.text) < 1000
