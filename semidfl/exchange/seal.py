"""Answers carry the sender's certificate and a signature.

TLS already says that an answer comes from a holder of a certificate with the right name, but gRPC does not show the
caller which one that was. The seal does: so a certificate on the deny list is refused also where this peer is the one
who calls, even if a thief of its key answers at the right address. What is sealed holds the asker's nonce, so an old
seal is worth nothing.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from semidfl.errors import IdentityError
from semidfl.exchange.codec import LARGEST_CONTROL
from semidfl.exchange.refuse import Refusal, Refused
from semidfl.node.extras import need
from semidfl.node.identity import Certificate, Identity, fingerprint, is_elliptic

__all__ = ["Seal"]

_PURPOSE = b"semidfl answer\0"
"""what is signed here can be taken for nothing else"""


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    message: Annotated[bytes, Meta(max_length=LARGEST_CONTROL)]
    certificate: Annotated[bytes, Meta(max_length=8192)]
    signature: Annotated[bytes, Meta(max_length=256)]


class Seal:
    """Seals own answers and opens those of others; without an identity, it does neither sign nor look."""

    def __init__(self, identity: Identity | None, denied: Callable[[str, str], bool]) -> None:
        self.identity, self.denied = identity, denied
        self._key: Any = None
        if identity is not None:
            load = need("cryptography.hazmat.primitives.serialization").load_pem_private_key
            self._key = load(identity.key, None)
            if not is_elliptic(self._key.public_key()):
                raise IdentityError(f"the key of {identity.name} is of a kind that cannot sign answers: make an EC key")

    def close(self, message: bytes) -> bytes:
        if self.identity is None:
            return msgspec.msgpack.encode(_Sealed(message, b"", b""))
        signature = self._key.sign(_PURPOSE + message, _ecdsa())
        return msgspec.msgpack.encode(_Sealed(message, self.identity.certificate, signature))

    def open(self, words: Any, name: str) -> bytes:
        """The message, if `name` has sealed it with a certificate that nothing speaks against."""
        if not isinstance(words, bytes):
            raise Refused(Refusal.GARBAGE, "the answer is empty")
        try:
            sealed = msgspec.msgpack.decode(words, type=_Sealed)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise Refused(Refusal.GARBAGE, f"no sealed answer: {error!s:.100}") from None
        if self.identity is not None:
            self._check(sealed, name, self.identity.authority)
        return sealed.message

    def _check(self, sealed: _Sealed, name: str, authority: bytes) -> None:
        known, public = _trusted(sealed.certificate, authority)
        if known is None or known.name != name:
            found = known.name if known else "nobody of this federation"
            raise Refused(Refusal.CERTIFICATE, f"sealed by {found}, not by {name}")
        if not known.is_valid:
            raise Refused(Refusal.CERTIFICATE, f"sealed with a certificate that is valid until {known.ends:%Y-%m-%d}")
        if self.denied(name, fingerprint(sealed.certificate)):
            raise Refused(Refusal.DENIED, f"the certificate of {name} is on the deny list")
        try:
            public.verify(sealed.signature, _PURPOSE + sealed.message, _ecdsa())
        except need("cryptography.exceptions").InvalidSignature:
            raise Refused(Refusal.CERTIFICATE, f"the seal is not that of {name}") from None


@lru_cache(64)
def _trusted(pem: bytes, authority: bytes) -> tuple[Certificate | None, Any]:
    """What a certificate says and its key, if the authority has signed it."""
    x509 = need("cryptography.x509")
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        public = certificate.public_key()
        return (Certificate.of(certificate), public) if is_elliptic(public) else (None, None)
    except Exception:  # whatever is wrong with bytes that anybody may have sent
        return None, None


@lru_cache(1)
def _ecdsa() -> Any:
    sha256 = need("cryptography.hazmat.primitives.hashes").SHA256()
    return need("cryptography.hazmat.primitives.asymmetric.ec").ECDSA(sha256)
