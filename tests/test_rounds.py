"""A round's result must not depend on how clients are placed, ordered or stacked; odd clients must not break it."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from semidfl.cohort import Cohort
from semidfl.config import Config, override
from semidfl.data.dataset import Dataset
from semidfl.data.sources import load
from semidfl.exchange.memory import MemoryExchange, MemoryHub
from semidfl.experiment import first_test, has_test, prepare, run, train
from semidfl.methods.base import Method
from semidfl.record.log import RoundLog
from tests.small import tiny

Rows = dict[int, dict[str, Tensor]]


def ten(**overrides: object) -> Config:
    """The paper's graph with its ten clients, small in everything else."""
    paper = {"graph__topology": "fig1", "graph__clients": 10, "graph__roles": "", "data__ratio": 5, "rounds": 4}
    return tiny(**(paper | overrides))


def rounds_of(config: Config, data: Dataset | None = None) -> tuple[Method, Cohort, list[dict[str, Any]]]:
    """One cohort of all clients."""
    method, cohort = prepare(config, data or load("digits"))
    return method, cohort, list(train(config, method, cohort, MemoryExchange(cohort.ids)))


def rows_of(cohort: Cohort) -> Rows:
    """The state of each client."""
    return {i: {name: x[row] for name, x in cohort.state().items()} for row, i in enumerate(cohort.ids)}


