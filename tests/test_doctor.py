"""The doctor against machines that lack things, certificates of every age, neighbours that refuse in every way."""

import datetime as dt
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semidfl.cli import main
from semidfl.doctor import Finding, look_at_certificates, look_at_machine, look_at_neighbours, look_at_port, machine
from semidfl.doctor.network import explain_tls, split_address

NOW = dt.datetime.now(dt.UTC)


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--format", "json"]) == 0
    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"Python", "torch", "GPU", "memory", "runs", "cache", "data", "extra onnx", "extra net"} <= set(found)
    assert "digits" in found["data"]["text"]
    assert "GiB free" in found["memory"]["text"]
    assert not list(tmp_path.iterdir())  # looking leaves no trace
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["ok", "Python"]


def test_what_is_short_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    monkeypatch.setattr(machine, "_TORCH", ((1, 0), (2, 0)))
    monkeypatch.setattr(machine, "_EXTRAS", {"x": ("a thing", ("no_such_module",))})
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "none"))
    found = by_name(look_at_machine(tmp_path / "runs"))
    assert (found["runs"].state, found["torch"].state) == ("note", "note")
    assert "free some space" in found["runs"].advice
    assert "not yet: mnist" in found["data"].text
    assert "semidfl data get mnist" in found["data"].advice
    assert found["extra x"].advice == "for a thing: pip install 'semidfl[x]'"


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert machine._gpu().state == "note"
    assert "CUDA" in machine._gpu().advice


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        assert look_at_port(port).state == "bad"
    assert look_at_port(port).state == "ok"
    assert look_at_port(port, "192.0.2.1").state == "bad"
    assert look_at_port(99999).text == "there is no such port"


# --- certificates -----------------------------------------------------------------------------------------------------


class Authority:
    """Issues certificates for anything, valid whenever."""

    def __init__(self) -> None:
        x509 = pytest.importorskip("cryptography.x509")
        from cryptography.hazmat.primitives.asymmetric import ec

        self.x509, self.key = x509, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        self.pem = self._sign(self.name, self.key, -1, 3650, x509.BasicConstraints(ca=True, path_length=None))

    def _sign(self, subject: Any, key: Any, start: float, end: float, *extensions: Any) -> bytes:
        from cryptography.hazmat.primitives import hashes, serialization

        builder = self.x509.CertificateBuilder().subject_name(subject).issuer_name(self.name)
        builder = builder.public_key(key.public_key()).serial_number(self.x509.random_serial_number())
        builder = builder.not_valid_before(NOW + dt.timedelta(days=start))
        builder = builder.not_valid_after(NOW + dt.timedelta(days=end))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, folder: Path, name: str, start: float = -1, end: float = 365) -> None:
        from cryptography.hazmat.primitives import serialization as s
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = self.x509.Name([self.x509.NameAttribute(self.x509.NameOID.COMMON_NAME, name)])
        pem = self._sign(subject, key, start, end, self.x509.SubjectAlternativeName([self.x509.DNSName(name)]))
        folder.mkdir(exist_ok=True)
        (folder / "authority.crt").write_bytes(self.pem)
        (folder / f"{name}.crt").write_bytes(pem)
        plain = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        (folder / f"{name}.key").write_bytes(plain)


@pytest.mark.parametrize(
    ("start", "end", "state", "words"),
    [
        (-1, 365.5, "ok", "valid until"),
        (-1, 10.5, "note", "expires in 10 days"),
        (-10, -1, "bad", "expired on"),
        (2, 10, "bad", "not valid before"),
    ],
)
def test_the_age_of_certificates(tmp_path: Path, start: float, end: float, state: str, words: str) -> None:
    Authority().issue(tmp_path / "id", "ana", start, end)
    found = by_name(look_at_certificates(tmp_path / "id"))
    assert found["certificate authority"].state == "ok"
    assert found["certificate ana"].state == state
    assert words in found["certificate ana"].text


def test_certificates_that_are_none(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    assert "holds none" in next(look_at_certificates(tmp_path)).text
    (tmp_path / "ana.crt").write_text("hello")
    assert "is no certificate" in next(look_at_certificates(tmp_path)).text


# --- neighbours -------------------------------------------------------------------------------------------------------


@contextmanager
def listening(wrap: Callable[[socket.socket], socket.socket]) -> Iterator[str]:
    """A server that greets everybody that `wrap` lets in; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        ending = threading.Event()

        def serve() -> None:
            while not ending.is_set():
                try:
                    line, _ = server.accept()
                    with line, wrap(line) as secure:
                        secure.sendall(b"hello")
                        secure.settimeout(2)
                        secure.recv(1)
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            ending.set()
            thread.join()


def tls(folder: Path, name: str, authority: bytes) -> Callable[[socket.socket], socket.socket]:
    """Mutual TLS as peer `name`, trusting one authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.decode())
    return lambda line: context.wrap_socket(line, server_side=True)


