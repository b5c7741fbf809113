"""Messages between peers: what is honest comes through as it was, what is not is refused for the right reason."""

import hashlib
import math

import msgspec
import pytest
import safetensors.torch
import torch
from fuzz_codec import CONTROL, attack, memory
from hypothesis import given
from hypothesis import strategies as st

from semidfl.exchange import codec
from semidfl.exchange.codec import Ask, Bye, Head, Hello, Spec, decode, decode_body, encode, encode_body
from semidfl.exchange.refuse import Refusal, Refused

OWN = {
    "classifier": torch.linspace(-2, 2, 40).reshape(2, 20),
    "accuracy": torch.tensor([0.25, 1.0], dtype=torch.float64),
    "counts": torch.arange(22).reshape(2, 11),
    "taught": torch.tensor([0.0, 2.0], dtype=torch.float64),
}


def refused(reason: Refusal) -> "pytest.RaisesExc[Refused]":
    return pytest.raises(Refused, match=f"^{reason}: ")


def body_of(tensors: dict[str, torch.Tensor]) -> tuple[bytearray, bytes]:
    data = safetensors.torch.save(tensors)
    return bytearray(data), hashlib.sha256(data).digest()


@given(st.data())
def test_tensors_come_through_as_they_were(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 3))
    shapes = data.draw(
        st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=3), max_size=4)
    )
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
    own = {
        n: torch.randn(clients, *shape).abs().to(data.draw(dtypes))
        for n, shape in shapes.items()
        if n != "__metadata__"
    }
    body = encode_body(own)
    found = decode_body(bytearray(body.data), body.digest, Spec.of(own, {}), clients)
    reference = safetensors.torch.load(body.data)
    assert found.keys() == own.keys() == reference.keys()
    for name, x in own.items():
        assert torch.equal(found[name].to(x.dtype), x)
        assert torch.equal(reference[name], x)


@pytest.mark.parametrize("clients", [1, 2])  # of one client alone, parts of a row lie without gaps
def test_views_of_one_tensor_can_be_sent(clients: int) -> None:
    whole = torch.randn(clients, 6)
    own = {"a": whole[:, :3], "b": whole[:, 3:], "c": whole.T.contiguous().T, "d": whole}
    body = encode_body(own)
    found = decode_body(bytearray(body.data), body.digest, Spec.of(own, {}), clients)
    assert all(torch.equal(found[name], x) for name, x in own.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_shortened_models_stay_as_they_are(dtype: torch.dtype) -> None:
    own = OWN | {"classifier": (100 * OWN["classifier"]).to(dtype)}
    body = encode_body(own)
    found = decode_body(bytearray(body.data), body.digest, Spec.of(own, {}), 2)
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in own.items())


SPEC = Spec.of(OWN, {name: OWN[name] for name in ("accuracy", "taught")})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"classifier": OWN["classifier"] * math.nan}, Refusal.NOT_FINITE),
        ({"classifier": OWN["classifier"].where(OWN["classifier"] < 2, math.inf)}, Refusal.NOT_FINITE),
        ({"classifier": OWN["classifier"].where(OWN["classifier"] < 2, -math.inf)}, Refusal.NOT_FINITE),
        ({"classifier": OWN["classifier"] * 1e6}, Refusal.RANGE),
        ({"accuracy": torch.tensor([0.5, 1000.0]).double()}, Refusal.RANGE),
        ({"accuracy": torch.tensor([0.5, -0.1]).double()}, Refusal.RANGE),
        ({"taught": torch.tensor([1.0, 2.1]).double()}, Refusal.RANGE),
        ({"counts": -OWN["counts"]}, Refusal.RANGE),
        ({"counts": OWN["counts"] + 2**62}, Refusal.RANGE),
        ({"classifier": OWN["classifier"][:1]}, Refusal.SHAPE),
        ({"classifier": OWN["classifier"].reshape(2, 4, 5)}, Refusal.SHAPE),
        ({"classifier": OWN["classifier"].double()}, Refusal.SHAPE),
        ({"classifier": OWN["classifier"].view(torch.int32)}, Refusal.SHAPE),
        ({"counts": OWN["counts"].float()}, Refusal.SHAPE),
        ({"more": torch.zeros(2)}, Refusal.NAMES),
        ({"classifier": None}, Refusal.NAMES),
    ],
)
def test_what_is_not_expected_is_refused(change: dict[str, torch.Tensor | None], reason: Refusal) -> None:
    tensors = {name: x for name, x in {**OWN, **change}.items() if x is not None}
    with refused(reason):
        decode_body(*body_of(tensors), SPEC, 2)


def test_what_is_optional_may_be_left_out() -> None:
    tensors = {name: x for name, x in OWN.items() if name != "accuracy"}
    assert decode_body(*body_of(tensors), SPEC, 2).keys() == tensors.keys()


def test_size_is_known_before_memory_is_taken() -> None:
    assert len(encode_body(OWN).data) <= SPEC.most(2) < len(encode_body(OWN).data) + 2**17


def laid_out(places: dict[str, tuple[int, int]], size: int) -> tuple[bytearray, bytes]:
    """A body whose header says that the tensors lie at these places."""
    codes = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
    header = {
        n: {"dtype": codes[OWN[n].dtype], "shape": list(OWN[n].shape), "data_offsets": place}
        for n, place in places.items()
    }
    text = msgspec.json.encode(header)
    data = bytearray(len(text).to_bytes(8, "little") + text + bytes(size))
    return data, hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ({"classifier": (0, 160), "counts": (80, 256)}, 256),  # they overlap
        ({"classifier": (0, 160), "counts": (168, 344)}, 344),  # bytes that nobody hashes a name to
        ({"classifier": (0, 160), "counts": (160, 336)}, 400),  # bytes after the end
        ({"classifier": (0, 160), "counts": (160, 336)}, 200),  # an end after the bytes
        ({"classifier": (0, 164), "counts": (164, 340)}, 340),  # another length than the shape has
    ],
)
def test_tensors_that_lie_where_they_cannot(places: dict[str, tuple[int, int]], size: int) -> None:
    with refused(Refusal.GARBAGE):
        decode_body(*laid_out(places, size), SPEC, 2)


def test_the_hash_is_looked_at_first() -> None:
    data, digest = body_of(OWN)
    data[-1] ^= 1
    with refused(Refusal.HASH):
        decode_body(data, digest, SPEC, 2)


@pytest.mark.parametrize("message", CONTROL, ids=lambda message: type(message).__name__)
def test_control_messages(message: Ask | Head | Hello | Bye) -> None:
    assert decode(type(message), encode(message)) == message
    with refused(Refusal.PROTOCOL):
        decode(type(message), encode(msgspec.structs.replace(message, protocol=2)))
    with refused(Refusal.GARBAGE):
        decode(type(message), encode(message) + b"\0")
    with refused(Refusal.GARBAGE):
        decode(type(message), msgspec.msgpack.encode(msgspec.structs.asdict(message) | {"more": 1}))
    with refused(Refusal.GARBAGE):
        decode(type(message), encode(msgspec.structs.replace(message, sender="x" * 65)))
    with refused(Refusal.OVERSIZE):
        decode(type(message), bytes(codec.LARGEST_CONTROL + 1))


def test_no_message_crashes_the_decoder() -> None:
    attack(500, seed=1)
    before = memory()
    seen = attack(2_000, seed=2)
    assert memory() - before < 20_000
    assert sum(seen.values()) == 2_000
    assert {what.partition(": ")[2] for what in seen} >= {"garbage", "hash", "names", "shape", "accepted"}
