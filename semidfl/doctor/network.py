"""Ports, certificates, and whether the neighbours of a federation answer; why not, in words."""

import datetime as dt
import errno
import socket
import ssl
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from semidfl.doctor.finding import BAD, NOTE, OK, Finding
from semidfl.errors import ConfigError, SemiDFLError

__all__ = ["explain_tls", "look_at_certificates", "look_at_neighbours", "look_at_port", "split_address"]

_SOON = 30
_PATIENCE = 5.0
_AUTHORITY = "authority"

_SAME = "compare authority.crt on both sides"
_STRANGER = "its certificate is of another federation's authority"
_UNKNOWN = "it does not know the authority of our certificate"
# A part of what OpenSSL says, and what it means between two peers.
_TLS = (
    ("certificate has expired", "its certificate has expired", "ask it to have a new one issued"),
    ("not yet valid", "its certificate is not valid yet", "compare the clocks of both machines"),
    ("hostname mismatch", "its certificate carries another name", "check names and addresses in the federation file"),
    ("self-signed", _STRANGER, _SAME),
    ("local issuer", _STRANGER, _SAME),
    ("signature failure", _STRANGER, _SAME),
    ("unknown ca", _UNKNOWN, _SAME),
    ("decrypt error", _UNKNOWN, _SAME),
    ("certificate expired", "our certificate has expired", "semidfl identity issue NAME"),
    ("certificate required", "it asks for our certificate", "give --identity FOLDER and --name NAME"),
    ("bad certificate", "it refuses our certificate", "is our name in its federation file, and not on its deny list?"),
    ("wrong version", "it speaks no TLS", "is it running with --insecure, or is another program on this port?"),
    ("eof", "it closed the line during the greeting", "its log says why"),
)


def look_at_port(port: int, host: str = "127.0.0.1") -> Finding:
    """Whether a program of ours could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            return Finding(f"port {port}", BAD, "there is no such port", "choose one from 1024 to 65535")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                advice = f"choose another, or end what listens there (`ss -ltnp | grep :{port}` shows it)"
                return Finding(f"port {port}", BAD, "another program listens there", advice)
            if error.errno == errno.EACCES:
                return Finding(f"port {port}", BAD, "no permission to listen there", "choose one above 1023")
            return Finding(f"port {port}", BAD, f"cannot listen at {host}: {error.strerror}", "check the address")
    return Finding(f"port {port}", OK, f"free at {host}")


def look_at_certificates(folder: Path) -> Iterator[Finding]:
    """How long every certificate in a folder of `semidfl identity` is valid."""
    try:
        x509 = import_module("cryptography.x509")
    except ImportError:
        yield Finding("certificates", BAD, "cryptography is not installed", "pip install 'semidfl[net]'")
        return
    files = sorted(p for p in folder.glob("*") if p.suffix in (".crt", ".pem")) if folder.is_dir() else []
    if not files:
        yield Finding("certificates", BAD, f"{folder} holds none", "semidfl identity init makes an authority")
    for file in files:
        what = f"certificate {file.stem}"
        try:
            found = x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError, OverflowError) as error:
            yield Finding(what, BAD, f"{file} is no certificate: {error}", "issue it anew")
            continue
        yield _validity(what, file.stem, found.not_valid_before_utc, found.not_valid_after_utc)


def _validity(what: str, name: str, starts: dt.datetime, ends: dt.datetime) -> Finding:
    now = dt.datetime.now(dt.UTC)
    days, anew = (ends - now).days, f"semidfl identity issue {name}"
    if now < starts:
        return Finding(what, BAD, f"not valid before {starts:%Y-%m-%d %H:%M} UTC", "is this machine's clock right?")
    if now > ends:
        return Finding(what, BAD, f"expired on {ends:%Y-%m-%d}", anew)
    if days < _SOON:
        return Finding(what, NOTE, f"expires in {days} days, on {ends:%Y-%m-%d}", anew)
    return Finding(what, OK, f"valid until {ends:%Y-%m-%d}")


def look_at_neighbours(federation: Path, name: str, identity: Path | None) -> Iterator[Finding]:
    """Whether each peer that `name` talks to (without a name: each peer) answers at its address."""
    try:
        peers = _peers(federation, name)
        context = _context(identity, name)
    except SemiDFLError as error:
        yield Finding("federation", BAD, str(error), "mend it first")
        return
    for peer, address in peers:
        yield _reach(peer, address, context)


def _peers(path: Path, name: str) -> list[tuple[str, str]]:
    """Names and addresses from the federation file."""
    if name and find_spec("semidfl.node") is not None:  # which knows the graph, too
        found = import_module("semidfl.node.federation").read(path)
        found.member(name)
        return [(peer.name, peer.address) for peer in found.neighbours_of(name)]
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("peers", [])
        return [(str(peer["name"]), str(peer["address"])) for peer in tables if peer["name"] != name]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no federation file: {error}") from None


def _context(identity: Path | None, name: str) -> ssl.SSLContext | None:
    """TLS as a peer speaks it; None where no certificates were given, and only the way is looked at."""
    if identity is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    files = [identity / f"{_AUTHORITY}.crt", *((identity / f"{name}.crt", identity / f"{name}.key") if name else ())]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ConfigError(f"{missing[0]} is missing")
    try:
        context.load_verify_locations(files[0])
        if name:
            context.load_cert_chain(files[1], files[2])
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificates in {identity} cannot be used: {error}") from None
    return context


def _reach(peer: str, address: str, context: ssl.SSLContext | None) -> Finding:
    what = f"neighbour {peer}"
    try:
        with socket.create_connection(split_address(address), _PATIENCE) as line:
            if context is None:
                return Finding(what, OK, f"{address} answers; give --identity to look at certificates, too")
            with context.wrap_socket(line, server_hostname=peer) as secure:
                # What it thinks of our certificate it says only now, in place of its first greeting.
                secure.recv(1)
        return Finding(what, OK, f"{address} answers, certificates are accepted on both sides")
    except ssl.SSLError as error:
        text, advice = explain_tls(error)
        return Finding(what, BAD, f"{address}: {text}", advice)
    except socket.gaierror:
        return Finding(what, BAD, f"{address}: no machine has this name", "check the address in the federation file")
    except TimeoutError:
        return Finding(what, BAD, f"{address}: no answer within {_PATIENCE:g} s", "is a firewall in between?")
    except ConnectionRefusedError:
        return Finding(what, BAD, f"{address}: nothing listens there", "is it started? `semidfl node` on that machine")
    except (OSError, ValueError, OverflowError) as error:
        return Finding(what, BAD, f"{address}: {error}", "check the address in the federation file")


def explain_tls(error: ssl.SSLError) -> tuple[str, str]:
    """What a refusal means, and what to do."""
    reason = getattr(error, "reason", None)
    said = f"{reason or ''} {error}".lower().replace("_", " ")
    for part, text, advice in _TLS:
        if part in said:
            return text, advice
    return f"TLS failed ({reason or error})", "compare the certificates on both sides"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is no address: HOST:PORT")
    return host.strip("[]"), int(port)