def reached(tmp_path: Path, address: str, identity: Path | None, me: str = "ana") -> Finding:
    # Without semidfl.node's reader, which asks for far more than addresses.
    file = tmp_path / "federation.toml"
    file.write_text(f'[[peers]]\nname = "ben"\naddress = "{address}"\n')
    from semidfl.doctor import network

    peers = [("ben", address)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_peers", lambda path, name: peers)
        (found,) = look_at_neighbours(file, me, identity)
    return found


def test_a_neighbour_that_answers(tmp_path: Path) -> None:
    authority = Authority()
    for name in ("ana", "ben"):
        authority.issue(tmp_path / "id", name)
    with listening(tls(tmp_path / "id", "ben", authority.pem)) as address:
        found = reached(tmp_path, address, tmp_path / "id")
        assert (found.what, found.state) == ("neighbour ben", "ok"), found
        assert "accepted on both sides" in found.text
        assert "answers; give --identity" in reached(tmp_path, address, None).text


def test_every_refusal_is_explained(tmp_path: Path) -> None:
    ours, theirs = Authority(), Authority()
    ours.issue(tmp_path / "id", "ana")
    ours.issue(tmp_path / "late", "ben", -10, -1)
    ours.issue(tmp_path / "other", "eve")
    ours.issue(tmp_path / "good", "ben")
    theirs.issue(tmp_path / "strange", "ben")
    for wrap, words in (
        (tls(tmp_path / "late", "ben", ours.pem), "its certificate has expired"),
        (tls(tmp_path / "other", "eve", ours.pem), "its certificate carries another name"),
        (tls(tmp_path / "strange", "ben", ours.pem), "its certificate is of another federation's authority"),
        (tls(tmp_path / "good", "ben", theirs.pem), "it does not know the authority of our certificate"),
        (lambda line: line, "it speaks no TLS"),
    ):
        with listening(wrap) as address:
            found = reached(tmp_path, address, tmp_path / "id")
        assert found.state == "bad"
        assert words in found.text, found
        assert found.advice


def test_a_server_that_wants_a_certificate_from_us(tmp_path: Path) -> None:
    authority = Authority()
    authority.issue(tmp_path / "id", "ben")
    with listening(tls(tmp_path / "id", "ben", authority.pem)) as address:
        found = reached(tmp_path, address, tmp_path / "id", me="")
    assert "it asks for our certificate" in found.text, found


def test_neighbours_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "nothing listens there" in reached(tmp_path, f"127.0.0.1:{port}", None).text
    assert "no machine has this name" in reached(tmp_path, "no-such-host.invalid:1", None).text
    assert "is no address" in reached(tmp_path, "localhost", None).text

    def never(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    assert "firewall" in reached(tmp_path, "10.0.0.1:1", None).advice


def test_a_federation_that_cannot_be_read(tmp_path: Path) -> None:
    (found,) = look_at_neighbours(tmp_path / "none.toml", "", None)
    assert (found.what, found.state) == ("federation", "bad")
    for text in ("peers = 3", "[[peers]]\nname = 'a'", "["):
        (tmp_path / "f.toml").write_text(text)
        (found,) = look_at_neighbours(tmp_path / "f.toml", "", None)
        assert "is no federation file" in found.text
    (tmp_path / "f.toml").write_text("[[peers]]\nname = 'a'\naddress = 'x:1'")
    (found,) = look_at_neighbours(tmp_path / "f.toml", "", tmp_path)
    assert "authority.crt is missing" in found.text


def test_peers_of_a_federation_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from semidfl.doctor import network

    (tmp_path / "f.toml").write_text("".join(f"[[peers]]\nname = '{n}'\naddress = '{n}:1'\n" for n in "abc"))
    assert network._peers(tmp_path / "f.toml", "") == [("a", "a:1"), ("b", "b:1"), ("c", "c:1")]
    monkeypatch.setattr(network, "find_spec", lambda name: None)  # the package without its network part
    assert network._peers(tmp_path / "f.toml", "b") == [("a", "a:1"), ("c", "c:1")]


def test_what_openssl_may_say_else() -> None:
    text, advice = explain_tls(ssl.SSLError(1, "[SSL: SOMETHING_NEW] something new"))
    assert "SOMETHING" in text.upper()
    assert advice
    assert split_address("[::1]:80") == ("::1", 80)
