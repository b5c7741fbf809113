"""Random and mutated messages for the decoder: `make fuzz` runs 100,000 of them, the tests 2,000.

Nothing but `Refused` may come out, memory may not grow, and what is accepted must be all that the receiver expects.
"""

import hashlib
import json
import random
import resource
import sys
from collections import Counter

import torch
from torch import Tensor

from semidfl.exchange.codec import Ask, Bye, Head, Hello, Spec, decode, decode_body, encode, encode_body
from semidfl.exchange.refuse import Refused

__all__ = ["attack", "memory"]

OWN = {
    "classifier": torch.linspace(-1, 1, 300)[None],
    "accuracy": torch.tensor([0.5], dtype=torch.float64),
    "counts": torch.arange(11)[None],
}
SPEC = Spec.of(OWN, {"accuracy": OWN["accuracy"]})
HONEST = encode_body(OWN)
CONTROL = (
    Ask(1, "a", "agreed", b"n" * 16, 3, "models", 1, 2.5),
    Head(1, "a", "agreed", b"n" * 16, 3, "models", 4, [0, 1], 1000, b"d" * 32),
    Hello(1, "a", "agreed", b"n" * 16, 7, {"config": "lr = 0.1", "classes": "cat\ndog"}),
    Bye(1, "a", "agreed", 9),
)


def attack(count: int, seed: int) -> Counter[str]:
    """So many messages; how many of each kind were accepted or refused, and why."""
    draw = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(count):
        kind = draw.choice((_random_control, _mutated_control, _mutated_body, _mutated_header, _random_body))
        seen[f"{kind.__name__[1:]}: {kind(draw)}"] += 1
    return seen


def _try_control(data: bytes, draw: random.Random) -> str:
    kind = draw.choice((Ask, Head, Hello, Bye))
    try:
        message = decode(kind, data)
    except Refused as refused:
        return refused.reason.value
    assert isinstance(message, kind)
    assert message.protocol == 1
    # Nothing is lost or made up on the way: it is a message that somebody could have sent.
    assert decode(kind, encode(message)) == message
    return "accepted"


def _random_control(draw: random.Random) -> str:
    return _try_control(draw.randbytes(draw.choice((0, 1, 7, 64, 500))), draw)


def _mutated_control(draw: random.Random) -> str:
    return _try_control(_mutated(encode(draw.choice(CONTROL)), draw), draw)


def _try_body(data: bytes, digest: bytes) -> str:
    try:
        tensors = decode_body(bytearray(data), digest, SPEC, 1)
    except Refused as refused:
        return refused.reason.value
    _assert_expected(tensors)
    return "accepted"


def _assert_expected(tensors: dict[str, Tensor]) -> None:
    assert {"classifier", "counts"} <= set(tensors) <= set(OWN)
    for name, x in tensors.items():
        assert x.shape == OWN[name].shape
        assert x.dtype == OWN[name].dtype
        assert torch.isfinite(x.double()).all()
        assert x.abs().max() <= 2**40
    assert "accuracy" not in tensors or 0 <= tensors["accuracy"] <= 1
    assert (tensors["counts"] >= 0).all()


def _mutated_body(draw: random.Random) -> str:
    """Half of them with the hash of what was sent: then the checks behind it must hold by themselves."""
    data = _mutated(HONEST.data, draw)
    if draw.random() < 0.5:
        found = _try_body(data, HONEST.digest)
        assert found != "accepted" or data == HONEST.data
        return found
    return _try_body(data, hashlib.sha256(data).digest())


def _random_body(draw: random.Random) -> str:
    data = draw.randbytes(draw.choice((0, 3, 8, 9, 100, 2000)))
    return _try_body(data, hashlib.sha256(data).digest())


VALUES = [
    0,
    1,
    -1,
    7,
    2**31,
    2**40,
    2**63,
    2**70,
    1.5,
    None,
    True,
    "F32",
    "I64",
    "Q8",
    "",
    [],
    {},
    [1, 300],
    [1, 11],
    [[1]],
]


def _mutated_header(draw: random.Random) -> str:
    """A header that is JSON but lies, in front of the honest bytes."""
    length = int.from_bytes(HONEST.data[:8], "little")
    header = json.loads(HONEST.data[8 : 8 + length])
    for _ in range(draw.randint(1, 3)):
        entry = header[draw.choice([*header])]
        match draw.randint(0, 4):
            case 0 if isinstance(entry, dict):
                entry[draw.choice(("dtype", "shape", "data_offsets", "other"))] = draw.choice(VALUES)
            case 1 if isinstance(entry, dict):
                entry["data_offsets"] = [draw.choice((0, 4, 8, 88, 1200, 10**9)) for _ in range(2)]
            case 2:
                header[draw.choice(("classifier", "x", "accuracy", "__metadata__"))] = draw.choice([entry, *VALUES])
            case 3:
                header.pop(draw.choice([*header]))
                header = header or {"x": entry}
            case _ if isinstance(entry, dict) and isinstance(entry.get("shape"), list):
                entry["shape"] = [draw.choice((0, 1, 2, 300, 2**33)) for _ in range(draw.randint(0, 9))]
    text = json.dumps(header).encode()
    data = draw.choice((len(text), 0, 2**60, len(text) + 9)).to_bytes(8, "little") if draw.random() < 0.1 else b""
    data = (data or len(text).to_bytes(8, "little")) + text + HONEST.data[8 + length :]
    return _try_body(data, hashlib.sha256(data).digest())


def _mutated(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(out) + 1)
        match draw.randint(0, 4):
            case 0:
                del out[place : place + draw.randint(1, 40)]
            case 1:
                out[place:place] = draw.randbytes(draw.randint(1, 40))
            case 2 if out:
                out[place % len(out)] ^= 1 << draw.randrange(8)
            case 3:
                out[place : place + 4] = draw.choice(
                    (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\xc0\x7f", b"\0\0\x80\x7f")
                )
            case _:
                out = out[:place] or out
    return bytes(out)


def memory() -> int:
    """KiB that this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    attack(2_000, seed + 1)  # so that what is loaded once is loaded
    before = memory()
    seen = attack(count, seed)
    for what, times in sorted(seen.items()):
        print(f"{times:8} {what}")
    print(f"{sum(seen.values())} messages; the process's peak memory grew by {memory() - before} KiB")
    if memory() - before > 20_000:
        sys.exit("memory grew")


if __name__ == "__main__":
    main()
