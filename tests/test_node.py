"""The parts of a peer one by one: certificates, the federation file, the audit, own data, the exchange."""

import errno
import hashlib
import io
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import save

from semidfl.cli import main
from semidfl.data.shards import Space
from semidfl.errors import DataError, FederationError, IdentityError, RunFolderError, SemiDFLError
from semidfl.exchange.base import Neighbourhood
from semidfl.exchange.client import Neighbour
from semidfl.exchange.grpc import GrpcExchange
from semidfl.exchange.plan import Deadlines, Plan
from semidfl.exchange.refuse import handshake
from semidfl.node import identity
from semidfl.node.audit import Audit, sum_up
from semidfl.node.deny import DenyList
from semidfl.node.federation import read
from semidfl.node.local import free_ports
from semidfl.node.log import Tap
from semidfl.node.retry import pauses
from semidfl.node.site import load_site

LOG = logging.Logger("test", logging.CRITICAL)

# --- identity ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    identity.init(folder)
    for name in ("one", "two", "three"):
        identity.issue(folder, name)
    return folder


def test_a_key_is_its_owner_s_alone_and_is_never_replaced(keys: Path) -> None:
    for path in keys.glob("*.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(IdentityError, match="already holds an authority"):
        identity.init(keys)
    with pytest.raises(IdentityError, match="already holds a key of one"):
        identity.issue(keys, "one")


def test_a_key_that_finds_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "full")

    def opened(handle: int, mode: str) -> Full:
        os.close(handle)
        return Full()

    with monkeypatch.context() as now:
        now.setattr("semidfl.node.identity.os.fdopen", opened)
        with pytest.raises(IdentityError, match="disk is full"):
            identity.request(tmp_path, "zed")
    assert not (tmp_path / "zed.key").exists()
    identity.request(tmp_path, "zed")
    assert (tmp_path / "zed.key").stat().st_size


def test_a_request_signed_elsewhere(keys: Path, tmp_path: Path) -> None:
    """The key never leaves the peer: the authority sees only NAME.csr."""
    csr = identity.request(tmp_path, "far")
    made = identity.issue(keys, "far", csr=csr)
    assert not (keys / "far.key").exists()
    for file in ("far.crt", "authority.crt"):
        (tmp_path / file).write_bytes((keys / file).read_bytes())
    assert identity.Identity.load(tmp_path, "far").name == made.name == "far"
    with pytest.raises(IdentityError, match="asks for \\['far'\\], not for 'near'"):
        identity.issue(keys, "near", csr=csr)


@pytest.mark.parametrize("name", ["", "A", "a_b", "a.b", "-a", "a" * 64, "authority", "../x"])
def test_names_that_are_not_legal(name: str, keys: Path) -> None:
    with pytest.raises(IdentityError, match="is not legal as a peer's name"):
        identity.issue(keys, name)


def test_what_a_peer_refuses_in_its_own_folder(keys: Path, tmp_path: Path) -> None:
    def copy(**files: str) -> Path:
        for target, source in {
            "one.key": "one.key",
            "one.crt": "one.crt",
            "authority.crt": "authority.crt",
            **files,
        }.items():
            (tmp_path / target).write_bytes((keys / source).read_bytes())
        return tmp_path

    assert identity.Identity.load(copy(), "one").name == "one"
    with pytest.raises(IdentityError, match="is a certificate of 'two'"):
        identity.Identity.load(copy(**{"one.crt": "two.crt"}), "one")
    with pytest.raises(IdentityError, match="does not belong to"):
        identity.Identity.load(copy(**{"one.key": "two.key"}), "one")
    (tmp_path / "other").mkdir()
    identity.init(tmp_path / "other")
    folder = copy()
    (folder / "authority.crt").write_bytes((tmp_path / "other" / "authority.crt").read_bytes())
    with pytest.raises(IdentityError, match=r"was not signed by authority\.crt"):
        identity.Identity.load(folder, "one")
    (folder / "one.crt").write_text("nothing")
    with pytest.raises(IdentityError, match="is not a certificate"):
        identity.Identity.load(folder, "one")


