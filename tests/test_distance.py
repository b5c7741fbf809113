"""What loopback between honest peers does not show: distance, keys of another kind, neighbours that trickle or lie."""

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from exchanges import at_once, peers_of, rows_of
from federations import QUICK, SHORT, digits, live

from semidfl.cohort import Cohort, Learner
from semidfl.config import AggregationConfig, Config
from semidfl.data.shards import Index, Shards
from semidfl.draws import Draws
from semidfl.errors import IdentityError
from semidfl.exchange import server
from semidfl.exchange.client import Line, Neighbour
from semidfl.exchange.codec import Spec, decode_body, encode_body
from semidfl.exchange.plan import Deadlines
from semidfl.exchange.refuse import Refusal, Refused
from semidfl.exchange.seal import _trusted
from semidfl.node import identity
from semidfl.node.peer import _adopt

CPU = torch.device("cpu")


class Far:
    """A way to a port on which every byte takes `delay` seconds."""

    def __init__(self, port: int, delay: float) -> None:
        self.port, self.delay = port, delay
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        ready.wait(5)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        door = self.loop.run_until_complete(asyncio.start_server(self._meet, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{door.sockets[0].getsockname()[1]}"
        ready.set()
        self.loop.run_forever()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self._carry(reader, there[1]), self._carry(there[0], writer), return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.loop.call_later(self.delay, writer.write, data)
        self.loop.call_later(self.delay, writer.close)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


def test_a_distant_peer_is_reached(keys: Path) -> None:
    """Half a second there and back: TCP and TLS take over a second."""
    waits = Deadlines(hello=12.0, round=5.0, transfer=5.0, linger=0.5)
    one, two = peers_of(keys, [(0,), (1,)], deadlines=waits)
    port = int(two.plan.listen.rpartition(":")[2])
    far = Far(port, 0.25)
    try:
        object.__setattr__(one.plan, "neighbours", (Neighbour("two", far.address, (1,)),))
        with one, two:
            assert at_once([lambda: one.hello(1), lambda: two.hello(0)])[0] == {}
            seen = at_once([lambda x=x: x.share(1, "models", rows_of(x)) for x in (one, two)])
            assert seen[0].ids == (0, 1)
    finally:
        far.close()


def rsa(folder: Path, name: str) -> Any:
    """A request, and its key, of a kind that cannot seal."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa as kind

    key = kind.generate_private_key(65537, 2048)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    asked = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    (folder / f"{name}.csr").write_bytes(asked.public_bytes(serialization.Encoding.PEM))
    return key


def test_only_keys_that_can_seal_are_signed_or_believed(keys: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(keys, tmp_path, dirs_exist_ok=True)
    rsa(tmp_path, "four")
    with pytest.raises(IdentityError, match="no elliptic key"):
        identity.issue(tmp_path, "four", 365, tmp_path / "four.csr")
    monkeypatch.setattr(identity, "is_elliptic", lambda public: True)  # an authority that signs all the same
    identity.issue(tmp_path, "four", 365, tmp_path / "four.csr")
    pem, authority = ((tmp_path / f"{name}.crt").read_bytes() for name in ("four", "authority"))
    assert _trusted(pem, authority) == (None, None)


def test_a_surprise_is_a_refusal(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = peers_of(keys, [(0,), (1,)])
    with made[0], made[1]:

        def trip(*_: Any) -> Any:
            raise TypeError("nobody thought of this")

        monkeypatch.setattr(Line, "_checked", trip)
        seen = at_once([lambda x=x: x.share(1, "models", rows_of(x)) for x in made])
        assert seen[0].ids == (0,)
        assert made[0].report().missing == {"two": "refused: garbage"}


def test_one_that_trickles_is_spared_ever_longer(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = peers_of(keys, [(0,), (1,)])
    asked = []

    async def slow(self: Line, t: int, *_: Any) -> Any:
        asked.append(t)
        raise Refused(Refusal.SLOW, "it trickles")

    monkeypatch.setattr(Line, "fetch", slow)
    with made[0] as one:
        for t in range(1, 10):
            for topic in ("counts", "models"):
                assert one.share(t, topic, rows_of(one)).ids == (0,)
    assert asked == [1, 3, 7]


def test_a_question_must_come(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_QUESTION", 0.3)
    made = peers_of(keys, [(0,), (1,)])
    with made[0] as one:
        own = identity.Identity.load(keys, "two")
        credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        with grpc.secure_channel(one.plan.listen, credentials, [("grpc.ssl_target_name_override", "one")]) as channel:
            opened = channel.stream_stream(f"/{server.SERVICE}/fetch")(iter(_never, None))
            with pytest.raises(grpc.RpcError) as error:
                next(opened)
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert one.tally.snapshot() == {"slow": 1}


def _never() -> bytes:
    time.sleep(1.5)
    return b"late"


def test_of_an_older_round_only_the_first_mixing_counts(keys: Path) -> None:
    """Two stays in round 1. Its models of it are discounted; those that it had mixed already are no help."""
    made = peers_of(keys, [(0,), (1,)])
    with made[0] as one, made[1]:
        for topic in ("models", "models-2"):
            seen = at_once([lambda x=x, topic=topic: x.share(1, topic, rows_of(x)) for x in made])
            assert seen[0].ids == (0, 1)
        one.report()
        late = one.share(2, "models", rows_of(one))
        assert (late.ids, one.report().stale) == ((0, 1), {"two": 1})
        assert late.trust is not None
        assert one.share(2, "models-2", rows_of(one)).ids == (0,)
        assert one.report().missing == {"two": "late: it is in round 1"}
        assert not one.tally.snapshot()


def test_what_is_due_in_other_rounds_only(keys: Path) -> None:
    """One is in round 4, where generators are shared; two was last in 3, where they are not, and 5 is next."""
    made = peers_of(keys, [(0,), (1,)])

    def rows(k: int, t: int) -> dict[str, torch.Tensor]:
        plain = {"classifier": torch.full((1, 3), float(k))}
        return plain | {"generator": torch.ones(1, 2)} if t % 2 == 0 else plain

    with made[0] as one, made[1] as two:
        for t in (2, 3):
            at_once([lambda x=x, k=k, t=t: x.share(t, "models", rows(k, t)) for k, x in enumerate(made)])
        one.report()
        assert one.share(4, "models", rows(0, 4)).ids == (0,)
        assert "have no generator" in one.report().missing["two"]
        at_once([lambda x=x, k=k: x.share(4, "models", rows(k, 4)) for k, x in enumerate(made)])
        one.report()
        late = one.share(5, "models", rows(0, 5))  # two is still in round 4, with a generator
        assert late.ids == (0, 1)
        assert set(late.tensors) == {"classifier"}
        assert one.report().stale == {"two": 1}
        assert not one.tally.snapshot()
        assert not two.tally.snapshot()


@pytest.mark.parametrize(
    ("name", "mine", "theirs"),
    [
        ("labelled", torch.ones(1, 3), torch.tensor([[1.0, -3000.0, 1.0]])),
        ("predicted", torch.ones(1, 3), torch.tensor([[1.0, -2e12, 1.0]])),
        ("predicted", torch.ones(1, 3), torch.tensor([[1.0, 2e12, 1.0]])),
        ("tilt", torch.zeros(1, 3), torch.tensor([[0.0, 6.0, 0.0]])),
        ("generator.scale", torch.full((1, 3), 1e-3), torch.full((1, 3), 20.0)),
        ("generator.scale", torch.full((1, 3), 1e-3), torch.full((1, 3), -1e-3)),
    ],
)
def test_numbers_that_cannot_be(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    body = encode_body({name: theirs})
    with pytest.raises(Refused) as refused:
        decode_body(bytearray(body.data), body.digest, Spec.of({name: mine}, {}), 1)
    assert refused.value.reason is Refusal.RANGE


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("predicted", [[0.0, 250_000.0, -3.5]]), ("labelled", [[0.0, 9000.0, 1.0]]), ("tilt", [[-4.6, 4.6, 0.0]])],
)
def test_large_sites_may_say_what_they_have(name: str, theirs: list[list[float]]) -> None:
    """Beside a peer that has nothing itself."""
    body = encode_body({name: torch.tensor(theirs)})
    found = decode_body(bytearray(body.data), body.digest, Spec.of({name: torch.zeros(1, 3)}, {}), 1)
    torch.testing.assert_close(found[name], torch.tensor(theirs))


def cohort() -> Cohort:
    nothing = Index.of([[]], CPU)
    shards = Shards(torch.zeros(0, 1, 1, 1), torch.zeros(0, dtype=torch.int64), nothing, nothing)
    return Cohort((0,), Draws.of([0], [0], CPU), shards, Learner(torch.ones(1, 4), {}))


@pytest.mark.parametrize(("robust", "most"), [("none", 300.0), ("median", 1.5), ("clip", 1.5), ("trimmed-mean", 1.5)])
def test_catching_up_keeps_to_the_rule_of_mixing(robust: Any, most: float) -> None:
    found = [{"classifier": torch.full((1, 4), x)} for x in (1.0, 1.1, 1000.0)]
    mine = cohort()
    _adopt(mine, found, Config(aggregation=AggregationConfig(robust=robust)), keep_own=True)
    assert 0.9 < float(mine.classifier.params.max()) < most
    if robust == "none":
        assert float(mine.classifier.params[0, 0]) == pytest.approx((1 + 1 + 1.1 + 1000) / 4)
        _adopt(mine, found, Config(), keep_own=False)
        assert float(mine.classifier.params[0, 0]) == pytest.approx((1 + 1.1 + 1000) / 3)


def test_killed_after_the_last_round_a_peer_still_ends(tmp_path: Path) -> None:
    """Its neighbours have long gone: the models come from its last checkpoint."""
    data = digits(tmp_path)
    with live(tmp_path / "f", data, {"a": "L", "b": "U"}, QUICK, deadlines=SHORT | {"linger": 1.0}) as made:
        made.start_all()
        made.ends("a", "b")
        whole = made.model("a")
        shutil.rmtree(made.run_folder("a") / "models")
        (made.run_folder("a") / "summary.json").unlink()
        started = time.monotonic()
        made.start("a")
        made.ends("a")
        assert time.monotonic() - started < SHORT["hello"]
        assert all(torch.equal(x, whole[name]) for name, x in made.model("a").items())
        assert made.summary("a")["rounds"] == 5


def test_whoever_trains_already_is_not_kept_waiting_for_a_third(keys: Path) -> None:
    """Three dies when two has greeted it and one has not: two is in round 1, and one does not wait for three."""
    made = peers_of(keys, [(0,), (1,), (2,)], deadlines=Deadlines(hello=20.0, round=6.0, transfer=1.0, linger=0.5))
    with made[0] as one, made[1] as two:
        started = time.monotonic()

        def begin() -> set[str]:
            missing = set(one.hello(1))
            assert one.share(1, "models", rows_of(one)).ids == (0, 1)
            return missing

        missing, shared = at_once([begin, lambda: two.share(1, "models", rows_of(two))])
        assert missing == {"three"}
        assert shared.ids == (0, 1)
        assert time.monotonic() - started < 18


def test_a_restart_beside_a_dead_neighbour_keeps_nobody_waiting(keys: Path) -> None:
    """Three is dead; one comes back while two is under way, and does not wait for three."""
    made = peers_of(keys, [(0,), (1,), (2,)], deadlines=Deadlines(hello=20.0, round=5.0, transfer=1.0, linger=0.5))
    with made[0] as one, made[1] as two:
        one.enter(3)
        two.enter(5)
        started = time.monotonic()
        back, shared = at_once([lambda: one.hello(1, restarted=True), lambda: two.share(5, "models", rows_of(two))])
        assert set(back) == {"three"}
        assert time.monotonic() - started < 10
        assert shared.ids == (1,)
