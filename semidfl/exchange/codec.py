"""The messages that peers exchange, and the checks that each must pass. Never pickle.

Control messages are msgspec structs. Tensors travel as safetensors: 8 bytes that say how long the header is, a JSON
header with name, type, shape and place of each tensor, then their bytes. A `Head` goes first and says how many bytes
will come and what their hash is; then come chunks, all full but the last.

Everything is held against what the receiver itself expects (`Spec`), in this order: size before any memory is taken,
hash when all is there, names, types and shapes before any tensor is made, values last. What does not fit raises
`Refused`, whatever the bytes are.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import save
from torch import Tensor

from semidfl.exchange.refuse import Refusal, Refused
from semidfl.record.checkpoint import on_cpu

__all__ = [
    "CHUNK",
    "LARGEST_CONTROL",
    "PROTOCOL",
    "Ask",
    "Body",
    "Bye",
    "Head",
    "Hello",
    "Spec",
    "decode",
    "decode_body",
    "encode",
    "encode_body",
]

PROTOCOL = 1
CHUNK = 1 << 20
LARGEST_CONTROL = 1 << 17
_LARGEST_HEADER = 1 << 16
_LARGEST_ROUND = 10**9
_BEYOND = 1000.0
"""times one's own largest number: nothing that training makes is further away"""
_WITHIN = {
    "accuracy": (0.0, 1.0),
    "counts": (0.0, 2.0**40),
    "labelled": (0.0, 2.0**40),
    "predicted": (-(2.0**40), 2.0**40),  # an estimate: less than none where a client has taken its own out
    "taught": (0.0, 2.0),
    "tilt": (-5.0, 5.0),
}
"""what some tensors can only be; an accuracy of 1000 would make its owner's weight infinite (Eq. 12)"""
_LARGEST_COUNT = 2.0**40

_Name = Annotated[str, Meta(max_length=64)]
_Round = Annotated[int, Meta(ge=0, le=_LARGEST_ROUND)]
_Nonce = Annotated[bytes, Meta(min_length=16, max_length=16)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    protocol: int
    sender: _Name
    """must be the name in the certificate"""
    agreement: Annotated[str, Meta(max_length=64)]
    """hash of all that the peers must agree on"""


class Ask(_Message, frozen=True, forbid_unknown_fields=True):
    """Give me what you published under a topic of a round."""

    nonce: _Nonce
    round: _Round
    topic: _Name
    oldest: _Round
    """of an earlier round, if need be, down to this one; a later one is always welcome"""
    wait: Annotated[float, Meta(ge=0, le=86400)]
    """seconds that the answer may wait for the round to come"""


class Head(_Message, frozen=True, forbid_unknown_fields=True):
    """What comes: `size` bytes in chunks; 0 if there is nothing to give."""

    nonce: _Nonce
    round: _Round
    topic: _Name
    at: _Round
    """the round that the sender works on"""
    clients: Annotated[list[int], Meta(max_length=100_000)]
    size: Annotated[int, Meta(ge=0, le=2**40)]
    digest: Annotated[bytes, Meta(max_length=32)]


class Hello(_Message, frozen=True, forbid_unknown_fields=True):
    """Question and answer of the barrier at the start."""

    nonce: _Nonce
    at: _Round
    terms: Annotated[dict[_Name, Annotated[str, Meta(max_length=16384)]], Meta(max_length=16)]
    """all that the peers must agree on, in words: where the hashes differ, these say why"""


class Bye(_Message, frozen=True, forbid_unknown_fields=True):
    """I have all that I need from you."""

    round: _Round


M = TypeVar("M", Ask, Head, Hello, Bye)


def encode(message: Ask | Head | Hello | Bye) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    """The message in `data`, of our own protocol."""
    if len(data) > LARGEST_CONTROL:
        raise Refused(Refusal.OVERSIZE, f"a message of {len(data)} bytes")
    try:
        # Looked at first, and loosely: another version may well have other fields.
        version = _LOOSE.decode(data).get("protocol")
        if version != PROTOCOL:
            raise Refused(Refusal.PROTOCOL, f"protocol {version!r:.40} there, {PROTOCOL} here")
        return msgspec.msgpack.decode(data, type=kind)
    # Deep nesting and strings that are no UTF-8 have errors of their own.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Refused(Refusal.GARBAGE, f"no {kind.__name__}: {error!s:.100}") from None


_LOOSE = msgspec.msgpack.Decoder(dict[str, Any])

# --- tensors ----------------------------------------------------------------------------------------------------------

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Body:
    """Tensors as they travel."""

    data: bytes
    digest: bytes
    names: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    """What a peer expects of one tensor: the type on the way, the shape of a client's row, its own largest number."""

    dtype: torch.dtype
    row: tuple[int, ...]
    largest: float
    needed: bool = True


@dataclass(frozen=True)
class Spec:
    """What a peer expects of a message, from what it would send itself."""

    tensors: Mapping[str, Expected]

    @classmethod
    def of(cls, own: Mapping[str, Tensor], optional: Mapping[str, Tensor]) -> "Spec":
        """`optional` may come or not: a peer that has just joined has not measured its accuracy yet."""
        found = {}
        for name, x in {**optional, **own}.items():
            largest = float(x.abs().amax()) if x.is_floating_point() and x.numel() else 0.0
            found[name] = Expected(x.dtype, tuple(x.shape[1:]), largest, name not in optional)
        return cls(found)

    def after(self, earlier: "Spec | None") -> "Spec":
        """With what was shared in earlier rounds: a neighbour in another round may send what is not due in this one."""
        if earlier is None or earlier.tensors.keys() <= self.tensors.keys():
            return self
        return Spec({name: replace(e, needed=False) for name, e in earlier.tensors.items()} | dict(self.tensors))

    @property
    def of_another_round(self) -> "Spec":
        """The same where nothing must be there, since other things may have been due then."""
        return Spec({name: replace(e, needed=False) for name, e in self.tensors.items()})

    @property
    def needed(self) -> set[str]:
        return {name for name, e in self.tensors.items() if e.needed}

    def most(self, clients: int) -> int:
        """Bytes that a body of this many clients may have at most."""
        rows = (math.prod(e.row) * e.dtype.itemsize for e in self.tensors.values())
        return 8 + _LARGEST_HEADER + clients * sum(rows)


def encode_body(tensors: Mapping[str, Tensor]) -> Body:
    """Tensors (C, …) to bytes."""
    ready = on_cpu(tensors)
    data = save(ready)
    return Body(data, hashlib.sha256(data).digest(), tuple(ready))


def decode_body(data: bytearray, digest: bytes, spec: Spec, clients: int) -> dict[str, Tensor]:
    """The tensors in `data`, which they keep as their memory, each (clients, …)."""
    if hashlib.sha256(data).digest() != digest:
        raise Refused(Refusal.HASH, "the content does not fit its hash")
    header, start = _header(data)
    _check_header(header, spec, clients, start, len(data))
    tensors = {}
    for name, entry in header.items():
        expected = spec.tensors[name]
        place, count = start + entry.data_offsets[0], math.prod(entry.shape)
        x = torch.empty(0, dtype=expected.dtype)
        if count:  # which `frombuffer` insists on
            x = torch.frombuffer(data, dtype=expected.dtype, count=count, offset=place)
        x = x.reshape(entry.shape)
        _check_values(name, x, expected)
        tensors[name] = x
    return tensors


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Annotated[str, Meta(max_length=8)]
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=2**40)]], Meta(max_length=8)]
    data_offsets: tuple[Annotated[int, Meta(ge=0, le=2**40)], Annotated[int, Meta(ge=0, le=2**40)]]