@pytest.mark.parametrize("days", ["-3", "0", "1e9", "nan"])
def test_a_certificate_that_is_never_valid_is_not_issued(keys: Path, days: str, capsys: Any) -> None:
    before = sorted(keys.iterdir())
    assert main(["identity", "issue", "three", "--days", days, "--folder", str(keys)]) == 2
    assert "--days = " in capsys.readouterr().err
    assert sorted(keys.iterdir()) == before


SSL = "SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
BY_WORDS = {
    "CERTIFICATE_VERIFY_FAILED: certificate has expired": "certificate has expired",
    "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate": "unable to get local issuer certificate",
    "TLSV1_ALERT_UNKNOWN_CA: OK": "tlsv1 alert unknown ca",
    "WRONG_VERSION_NUMBER: Invalid certificate verification context": "wrong version number",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate verification context": "peer did not return a certificate",
    "HTTP_REQUEST: Invalid certificate verification context": "http request",
    "CERTIFICATE_VERIFY_FAILED: OK": "certificate verify failed",
}


@pytest.mark.parametrize(("words", "reason"), BY_WORDS.items())
def test_why_a_handshake_failed(words: str, reason: str, capfd: Any) -> None:
    """On either side; the lines are gRPC's own."""
    heard: list[str] = []
    with Tap(heard.append):
        line = f"I1119 23:24:57.229695   29618 ssl_transport_security.cc:2563] Handshake failed with error {SSL}{words}"
        os.write(2, f"{line}\nsomething else\n".encode())
    assert heard == [reason]
    assert capfd.readouterr().err == "something else\n"
    caller = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:45915: Tls handshake failed "
    assert handshake(f"{caller}(TSI_PROTOCOL_FAILURE): {SSL}{words}: OK") == reason


def test_why_a_name_is_not_trusted() -> None:
    said = (
        "last error: Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed."
    )
    assert handshake(said) == "Hostname Verification Check failed."
    assert handshake("handshake failed: ") == "handshake failed: "


def test_show(keys: Path, capsys: Any) -> None:
    assert main(["identity", "show", "--folder", str(keys)]) == 0
    said = capsys.readouterr().out
    assert f"sha256 {identity.Certificate.read(keys / 'one.crt').fingerprint}" in said
    assert "(365 days)" in said
    assert main(["identity", "show", "--folder", str(keys), "--format", "json"]) == 0
    assert {"authority", "one"} <= {one["name"] for one in json.loads(capsys.readouterr().out)}


def test_the_deny_list_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    denied = DenyList(tmp_path / "denied.txt", LOG)
    assert not denied.holds("one", "ab")
    (tmp_path / "denied.txt").write_text("one # left\nAB:CD\n")
    assert denied.holds("one", "")
    assert denied.holds("two", "abcd")
    assert not denied.holds("two", "")
    (tmp_path / "denied.txt").unlink()
    assert denied.holds("one", "")  # nobody is let in by a lost file
    (tmp_path / "denied.txt").write_text("\n")
    assert not denied.holds("one", "abcd")


def test_a_deny_list_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "denied.txt").write_bytes(b"one # \xff\n")
    with pytest.raises(IdentityError, match="cannot be read"):
        DenyList(tmp_path / "denied.txt", LOG)


def test_a_deny_list_damaged_while_it_is_in_force_stays_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    (tmp_path / "denied.txt").write_text("one\n")
    denied = DenyList(tmp_path / "denied.txt", logging.getLogger("heard"))
    assert denied.holds("one")
    (tmp_path / "denied.txt").write_bytes(b"two # \xff\n")
    with caplog.at_level("WARNING"):
        assert all(denied.holds("one") for _ in range(5))
    assert caplog.text.count("cannot be read") == 1