def in_blocks(config: Config, blocks: Sequence[Sequence[int]]) -> Rows:
    """The same run with the clients spread over several cohorts that only meet in the exchange."""
    hub, found, failed = MemoryHub(blocks, timeout=120), {}, []

    def work(block: int) -> None:
        try:
            method, cohort = prepare(config, load("digits"), blocks[block])
            for _ in train(config, method, cohort, hub.seat(block)):
                pass
            found.update(rows_of(cohort))
        except BaseException as error:  # whatever it is, the others must not wait for this one
            failed.append(error)
            hub.abort()

    threads = [threading.Thread(target=work, args=(b,)) for b in range(len(blocks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


@pytest.fixture(scope="module")
def alone() -> Rows:
    _, cohort, _ = rounds_of(ten(compute__deterministic=True))
    return rows_of(cohort)


@pytest.mark.parametrize(
    "blocks",
    [
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
        [[9, 0, 5], [7, 1], [2, 8, 3, 6, 4]],
        [[i] for i in range(10)],
        [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]],
    ],
    ids=["halves", "mixed-up", "one-by-one", "backwards"],
)
def test_deterministic_runs_give_the_same_bits_wherever_clients_are(alone: Rows, blocks: list[list[int]]) -> None:
    spread = in_blocks(ten(compute__deterministic=True), blocks)
    assert sorted(spread) == list(range(10))
    for client, tensors in alone.items():
        assert tensors.keys() == spread[client].keys()
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"


def test_models_that_are_mixed_several_times() -> None:
    """After one round: W^k times what the clients have learnt, the momentum, too; and the same bits in blocks."""
    fields: dict[str, object] = {
        "method": "dfl-lb",
        "graph__topology": "topology3",
        "rounds": 1,
        "aggregation__momentum": True,
        "compute__deterministic": True,
    }
    once, *more = (rounds_of(ten(**fields, aggregation__gossip=k)) for k in (1, 2, 4))
    graph = once[0].setup.graph
    w = torch.zeros(10, 10, dtype=torch.float64)
    for i, neighbours in enumerate(graph.neighbours):
        w[i, [i, *neighbours]] = 1 / (1 + len(neighbours))
    for k, (_, cohort, records) in zip((2, 4), more, strict=True):
        for name in ("classifier.params", "classifier.optimiser.velocity"):
            start = once[1].state()[name].double()
            expected = torch.linalg.matrix_power(w, k - 1) @ start
            torch.testing.assert_close(cohort.state()[name].double(), expected, atol=1e-6, rtol=1e-5)
            assert (expected - start).abs().max() > 1e-3
        sent = records[0]["bytes_sent"]
        assert list(sent) == ["models", *(f"models-{j}" for j in range(2, k + 1))]
        assert len({tuple(row) for row in sent.values()}) == 1, "as many times the bytes"
    config = ten(compute__deterministic=True, aggregation__gossip=2, exchange__dtype="int8", rounds=3)
    spread, whole = in_blocks(config, [[9, 0, 5], [7, 1], [2, 8, 3, 6, 4]]), rows_of(rounds_of(config)[1])
    for client, tensors in whole.items():
        for name, x in tensors.items():
            assert torch.equal(x, spread[client][name]), f"client {client}: {name}"


def test_the_state_covers_what_the_round_changes(alone: Rows) -> None:
    names = set(alone[0])
    assert {"classifier.params", "classifier.optimiser.velocity", "generator.params", "synthetic.images"} <= names
    assert not torch.equal(alone[0]["classifier.params"], alone[1]["classifier.params"])


def test_stacked_chunks_and_loop_agree_to_rounding() -> None:
    base = ten(rounds=3)
    stacked, loop, chunks = (rounds_of(override(base, {"compute.chunk": size}))[1] for size in (10, 1, 4))
    for other in (loop, chunks):
        torch.testing.assert_close(stacked.classifier.params, other.classifier.params, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(stacked.generator.params, other.generator.params, atol=1e-4, rtol=1e-3)


def test_a_client_without_labels_only_aggregates_in_the_lower_bound() -> None:
    """Client 7 sees 0, 2, 3 and 6; of these 6, like itself, has no labels and so brings the first weights."""
    config = ten(method="dfl-lb", rounds=1)
    method, cohort = prepare(config, load("digits"))
    start = cohort.classifier.params[0].clone()
    method.train_classifier(1, cohort, None, RoundLog(1, torch.device("cpu")))
    learnt = cohort.classifier.params
    assert torch.equal(learnt[6], start)
    assert not torch.equal(learnt[0], start)
    _, after, _ = rounds_of(config)
    expected = (learnt[0] + learnt[2] + learnt[3] + 2 * start) / 5
    torch.testing.assert_close(after.classifier.params[7], expected)


def test_everything_rejected_leaves_unlabelled_clients_as_they_are() -> None:
    """With tau = 1 nobody is sure enough: the maximum of the counts is 0, and nothing may be kept."""
    config = ten(pseudo__threshold=1.0, generator__kind="none", rounds=2)
    _, cohort, records = rounds_of(config)
    assert records[-1]["pseudo_labels"] == [0] * 10
    assert records[-1]["thresholds"][4] == [None] * 10
    assert torch.count_nonzero(cohort.classifier.optimiser["velocity"][4]) == 0
    assert torch.isfinite(cohort.classifier.params).all()


def test_a_class_that_nobody_has_runs() -> None:
    digits = load("digits")
    more = replace(digits, classes=(*digits.classes, "eleven"))
    _, cohort, records = rounds_of(ten(), more)
    assert len(records[-1]["thresholds"][0]) == 11
    assert torch.isfinite(cohort.classifier.params).all()
    assert cohort.synthetic is not None
    assert int(cohort.synthetic.labels.max()) == 10


def test_one_label_in_a_client_is_enough_to_run() -> None:
    _, cohort, records = rounds_of(ten(data__ratio=0.3, rounds=3))
    assert min(n for n in cohort.shards.labelled.held if n) == 1
    assert all(x is not None for x in records[-1]["accuracy"])


def test_the_upper_bound_labels_everything() -> None:
    _, cohort, _ = rounds_of(ten(method="dfl-ub", rounds=1))
    assert sum(cohort.shards.labelled.held) == 1437
    assert sum(cohort.shards.unlabelled.held) == 0


@pytest.mark.parametrize("kind", ["vanilla", "apl"])
def test_ablated_pseudo_labels_ask_no_neighbour(kind: str) -> None:
    _, _, records = rounds_of(ten(pseudo__kind=kind, rounds=1))
    assert set(records[0]["bytes_sent"]) == {"models"}


def test_bytes_count_every_neighbour_once() -> None:
    method, cohort, records = rounds_of(ten(rounds=1))
    sent = records[0]["bytes_sent"]
    assert sent["classifiers"] == [4 * 4 * method.setup.classifier.size] * 10  # 4 neighbours, 4 bytes a number
    assert sent["counts"] == [4 * 8 * 11] * 10
    assert cohort.generator is not None
    assert sent["models"] == [4 * 4 * (method.setup.classifier.size + method.setup.generator.size)] * 10


def test_all_clients_start_from_the_same_weights() -> None:
    _, cohort = prepare(ten(), load("digits"))
    assert (cohort.classifier.params == cohort.classifier.params[0]).all()
    other = prepare(ten(seed=1), load("digits"))[1]
    assert not torch.equal(cohort.classifier.params, other.classifier.params)


@pytest.mark.parametrize(
    ("rounds", "every", "last", "seldom"),
    [(20, 5, 2, 10), (23, 5, 3, 10), (23, 4, 2, 9), (10, 3, 10, 5), (7, 10, 2, 3), (7, 5, 1, 3), (3, 5, 1, 2)],
)
def test_few_tests_on_the_way_leave_those_that_count(rounds: int, every: int, last: int, seldom: int) -> None:
    usual = [t for t in range(1, rounds + 1) if t % every == 0 or t == rounds]
    config = tiny(rounds=rounds, evaluation__every=every, evaluation__last=last)
    assert [t for t in range(1, rounds + 1) if has_test(config, t)] == usual
    assert first_test(config) == usual[0]
    config = override(config, {"compute.test_every": seldom})
    found = [t for t in range(1, rounds + 1) if has_test(config, t)]
    assert found[-last:] == usual[-last:]
    assert first_test(config) == found[0]
    assert found[:-last] == (list(range(seldom, usual[-last], seldom)) if len(usual) >= last else [])


def test_with_few_tests_on_the_way_the_result_is_the_same(tmp_path: Path) -> None:
    config = tiny(method="dfl-lb", rounds=6, evaluation__every=1, evaluation__last=2)
    often, seldom = (run(override(config, {"compute.test_every": k}), tmp_path / str(k)).summary for k in (0, 3))
    same = [{k: v for k, v in summary.items() if k != "seconds"} for summary in (often, seldom)]
    assert same[0] == same[1]
