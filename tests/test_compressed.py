"""Models in fewer bytes: codecs against plain Python, error feedback where plain rounding fails, resume, bytes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CPU, draws_of, random, topology
from torch import Tensor

from semidfl.cohort import Cohort, Learner
from semidfl.config import ExchangeConfig
from semidfl.data.sources import load
from semidfl.exchange.base import Counted, Neighbourhood, Shared
from semidfl.exchange.compressed import Codec, Compressed, Half, Int8
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, train
from semidfl.learn.aggregate import equal_weights, mix
from semidfl.record import checkpoint
from tests.test_rounds import rounds_of, ten

RING = topology([[(i - 1) % 6, (i + 1) % 6] for i in range(6)])
CODECS: dict[str, Codec] = {"fp16": Half(torch.float16), "bf16": Half(torch.bfloat16), "int8": Int8()}
# The largest error of a number, as a share of itself (half) or of the largest in its block (int8).
ERROR = {"fp16": 2**-11, "bf16": 2**-8, "int8": 0.5001 / 127}


def cohort_of(clients: int) -> Cohort:
    """A cohort with nothing in it but a memory."""
    return Cohort(tuple(range(clients)), draws_of(clients), None, Learner(torch.zeros(clients, 1), {}))  # type: ignore[arg-type]


def sent_and_seen(x: Tensor, **config: Any) -> tuple[dict[str, Tensor], Tensor]:
    """What goes over the wire for a generator, and what comes out of it."""
    heard: dict[str, Tensor] = {}

    class Wire(MemoryExchange):
        def share(self, t: int, topic: str, tensors: Any) -> Shared:
            heard.update(tensors)
            return super().share(t, topic, tensors)

    exchange = Compressed.around(Wire(range(len(x))), ExchangeConfig(**config), cohort_of(len(x)))
    return heard, exchange.share(1, "models", {"generator": x}).tensors["generator"]


# --- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("name", CODECS)
def test_what_comes_back_is_near(name: str, size: int) -> None:
    x = random(1, 3, size) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    back = CODECS[name].decode(CODECS[name].encode(x))
    assert back.shape == x.shape
    assert back.dtype == torch.float32
    largest = x.abs()
    if name == "int8":
        largest = torch.cat([p.abs().amax(1, keepdim=True).expand_as(p) for p in x.split(128, 1)], dim=1)
    assert ((back - x).abs() <= ERROR[name] * largest + 2**-25).all()


def test_int8_is_the_plain_one() -> None:
    x = random(1, 2, 300)
    x[1, :128] = 0.0
    parts = Int8().encode(x)
    for row in range(2):
        for start in range(0, 300, 128):
            block = x[row, start : start + 128].tolist()
            scale = max(map(abs, block)) / 127
            assert float(parts[".scale"][row, start // 128]) == pytest.approx(scale, rel=1e-6)
            expected = [round(v / scale) if scale else 0 for v in block]
            assert parts[""][row, start : start + 128].tolist() == expected


@pytest.mark.parametrize("name", CODECS)
def test_what_is_rounded_once_stays(name: str) -> None:
    once = CODECS[name].decode(CODECS[name].encode(random(1, 3, 500)))
    again = CODECS[name].decode(CODECS[name].encode(once))
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 2.7e-43, 1e-38, 70000.0, 3e38])
def test_extreme_weights_stay_finite(name: str, value: float) -> None:
    x = torch.full((1, 10), value)
    x[0, 3] = -value
    back = CODECS[name].decode(CODECS[name].encode(x))
    assert torch.isfinite(back).all()
    assert (back.sign() * x.sign() >= 0).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_model_is_not_hidden(name: str, value: float) -> None:
    x = random(1, 2, 300)
    x[0, 5] = value
    back = CODECS[name].decode(CODECS[name].encode(x))
    assert not torch.isfinite(back[0]).all()
    assert torch.isfinite(back[1]).all()
    assert any(not torch.isfinite(part.float()).all() for part in CODECS[name].encode(x).values())


# --- the exchange -----------------------------------------------------------------------------------------------------


def test_fp32_is_the_exchange_itself() -> None:
    inner = MemoryExchange(range(3))
    assert Compressed.around(inner, ExchangeConfig(), cohort_of(3)) is inner


def test_the_wire_carries_few_bytes_and_no_other_names() -> None:
    x = random(1, 3, 1000)
    heard, _ = sent_and_seen(x, dtype="int8")
    assert {name: (y.dtype, tuple(y.shape)) for name, y in heard.items()} == {
        "generator": (torch.int8, (3, 1000)),
        "generator.scale": (torch.float32, (3, 8)),
    }
    heard, seen = sent_and_seen(x, dtype="bf16")
    assert [y.dtype for y in heard.values()] == [torch.bfloat16]
    assert torch.equal(seen, x.bfloat16().float())


@pytest.mark.parametrize(
    ("config", "classifier", "generator"),
    [
        ({"dtype": "fp16"}, 2, 2),
        ({"generator_dtype": "int8"}, 4, 1),
        ({"dtype": "bf16", "generator_dtype": "fp32"}, 2, 4),
        ({"dtype": "int8", "generator_dtype": "fp16"}, 1, 2),
    ],
)
def test_each_model_has_its_own_dtype(config: Any, classifier: int, generator: int) -> None:
    counted = Counted(MemoryExchange(range(6)), RING, range(6))
    exchange = Compressed.around(counted, ExchangeConfig(**config), cohort_of(6))
    scales = 4 * 10  # bytes of the scales of 1280 numbers
    for name, size in (("classifier", classifier), ("velocity", classifier), ("generator", generator)):
        exchange.share(1, "models", {name: random(1, 6, 1280)})
        assert counted.reset() == {"models": [2 * (1280 * size + (scales if size == 1 else 0))] * 6}


def test_what_is_no_model_is_left_alone() -> None:
    exchange = Compressed.around(MemoryExchange(range(2)), ExchangeConfig(dtype="int8"), cohort_of(2))
    some = {"counts": torch.tensor([[2**40], [3]]), "accuracy": random(1, 2), "predicted": random(2, 2, 10)}
    seen = exchange.share(1, "models", some).tensors
    assert all(seen[name] is x for name, x in some.items())


def test_a_teacher_is_rounded_without_feedback() -> None:
    cohort = cohort_of(2)
    exchange = Compressed.around(MemoryExchange(range(2)), ExchangeConfig(dtype="bf16"), cohort)
    x = random(1, 2, 50)
    for t in (1, 2):
        assert torch.equal(
            exchange.share(t, "classifiers", {"classifier": x}).tensors["classifier"], x.bfloat16().float()
        )
    assert cohort.memory == {}


# --- error feedback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_mean_of_what_was_sent_is_what_was_meant(dtype: str) -> None:
    x = random(1, 2, 300)
    for feedback, near in ((True, True), (False, False)):
        exchange = Compressed(MemoryExchange(range(2)), ExchangeConfig(dtype=dtype, feedback=feedback), cohort_of(2))
        sent = [exchange.share(t, "models", {"classifier": x}).tensors["classifier"] for t in range(200)]
        error = (torch.stack(sent).double().mean(0) - x).abs().max() / (sent[0] - x).abs().max()
        assert (float(error) < 0.02) is near


def descend(config: ExchangeConfig, rounds: int = 400) -> float:
    """Six clients on a ring, each pulled to a point of its own in small steps; how far their mean ends from the best.

    One weight of each block is large, so the grid of int8 is coarse beside the steps of the others.
    """
    goals = 0.3 * random(5, 6, 256)
    goals[:, ::128] = 20.0
    cohort, near = cohort_of(6), Neighbourhood.of(RING, range(6), range(6), CPU)
    exchange = Compressed.around(MemoryExchange(range(6)), config, cohort)
    x = torch.zeros(6, 256)
    x[:, ::128] = 20.0
    tail = []
    for t in range(rounds):
        x = x + 0.03 * (goals - x)
        x = mix(equal_weights(near), near, exchange.share(t, "models", {"generator": x}).tensors["generator"], True)
        tail.append(x.mean(0))
    return float((torch.stack(tail[-100:]).mean(0) - goals.mean(0)).norm() / goals.mean(0)[1:128].norm())


def test_feedback_converges_where_plain_rounding_does_not() -> None:
    exact = descend(ExchangeConfig())
    assert exact < 1e-3
    assert descend(ExchangeConfig(dtype="int8")) < 0.03
    assert descend(ExchangeConfig(dtype="int8", feedback=False)) > 0.3
    assert descend(ExchangeConfig(dtype="bf16")) < 0.01
    assert descend(ExchangeConfig(dtype="bf16", feedback=False)) > 0.05


def test_a_neighbour_that_misses_messages_needs_nothing_to_understand_the_next() -> None:
    """What is seen depends on that round's message alone, whatever the receiver has seen before."""
    sender, always, late = cohort_of(1), cohort_of(1), cohort_of(1)
    config, wires = ExchangeConfig(dtype="int8"), []

    class Tap(MemoryExchange):
        def share(self, t: int, topic: str, tensors: Any) -> Shared:
            wires.append(dict(tensors))
            return super().share(t, topic, tensors)

    class Mailbox:
        def __init__(self, message: dict[str, Tensor]) -> None:
            self.message = message

        def share(self, t: int, topic: str, tensors: Any) -> Shared:
            return Shared((0,), self.message)

    out = Compressed(Tap([0]), config, sender)
    for t in range(5):
        out.share(t, "models", {"generator": random(t, 1, 300)})
    for receiver, heard in ((always, range(5)), (late, [4])):
        for t in heard:
            seen = Compressed(Mailbox(wires[t]), config, receiver).share(t, "models", {"generator": random(9, 1, 300)})
        last = seen.tensors["generator"]
        assert torch.equal(last, Int8().decode({"": wires[4]["generator"], ".scale": wires[4]["generator.scale"]}))