def test_a_deny_list_comes_into_force_once_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    denied = DenyList(tmp_path / "denied.txt", LOG)
    (tmp_path / "denied.txt").write_text("one\n")

    def forbidden(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "no right to read it")

    with monkeypatch.context() as closed:
        closed.setattr(Path, "read_text", forbidden)
        assert not denied.holds("one")
    assert denied.holds("one")


def test_a_deny_list_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "denied.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    denied = DenyList(tmp_path / "denied.txt", LOG)
    assert denied.holds("one")
    assert denied.holds("two")


# --- the federation file ----------------------------------------------------------------------------------------------

FILE = """
name = "clinics"
recipe = "demo"
seed = 3
edges = [["north", "south"], ["south", "west"]]

[config]
rounds = 7
"classifier.lr" = 0.2

[config.generator]
kind = "none"

[images]
classes = ["ill", "healthy"]
channels = 3
height = 16
width = 12
mean = [0.4, 0.5, 0.6]
std = [0.2, 0.2, 0.3]

[deadlines]
round = 5

[[peers]]
name = "north"
address = "10.0.0.1:7443"
role = "L"

[[peers]]
name = "south"
address = "10.0.0.2:7443"
listen = "0.0.0.0:7443"

[[peers]]
name = "west"
address = "10.0.0.3:7443"
role = "U"
"""


def read_text(tmp_path: Path, text: str) -> Any:
    (tmp_path / "federation.toml").write_text(text)
    return read(tmp_path / "federation.toml")


def test_a_federation_file(tmp_path: Path) -> None:
    made = read_text(tmp_path, FILE)
    config = made.config
    assert (config.rounds, config.seed, config.classifier.lr, config.generator.kind) == (7, 3, 0.2, "none")
    assert config.graph.roles == "LMU"
    assert made.images.space == Space(3, 16, 12, 2, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3), ("ill", "healthy"))
    assert made.graph.neighbours == ((1,), (0, 2), (1,))
    assert [peer.name for peer in made.neighbours_of("south")] == ["north", "west"]
    plan = made.plan("south")
    assert (plan.listen, plan.clients, plan.rounds, plan.deadlines.round) == ("0.0.0.0:7443", (1,), 7, 5.0)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("rounds = 7", "rounds = 8", False),
        ("seed = 3", "seed = 4", False),
        ('["ill", "healthy"]', '["healthy", "ill"]', False),
        ("0.4, 0.5, 0.6", "0.4, 0.5, 0.7", False),
        ('role = "U"', 'role = "M"', False),
        ('["south", "west"]]', '["north", "west"]]', False),
        ("rounds = 7", 'rounds = 7\n"exchange.dtype" = "bf16"', False),
        ("10.0.0.1:7443", "10.0.0.9:7000", True),
        ("round = 5", "round = 50", True),
        ('recipe = "demo"', '# a comment\nrecipe = "demo"', True),
        ("rounds = 7", 'rounds = 7\n"compute.threads" = 3', True),
        ("rounds = 7", 'rounds = 7\n"compute.deterministic" = true', False),
    ],
)
def test_what_the_peers_must_agree_on(old: str, new: str, same: bool, tmp_path: Path) -> None:
    assert FILE.count(old) == 1
    one, two = (read_text(tmp_path, text).agreement for text in (FILE, FILE.replace(old, new)))
    assert (one == two) is same


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "sede = 3", "there is no field 'sede' (did you mean 'seed'?)"),
        ("round = 5", "rounds = 5", "there is no field deadlines.rounds (did you mean 'round'?)"),
        ("round = 5", "round = -5", "deadlines.round = -5 is not legal"),
        ("round = 5", 'round = "5"', "deadlines.round = '5' is not legal: it must be a number"),
        ('role = "U"', 'role = "X"', "peers.role = 'X' of west is not legal: L, M or U"),
        ('name = "west"', 'name = "north"', "the name 'north' stands twice"),
        ('name = "west"', 'name = "West"', "'West' is not legal as a peer's name"),
        ("10.0.0.1:7443", "10.0.0.1", "peers.address = '10.0.0.1' of north is not legal: host:port"),
        ('["south", "west"]]', '["south", "wset"]]', "edges names 'wset', which is no peer (did you mean 'west'?)"),
        (', ["south", "west"]]', "]", "is not connected"),
        ('["ill", "healthy"]', '["ill"]', "at least two names"),
        ("height = 16\n", "", "images.height is missing"),
        ("channels = 3", "channels = 2", "channels must be 1 or 3"),
        ("0.2, 0.2, 0.3", "0.2, 0.2", "images.std must hold 3 numbers"),
        ("rounds = 7", "runds = 7", "there is no field 'runds'"),
        ("rounds = 7", "seed = 7", "config.seed: give 'seed' at the top of the file instead"),
        ('recipe = "demo"', 'recipe = "dmeo"', "there is no recipe 'dmeo' (did you mean 'demo'?)"),
        ("rounds = 7", '"exchange.dtype" = "int4"', "exchange.dtype = 'int4' is not legal"),
        ("rounds = 7", '"aggregation.weights" = "adatest"', "cannot use adatest"),
        ("rounds = 7", '"classifier.standardise" = true', "classifier.standardise is for resnet18"),
        ("[[peers]]", "[[peers", "is not valid TOML"),
    ],
)
def test_what_is_not_legal_in_a_federation_file(old: str, new: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SemiDFLError) as error:
        read_text(tmp_path, FILE.replace(old, new, 1))
    assert said in str(error.value)
    assert "federation.toml" in str(error.value)


