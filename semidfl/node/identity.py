"""Who is who: a federation's authority, and a key and certificate for each peer.

The authority signs, and stays with whoever runs the federation; a peer needs three files: the authority's
certificate, its own certificate, its own key. A peer's name stands in the certificate's subject alternative name,
and nowhere else: what a message claims must equal it. Keys are ECDSA on P-256, readable by their owner only.

    identity/authority.key   authority.crt   NAME.key   NAME.crt   denied.txt
"""

import datetime as dt
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from semidfl.errors import IdentityError
from semidfl.node.extras import need
from semidfl.record.atomic import explain, replacing

__all__ = [
    "AUTHORITY",
    "DENIED",
    "Certificate",
    "Identity",
    "fingerprint",
    "init",
    "is_elliptic",
    "issue",
    "legal_name",
    "parsed",
    "readable_by_others",
    "request",
]

AUTHORITY, DENIED = "authority", "denied.txt"
_DAY = dt.timedelta(days=1)
AUTHORITY_DAYS = 3650


def legal_name(name: str) -> str:
    """A peer's name: what a DNS label may be, so that TLS compares it as it stands."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) or name == AUTHORITY:
        raise IdentityError(
            f"{name!r} is not legal as a peer's name: 1 to 63 small letters, digits and '-', not {AUTHORITY!r}"
        )
    return name


@dataclass(frozen=True)
class Certificate:
    """What `semidfl identity show` says of a certificate."""

    name: str
    fingerprint: str
    starts: dt.datetime
    ends: dt.datetime
    is_authority: bool

    @classmethod
    def read(cls, path: Path) -> "Certificate":
        x509 = need("cryptography.x509")
        try:
            cert = x509.load_pem_x509_certificate(path.read_bytes())
        except FileNotFoundError:
            raise IdentityError(f"there is no certificate {path}") from None
        except (OSError, ValueError) as error:
            raise IdentityError(f"{path} is not a certificate: {error}") from None
        return cls.of(cert)

    @classmethod
    def of(cls, cert: Any) -> "Certificate":
        x509 = need("cryptography.x509")
        try:
            names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            name = ",".join(names.get_values_for_type(x509.DNSName))
        except x509.ExtensionNotFound:
            name = ""
        return cls(name or AUTHORITY, _hex(cert), cert.not_valid_before_utc, cert.not_valid_after_utc, not name)

    @property
    def is_valid(self) -> bool:
        """Whether today lies within its dates."""
        return self.starts <= dt.datetime.now(dt.UTC) <= self.ends

    @property
    def days_left(self) -> float:
        return (self.ends - dt.datetime.now(dt.UTC)) / _DAY


@dataclass(frozen=True)
class Identity:
    """A peer's own key and certificate, and the authority that it trusts; PEM."""

    name: str
    key: bytes
    certificate: bytes
    authority: bytes

    @classmethod
    def load(cls, folder: Path, name: str) -> "Identity":
        """Refuses what the neighbours would refuse anyway, with a reason that they could not give."""
        own, authority = (Certificate.read(folder / f"{stem}.crt") for stem in (name, AUTHORITY))
        if own.name != name:
            raise IdentityError(f"{folder / f'{name}.crt'} is a certificate of {own.name!r}, not of {name!r}")
        for certificate in (own, authority):
            if certificate.days_left <= 0:
                raise IdentityError(f"the certificate of {certificate.name} has expired on {certificate.ends:%Y-%m-%d}")
            if certificate.starts > dt.datetime.now(dt.UTC):
                raise IdentityError(
                    f"the certificate of {certificate.name} is not valid before {certificate.starts:%Y-%m-%d %H:%M} "
                    "UTC: is this machine's clock right?"
                )
        try:
            key = (folder / f"{name}.key").read_bytes()
        except OSError as error:
            raise IdentityError(f"cannot read the key {folder / f'{name}.key'}: {error.strerror}") from None
        found = cls(name, key, (folder / f"{name}.crt").read_bytes(), (folder / f"{AUTHORITY}.crt").read_bytes())
        found._check(folder)
        return found

    def _check(self, folder: Path) -> None:
        """The key belongs to the certificate, and the authority has signed it."""
        x509 = need("cryptography.x509")
        cert, authority = (x509.load_pem_x509_certificate(pem) for pem in (self.certificate, self.authority))
        try:
            key = _serialization().load_pem_private_key(self.key, None)
        except (ValueError, TypeError) as error:
            raise IdentityError(f"{folder / f'{self.name}.key'} is not a key: {error}") from None
        if key.public_key() != cert.public_key():
            raise IdentityError(f"{folder}: {self.name}.key does not belong to {self.name}.crt")
        try:
            cert.verify_directly_issued_by(authority)
        except Exception:  # any of three kinds, all of which mean the same
            raise IdentityError(f"{folder}: {self.name}.crt was not signed by {AUTHORITY}.crt") from None