_HEADER = msgspec.json.Decoder(dict[str, _Entry])


def _header(data: bytearray) -> tuple[dict[str, _Entry], int]:
    """The header of a safetensors body, and where its tensors start."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_LARGEST_HEADER, len(data) - 8):
        raise Refused(Refusal.GARBAGE, f"a header of {length} bytes in a body of {len(data)}")
    try:
        return _HEADER.decode(data[8 : 8 + length]), 8 + length
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Refused(Refusal.GARBAGE, f"no header: {error!s:.100}") from None


def _check_header(header: Mapping[str, _Entry], spec: Spec, clients: int, start: int, size: int) -> None:
    needed = spec.needed
    if not needed <= set(header) <= set(spec.tensors):
        unlike = sorted(needed.symmetric_difference(header))[:3]
        raise Refused(Refusal.NAMES, f"the tensors differ in {unlike!r:.100}")
    for name, entry in header.items():
        expected = spec.tensors[name]
        shape = [clients, *expected.row]
        if entry.shape != shape or entry.dtype != _CODES.get(expected.dtype):
            found = f"{entry.dtype} {entry.shape}"
            raise Refused(Refusal.SHAPE, f"{name} is {found:.60}, expected {_CODES[expected.dtype]} {shape}")
    _check_places(header, spec, start, size - start)


def _check_places(header: Mapping[str, _Entry], spec: Spec, start: int, size: int) -> None:
    """Each tensor has its own bytes, without holes and without overlap: what is hashed is what is used."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        width = spec.tensors[name].dtype.itemsize
        if first != end or (start + first) % width or last - first != math.prod(entry.shape) * width:
            raise Refused(Refusal.GARBAGE, f"{name} is said to lie at {first} to {last}")
        end = last
    if end != size:
        raise Refused(Refusal.GARBAGE, f"{size} bytes of tensors where the header has {end}")


def _check_values(name: str, x: Tensor, expected: Expected) -> None:
    if not x.numel():
        return
    low, high = (float(v) for v in torch.aminmax(x))  # NaN anywhere is NaN here
    if not (math.isfinite(low) and math.isfinite(high)):
        raise Refused(Refusal.NOT_FINITE, f"{name} holds NaN or infinity")
    limit = _BEYOND * (1 + expected.largest) if x.is_floating_point() else _LARGEST_COUNT
    least, most = _WITHIN.get(name, (-limit, limit))
    if name.endswith(".scale"):  # of int8: a number is up to 127 times its scale
        least, most = 0.0, _BEYOND * (1 / 127 + expected.largest)
    if low < least or high > most:
        raise Refused(Refusal.RANGE, f"{name} runs from {low:.3g} to {high:.3g}, expected {least:.3g} to {most:.3g}")