def test_a_federation_needs_two(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="there is only one of"):
        read_text(tmp_path, 'dataset = "digits"\n[[peers]]\nname = "alone"\naddress = "127.0.0.1:7000"\n')


def test_several_clients_at_one_peer(tmp_path: Path) -> None:
    text = 'dataset = "digits"\ntopology = "ring"\n'
    for k, clients in enumerate((2, 1, 3)):
        text += f'[[peers]]\nname = "p{k}"\naddress = "127.0.0.1:{7000 + k}"\nclients = {clients}\n'
    made = read_text(tmp_path, text)
    assert [made.clients_of(f"p{k}") for k in range(3)] == [(0, 1), (2,), (3, 4, 5)]
    assert [peer.clients for peer in made.neighbours_of("p1")] == [(0, 1), (3, 4, 5)]


# --- own data ---------------------------------------------------------------------------------------------------------

SPACE = Space(1, 4, 4, 3, (0.5,), (0.5,))
IMAGES = np.zeros((5, 4, 4), dtype=np.uint8)


def test_a_site_without_labels_knows_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "u.npz", x_train=IMAGES, y_train=[0, 1, 2, 0, 1])
    site = load_site(tmp_path / "u.npz", SPACE, "U")  # labels that it should not have are not looked at
    shards = site.shards(torch.device("cpu"))
    assert shards.labels.tolist() == [-1] * 5
    assert (shards.labelled.held, shards.unlabelled.held) == ((0,), (5,))
    assert site.test_images.shape == (0, 1, 4, 4)


def test_a_site_with_some_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", x_train=IMAGES, y_train=[0, -1, 2, -1, 1], x_test=IMAGES[:2], y_test=[0, 2])
    site = load_site(tmp_path / "m.npz", SPACE, "M")
    shards = site.shards(torch.device("cpu"))
    assert shards.labelled.table.tolist() == [[0, 2, 4]]
    assert shards.unlabelled.table.tolist() == [[1, 3]]
    assert site.test_labels.tolist() == [0, 2]