# --- runs -------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"exchange__dtype": "bf16", "exchange__generator_dtype": "int8", "aggregation__momentum": True}


def test_every_round_says_what_was_really_sent() -> None:
    method, _, records = rounds_of(ten(**SMALL, exchange__generator_every=2))
    classifier, generator = method.setup.classifier.size, method.setup.generator.size
    for record in records:
        models = 2 * 2 * classifier  # with the momentum
        if record["round"] % 2 == 0:
            models += generator + 4 * math.ceil(generator / 128)
        if record["round"] >= 2:
            models += 8  # the accuracy on generated data, a double
        assert record["bytes_sent"]["models"] == [4 * models] * 10
        assert record["bytes_sent"]["classifiers"] == [4 * 2 * classifier] * 10


def test_between_two_exchanges_a_generator_stays_with_its_client() -> None:
    config = ten(exchange__generator_every=3, rounds=3)
    method, cohort = prepare(config, load("digits"))
    spread = []
    for _ in train(config, method, cohort, MemoryExchange(cohort.ids)):
        assert cohort.generator is not None
        spread.append(float(cohort.generator.params.std(0).norm()))
    assert spread[1] > spread[0] > 0
    assert spread[2] < spread[1]


def test_half_precision_hardly_changes_a_run() -> None:
    _, exact, _ = rounds_of(ten(rounds=2))
    _, half, _ = rounds_of(ten(rounds=2, exchange__dtype="fp16"))
    assert not torch.equal(exact.classifier.params, half.classifier.params)
    torch.testing.assert_close(half.classifier.params, exact.classifier.params, atol=5e-3, rtol=0)


def test_a_resumed_run_ends_the_same(tmp_path: Path) -> None:
    config = ten(**SMALL, exchange__generator_every=2)
    _, whole, _ = rounds_of(config)
    method, cohort = prepare(config, load("digits"))
    rounds = train(config, method, cohort, MemoryExchange(cohort.ids))
    next(rounds), next(rounds)
    checkpoint.save(tmp_path, 2, cohort.state(), {})
    assert {"memory.unsent.classifier", "memory.unsent.generator", "memory.unsent.velocity"} <= cohort.state().keys()
    method, again = prepare(config, load("digits"))
    again.restore(checkpoint.load_latest(tmp_path)[1])
    for _ in train(config, method, again, MemoryExchange(again.ids), first=3):
        pass
    assert {n for n, x in whole.state().items() if not torch.equal(x, again.state()[n])} == set()
    # and it would not, if what was not sent were forgotten
    _, forgetful = prepare(config, load("digits"))
    forgetful.restore({n: x for n, x in checkpoint.load_latest(tmp_path)[1].items() if "unsent" not in n})
    for _ in train(config, method, forgetful, MemoryExchange(again.ids), first=3):
        pass
    assert not torch.equal(whole.classifier.params, forgetful.classifier.params)
