"""Certificates, the list of those that are denied, and why two peers do not trust each other."""

import errno
import io
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from exchanges import LOG

from semidfl.cli import main
from semidfl.errors import IdentityError
from semidfl.exchange.refuse import handshake
from semidfl.node import identity
from semidfl.node.deny import DenyList
from semidfl.node.log import Tap


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