def test_a_site_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    classes, root = ("fish", "bird", "cat"), tmp_path / "site"
    for k, place in enumerate(["bird", "bird", "cat", "cat", "unlabeled", "test/fish"]):
        save(root / place / f"{k}.png", np.full((9, 7, 3), 40 * k, np.uint8))  # of another size, in colour
    site = load_site(root, SPACE, "M", classes)
    assert site.images.shape == (5, 1, 4, 4)
    assert sorted(zip(site.images[:, 0, 0, 0].tolist(), site.labels.tolist(), strict=True)) == [
        (0, 1), (40, 1), (80, 2), (120, 2), (160, -1),
    ]  # fmt: skip
    assert (site.test_images.max(), site.test_labels.tolist()) == (200, [0])
    assert load_site(root, SPACE, "U", classes).labels.tolist() == [-1] * 5
    with pytest.raises(DataError, match="1 samples have no label, but role L says that all have: make it M"):
        load_site(root, SPACE, "L", classes)
    with pytest.raises(DataError, match="cat"):
        load_site(root, SPACE, "M", ("fish", "bird"))


@pytest.mark.parametrize(
    ("role", "arrays", "said"),
    [
        ("L", {"x_train": IMAGES}, "y_train is missing, and role L says"),
        ("L", {"x_train": IMAGES, "y_train": [0, 1, 2, -1, 0]}, "1 samples have no label, but role L says"),
        ("M", {"x_train": IMAGES, "y_train": [-1] * 5}, "no sample has a label, but role M says"),
        ("L", {"x_train": IMAGES, "y_train": [0, 1, 2, 3, 0]}, "runs from 0 to 3, expected -1 to 2"),
        ("L", {"x_train": IMAGES, "y_train": [0, 1]}, "expected whole numbers of shape (5,)"),
        ("U", {"x_train": np.zeros((5, 8, 8), np.uint8)}, "holds images of 1x8x8, the federation's are 1x4x4"),
        ("U", {"x_train": IMAGES.astype(float)}, "x_train is float64"),
        ("U", {"x": IMAGES}, "x_train is missing"),
        ("U", {"x_train": np.array([{}])}, "cannot be read"),
    ],
)
def test_data_that_do_not_fit_the_federation(role: str, arrays: dict[str, Any], said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError) as error:
        load_site(tmp_path / "x.npz", SPACE, role)
    assert said in str(error.value)


# --- audit ------------------------------------------------------------------------------------------------------------