@lru_cache(256)
def parsed(pem: bytes) -> Certificate:
    return Certificate.of(need("cryptography.x509").load_pem_x509_certificate(pem))


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate."""
    return parsed(pem).fingerprint


def readable_by_others(folder: Path, name: str) -> bool:
    """Whether other accounts of this machine could take the key of `name`."""
    return os.name == "posix" and (folder / f"{name}.key").stat().st_mode & 0o044 != 0


def init(folder: Path, days: int = AUTHORITY_DAYS) -> Certificate:
    """A new authority in `folder`; one that is there is never replaced."""
    if (folder / f"{AUTHORITY}.key").exists():
        raise IdentityError(f"{folder} already holds an authority: a new one would void all its certificates")
    folder.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    builder = _builder(f"semidfl federation {os.urandom(4).hex()}", key.public_key(), days)
    x509 = need("cryptography.x509")
    builder = builder.issuer_name(builder._subject_name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    cert = builder.sign(key, need("cryptography.hazmat.primitives.hashes").SHA256())
    _write(folder, AUTHORITY, key, cert)
    return Certificate.of(cert)


def request(folder: Path, name: str) -> Path:
    """A key that never leaves its machine, and NAME.csr for the authority to sign."""
    legal_name(name)
    _refuse_existing(folder, name)
    x509 = need("cryptography.x509")
    folder.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject)
    csr = csr.sign(key, need("cryptography.hazmat.primitives.hashes").SHA256())
    _write_key(folder / f"{name}.key", key)
    path = folder / f"{name}.csr"
    path.write_bytes(csr.public_bytes(_serialization().Encoding.PEM))
    return path


def issue(folder: Path, name: str, days: float = 365, csr: Path | None = None) -> Certificate:
    """A certificate for a peer, with a new key or for the key behind a request."""
    legal_name(name)
    x509 = need("cryptography.x509")
    try:
        signer = _serialization().load_pem_private_key((folder / f"{AUTHORITY}.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / f"{AUTHORITY}.crt").read_bytes())
    except OSError:
        raise IdentityError(f"{folder} holds no authority: make one with `semidfl identity init`") from None
    key = None
    if csr is None:
        _refuse_existing(folder, name)
        key = _new_key()
    public = key.public_key() if key else _requested(csr, name)
    builder = _builder(name, public, days).issuer_name(authority.subject)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    both = [x509.ExtendedKeyUsageOID.CLIENT_AUTH, x509.ExtendedKeyUsageOID.SERVER_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    cert = builder.sign(signer, need("cryptography.hazmat.primitives.hashes").SHA256())
    _write(folder, name, key, cert)
    return Certificate.of(cert)


def _requested(csr: Path | None, name: str) -> Any:
    assert csr is not None
    x509 = need("cryptography.x509")
    try:
        asked = x509.load_pem_x509_csr(csr.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityError(f"{csr} is not a request: {error}") from None
    names = [x.value for x in asked.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if names != [name] or not asked.is_signature_valid:
        raise IdentityError(f"{csr} asks for {names}, not for {name!r}")
    public = asked.public_key()
    if not is_elliptic(public):
        raise IdentityError(f"{csr} holds no elliptic key: `semidfl identity request {name}` makes one")
    return public


def is_elliptic(public: Any) -> bool:
    """Whether a key is of the kind that seals answers."""
    return isinstance(public, need("cryptography.hazmat.primitives.asymmetric.ec").EllipticCurvePublicKey)


def _refuse_existing(folder: Path, name: str) -> None:
    if (folder / f"{name}.key").exists():
        raise IdentityError(f"{folder} already holds a key of {name}: move it away to make a new one")


def _builder(name: str, public: Any, days: float) -> Any:
    x509 = need("cryptography.x509")
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # A day of grace for peers whose clocks are behind.
        .not_valid_before(min(now, now + days * _DAY) - _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _usage(signs: bool) -> Any:
    return need("cryptography.x509").KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> Any:
    ec = need("cryptography.hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP256R1())


def _serialization() -> Any:
    return need("cryptography.hazmat.primitives.serialization")


def _hex(cert: Any) -> str:
    digest: bytes = cert.fingerprint(need("cryptography.hazmat.primitives.hashes").SHA256())
    return digest.hex()


def _write(folder: Path, name: str, key: Any, cert: Any) -> None:
    if key is not None:
        _write_key(folder / f"{name}.key", key)
    with replacing(folder / f"{name}.crt") as temp:
        temp.write_bytes(cert.public_bytes(_serialization().Encoding.PEM))


def _write_key(path: Path, key: Any) -> None:
    s = _serialization()
    pem = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    # Made with its mode, not given it later: there is no moment at which others could read it.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
    except OSError as error:  # half a key would stand in the way of the next
        path.unlink(missing_ok=True)
        raise IdentityError(explain(path, error)) from error