def test_the_audit_shows_what_left_and_that_nothing_was_taken_out(tmp_path: Path, capsys: Any) -> None:
    audit = Audit(tmp_path)
    for t in (1, 2):
        audit.sends("two", "models", t, ["classifier"], 1000 + t, b"\1" * 32)
        audit.control("two", 40)
        audit.flush(t)
    audit.close()
    audit = Audit(tmp_path)  # the peer was restarted
    audit.sends("three", "counts", 3, ["counts"], 88, b"\2" * 32)
    audit.close()
    found = sum_up(tmp_path)
    assert found.broken == []
    assert found.sizes == {("two", "models"): 2003, ("two", "control"): 80, ("three", "counts"): 88}
    assert main(["audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    last = (tmp_path / "audit.jsonl").read_bytes().splitlines(keepends=True)[-1]
    assert "nothing before the last was taken out or changed" in said
    assert hashlib.sha256(last).hexdigest() in said  # by which whoever has noted it sees a change at the end, too
    assert main(["audit", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(x["peer"], x["topic"]): x["bytes"] for x in told["sent"]} == found.sizes

    lines = (tmp_path / "audit.jsonl").read_text().splitlines(keepends=True)
    for changed in (lines[:1] + lines[2:], [lines[0].replace("1001", "1002"), *lines[1:]]):
        (tmp_path / "audit.jsonl").write_text("".join(changed))
        assert main(["audit", str(tmp_path)]) == 1
        assert "CHANGED OR DAMAGED: lines 2 do not follow" in capsys.readouterr().err


def test_who_asks_without_end_fills_no_disk(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for _ in range(1000):
        audit.sends("two", "models", 1, ["classifier"], 10, b"\1" * 32)
    audit.sends("two", "models", 1, ["classifier"], 10, b"\2" * 32)  # other tensors, though under the same name
    audit.flush(1)
    audit.close()
    found = sum_up(tmp_path)
    assert found.lines < 10
    assert (found.messages["two", "models"], found.sizes["two", "models"]) == (1001, 10_010)
    assert found.broken == []


def test_an_audit_on_a_full_disk_holds_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit, write = Audit(tmp_path), os.write
    audit.sends("two", "models", 1, ["classifier"], 1000, b"\1" * 32)
    left = [40]

    def short(handle: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "full")
        some = data[: left[0]]
        left[0] -= len(some)
        return write(handle, some)

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(RunFolderError, match="the disk is full"):
        audit.sends("two", "models", 2, ["classifier"], 1000, b"\1" * 32)
    monkeypatch.undo()
    audit.sends("two", "models", 2, ["classifier"], 1000, b"\1" * 32)
    audit.close()
    assert sum_up(tmp_path).broken == []
    assert sum_up(tmp_path).lines == 2


def test_an_audit_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.sends("two", "models", 1, ["classifier"], 1000, b"\1" * 32)
    audit.close()
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    audit = Audit(tmp_path)
    audit.sends("two", "models", 2, ["classifier"], 1000, b"\1" * 32)
    audit.close()
    assert sum_up(tmp_path).broken == [2]  # it is seen, and what came after follows from it


# --- the exchange -----------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_a_limit_and_are_drawn_from_zero_on() -> None:
    many = [list(islice(pauses(0.1, 1.6, random.Random(seed)), 8)) for seed in range(400)]
    ceilings = [0.1, 0.2, 0.4, 0.8, 1.6, 1.6, 1.6, 1.6]
    for k, ceiling in enumerate(ceilings):
        drawn = [row[k] for row in many]
        assert 0 <= min(drawn) < 0.05 * ceiling
        assert 0.95 * ceiling < max(drawn) <= ceiling
        assert sum(drawn) / len(drawn) == pytest.approx(ceiling / 2, rel=0.12)


def test_trust_scales_the_weights_of_who_is_behind() -> None:
    near = Neighbourhood(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[True, True, True], [True, True, False]]))
    weights = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
    trust = torch.tensor([1.0, 1.0, 0.25])
    assert near.trusted(weights, None) is weights
    found = near.trusted(weights, trust)
    assert found.tolist() == [
        pytest.approx([0.2 / 0.625, 0.3 / 0.625, 0.125 / 0.625]),
        pytest.approx([0.5 / 0.625, 0.125 / 0.625, 0.0]),
    ]


class Pages:
    """A ledger that only remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def sends(self, *line: Any) -> None:
        self.lines.append(line)

    def control(self, peer: str, size: int) -> None:
        pass


SOON = Deadlines(hello=5.0, round=0.5, transfer=1.0, linger=0.5, alone=5.0)


def peers_of(keys: Path | None, clients: list[tuple[int, ...]], **plan: Any) -> list[GrpcExchange]:
    """Exchanges of one, two, three, …: all neighbours of all, in this process."""
    names = ["one", "two", "three"][: len(clients)]
    ports = free_ports(len(clients))
    made = []
    for k, name in enumerate(names):
        others = [Neighbour(names[j], f"127.0.0.1:{ports[j]}", clients[j]) for j in range(len(names)) if j != k]
        own = Plan(
            name,
            f"127.0.0.1:{ports[k]}",
            clients[k],
            tuple(others),
            "agreed",
            {"x": "1"},
            9,
            **{"deadlines": SOON, **plan},
        )
        made.append(GrpcExchange(own, identity.Identity.load(keys, name) if keys else None, Pages(), LOG))
    return made


@pytest.fixture
def trio(keys: Path) -> Iterator[list[GrpcExchange]]:
    made = peers_of(keys, [(0, 3), (1,), (2, 4, 5)])
    with made[0], made[1], made[2]:
        yield made


def at_once(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(20.0) for future in [pool.submit(call) for call in calls]]


def rows_of(exchange: GrpcExchange, scale: float = 1.0) -> dict[str, torch.Tensor]:
    ids = torch.tensor(exchange.plan.clients)
    return {"classifier": scale * ids[:, None].float().repeat(1, 4), "counts": ids[:, None].repeat(1, 3)}


def test_cohorts_of_several_clients_see_each_other_s_rows(trio: list[GrpcExchange]) -> None:
    seen = at_once([lambda x=x: x.share(1, "classifiers", rows_of(x)) for x in trio])
    for shared in seen:
        assert shared.ids == (0, 1, 2, 3, 4, 5)
        assert shared.tensors["classifier"].tolist() == [[float(i)] * 4 for i in range(6)]
        assert shared.tensors["counts"].tolist() == [[i] * 3 for i in range(6)]
        assert shared.trust is None
    for x in trio:
        assert {(line[0], line[1]) for line in x.ledger.lines} == {  # type: ignore[attr-defined]
            (peer.name, "classifiers") for peer in x.plan.neighbours
        }


def test_who_is_late_is_taken_from_the_round_before_or_left_out(trio: list[GrpcExchange]) -> None:
    at_once([lambda x=x: x.share(1, "classifiers", rows_of(x)) for x in trio])
    for x in trio:
        x.report()  # a round is over: patience starts anew
    started = time.monotonic()
    seen = at_once([lambda x=x: x.share(2, "classifiers", rows_of(x, 2.0)) for x in trio[:2]])
    assert SOON.round * 0.9 < time.monotonic() - started < SOON.round + 3
    assert seen[0].ids == (0, 1, 2, 3, 4, 5)
    assert seen[0].trust.tolist() == [1, 1, 0.5, 1, 0.5, 0.5]  # three is one round behind
    assert seen[0].tensors["classifier"][:, 0].tolist() == [0, 2, 2, 6, 4, 5]
    assert trio[0].report().stale == {"three": 1}
    seen = at_once([lambda x=x: x.share(5, "classifiers", rows_of(x)) for x in trio[:2]])
    assert seen[0].ids == (0, 1, 3)  # now it is too far behind
    assert trio[0].report().missing == {"three": "late: it is in round 1"}


def test_a_round_before_one_that_was_taken_is_refused(trio: list[GrpcExchange]) -> None:
    """Three has shown round 3; then it answers with round 2, which is not too old in itself."""
    at_once([lambda x=x: x.share(3, "classifiers", rows_of(x)) for x in trio])
    trio[2]._mailbox._topics["classifiers"] = {2: trio[2]._mailbox._topics["classifiers"][3]}
    trio[0].report()
    assert trio[0].share(4, "classifiers", rows_of(trio[0])).ids == (0, 1, 3)
    assert trio[0].report().missing["three"] == "refused: replay"
    assert trio[0].tally.snapshot() == {"replay": 1}


def test_nobody_waits_for_a_round_that_a_peer_has_left_behind(trio: list[GrpcExchange]) -> None:
    """One is in round 4 and waits for two, two in round 3 and asks one for what it will never publish."""
    trio[0].enter(4)
    started = time.monotonic()
    seen = trio[1].share(3, "classifiers", rows_of(trio[1]))
    assert 0 not in seen.ids
    assert trio[1].report().missing["one"] == "late: it is in round 4"
    # It is three that was waited for, up to the deadline.
    assert time.monotonic() - started < SOON.round + 3


def test_who_has_no_accuracy_yet_counts_as_good_as_we_are(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1, 2)])
    with made[0], made[1]:
        rows = [rows_of(x) for x in made]
        rows[0]["accuracy"] = torch.tensor([0.75], dtype=torch.float64)
        seen = at_once([lambda k=k: made[k].share(1, "models", rows[k]) for k in range(2)])
        assert seen[0].tensors["accuracy"].tolist() == [0.75, 0.75, 0.75]
        assert "accuracy" not in seen[1].tensors
        assert not made[1].report().missing


def test_hello_says_who_is_missing(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1,), (2,)], deadlines=Deadlines(hello=4.0, round=0.5, transfer=1.0, linger=0.5))
    with made[0], made[1]:
        missing = at_once([lambda x=x: x.hello(1) for x in made[:2]])
        assert all(set(why) == {"three"} and "not reachable" in why["three"] for why in missing)
        with pytest.raises(FederationError, match=r"too few neighbours came .*three: not reachable"):
            made[0].hello(2)


def test_a_dead_neighbour_costs_less_every_round(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1,)], deadlines=Deadlines(hello=1, round=2.0, transfer=1.0, linger=0.5))
    with made[0] as one:
        waited = []
        for t in range(1, 6):
            started = time.monotonic()
            assert one.share(t, "models", rows_of(one)).ids == (0,)
            waited.append(time.monotonic() - started)
            assert "not reachable" in one.report().missing["two"]
        assert sum(waited[2:]) < 0.5 * 3 * 2.0  # by halves it is 0.5 + 0.25 + 0.2 at most, and a busy machine's delays
        assert waited[0] < 2.0 + 2.0


def test_an_address_in_use_is_told(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1,)])
    with made[0]:
        twin = GrpcExchange(made[0].plan, made[0].identity, Pages(), LOG)
        with pytest.raises(FederationError, match="cannot listen on"), twin:
            pass


def test_insecure_says_so_in_every_line(tmp_path: Path, capfd: Any) -> None:
    words = ["federation", "new", str(tmp_path / "f"), "--peers", "a=L,b=U", "--dataset", "digits", "--rounds", "1"]
    assert main([*words, "--deadlines.hello", "0.5"]) == 0
    capfd.readouterr()
    words = ["node", "--federation", str(tmp_path / "f" / "federation.toml"), "--name", "a", "--insecure"]
    assert main([*words, "--folder", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) > 2
    assert all(" a INSECURE " in line for line in said if not line.startswith("semidfl: "))
    assert "too few neighbours" in said[-1]


def test_a_key_that_others_can_read_is_told_once(tmp_path: Path, capfd: Any) -> None:
    words = ["federation", "new", str(tmp_path / "f"), "--peers", "a=L,b=U", "--dataset", "digits", "--rounds", "1"]
    assert main([*words, "--deadlines.hello", "0.5"]) == 0
    words = ["node", "--federation", str(tmp_path / "f" / "federation.toml"), "--name", "a"]
    told = []
    for mode in (0o600, 0o640):
        (tmp_path / "f" / "identity" / "a.key").chmod(mode)
        assert main([*words, "--folder", str(tmp_path / f"run-{mode}")]) == 2  # b is not there
        told.append(capfd.readouterr().err.count("others on this machine can read"))
    assert told == [0, 1]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert main(["node", "--federation", "f", "--name", "a"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("semidfl: msgspec is needed for peers (")
    assert said.endswith("): pip install 'semidfl[net]'\n")


def test_the_bench_measures(capsys: Any) -> None:
    from semidfl.bench.peers import throughput

    assert throughput(1, 2) > 0
    assert main(["bench", "peers", "--speed", "3"]) == 2
    assert "usage: semidfl bench peers" in capsys.readouterr().err


def test_a_summary_is_plain_json(tmp_path: Path) -> None:
    """The audit of a peer is a file that any tool can read."""
    audit = Audit(tmp_path)
    audit.sends("two", "models", 1, ("a", "b"), 7, b"\xff" * 32)
    audit.close()
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    assert list(line) == ["time", "peer", "topic", "round", "tensors", "bytes", "sha256", "previous"]
    assert line["sha256"] == "ff" * 32


def test_a_state_that_lacks_a_part_is_not_collected(trio: list[GrpcExchange]) -> None:
    """Who catches up needs all of it; a neighbour that leaves a part out is as good as silent."""
    states = [{"classifier": torch.ones(len(x.plan.clients), 4)} for x in trio]
    for exchange, state in zip(trio[1:], (states[1], {}), strict=True):
        exchange.enter(3)
        exchange.publish(3, "state", state)
    assert set(trio[0].collect("state", states[0], 0)) == {"two"}
