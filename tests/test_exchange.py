"""What peers see of each other over gRPC: rows of whoever answered in time, and why others are missing."""

import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from exchanges import LOG, SOON, Pages, at_once, peers_of, rows_of

from semidfl.errors import FederationError
from semidfl.exchange.base import Neighbourhood
from semidfl.exchange.grpc import GrpcExchange
from semidfl.exchange.plan import Deadlines
from semidfl.node.retry import pauses


@pytest.fixture
def trio(keys: Path) -> Iterator[list[GrpcExchange]]:
    made = peers_of(keys, [(0, 3), (1,), (2, 4, 5)])
    with made[0], made[1], made[2]:
        yield made


def test_pauses_double_up_to_a_limit_and_are_drawn_from_zero_on() -> None:
    many = [list(islice(pauses(0.1, 1.6, random.Random(seed)), 8)) for seed in range(400)]
    ceilings = [0.1, 0.2, 0.4, 0.8, 1.6, 1.6, 1.6, 1.6]
    for k, ceiling in enumerate(ceilings):
        drawn = [row[k] for row in many]
        assert 0 <= min(drawn) < 0.05 * ceiling
        assert 0.95 * ceiling < max(drawn) <= ceiling
        assert sum(drawn) / len(drawn) == pytest.approx(ceiling / 2, rel=0.12)


def test_trust_scales_the_weights_of_who_is_behind() -> None:
    near = Neighbourhood(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[True, True, True], [True, True, False]]))
    weights = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.5, 0.0]], dtype=torch.float64)
    trust = torch.tensor([1.0, 1.0, 0.25])
    assert near.trusted(weights, None) is weights
    found = near.trusted(weights, trust)
    assert found.tolist() == [
        pytest.approx([0.2 / 0.625, 0.3 / 0.625, 0.125 / 0.625]),
        pytest.approx([0.5 / 0.625, 0.125 / 0.625, 0.0]),
    ]


def test_cohorts_of_several_clients_see_each_other_s_rows(trio: list[GrpcExchange]) -> None:
    seen = at_once([lambda x=x: x.share(1, "classifiers", rows_of(x)) for x in trio])
    for shared in seen:
        assert shared.ids == (0, 1, 2, 3, 4, 5)
        assert shared.tensors["classifier"].tolist() == [[float(i)] * 4 for i in range(6)]
        assert shared.tensors["counts"].tolist() == [[i] * 3 for i in range(6)]
        assert shared.trust is None
    for x in trio:
        assert {(line[0], line[1]) for line in x.ledger.lines} == {  # type: ignore[attr-defined]
            (peer.name, "classifiers") for peer in x.plan.neighbours
        }


def test_who_is_late_is_taken_from_the_round_before_or_left_out(trio: list[GrpcExchange]) -> None:
    at_once([lambda x=x: x.share(1, "classifiers", rows_of(x)) for x in trio])
    for x in trio:
        x.report()  # a round is over: patience starts anew
    started = time.monotonic()
    seen = at_once([lambda x=x: x.share(2, "classifiers", rows_of(x, 2.0)) for x in trio[:2]])
    assert SOON.round * 0.9 < time.monotonic() - started < SOON.round + 3
    assert seen[0].ids == (0, 1, 2, 3, 4, 5)
    assert seen[0].trust.tolist() == [1, 1, 0.5, 1, 0.5, 0.5]  # three is one round behind
    assert seen[0].tensors["classifier"][:, 0].tolist() == [0, 2, 2, 6, 4, 5]
    assert trio[0].report().stale == {"three": 1}
    seen = at_once([lambda x=x: x.share(5, "classifiers", rows_of(x)) for x in trio[:2]])
    assert seen[0].ids == (0, 1, 3)  # now it is too far behind
    assert trio[0].report().missing == {"three": "late: it is in round 1"}


def test_a_round_before_one_that_was_taken_is_refused(trio: list[GrpcExchange]) -> None:
    """Three has shown round 3; then it answers with round 2, which is not too old in itself."""
    at_once([lambda x=x: x.share(3, "classifiers", rows_of(x)) for x in trio])
    trio[2]._mailbox._topics["classifiers"] = {2: trio[2]._mailbox._topics["classifiers"][3]}
    trio[0].report()
    assert trio[0].share(4, "classifiers", rows_of(trio[0])).ids == (0, 1, 3)
    assert trio[0].report().missing["three"] == "refused: replay"
    assert trio[0].tally.snapshot() == {"replay": 1}


def test_nobody_waits_for_a_round_that_a_peer_has_left_behind(trio: list[GrpcExchange]) -> None:
    """One is in round 4 and waits for two, two in round 3 and asks one for what it will never publish."""
    trio[0].enter(4)
    started = time.monotonic()
    seen = trio[1].share(3, "classifiers", rows_of(trio[1]))
    assert 0 not in seen.ids
    assert trio[1].report().missing["one"] == "late: it is in round 4"
    # It is three that was waited for, up to the deadline.
    assert time.monotonic() - started < SOON.round + 3


def test_who_has_no_accuracy_yet_counts_as_good_as_we_are(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1, 2)])
    with made[0], made[1]:
        rows = [rows_of(x) for x in made]
        rows[0]["accuracy"] = torch.tensor([0.75], dtype=torch.float64)
        seen = at_once([lambda k=k: made[k].share(1, "models", rows[k]) for k in range(2)])
        assert seen[0].tensors["accuracy"].tolist() == [0.75, 0.75, 0.75]
        assert "accuracy" not in seen[1].tensors
        assert not made[1].report().missing


def test_hello_says_who_is_missing(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1,), (2,)], deadlines=Deadlines(hello=4.0, round=0.5, transfer=1.0, linger=0.5))
    with made[0], made[1]:
        missing = at_once([lambda x=x: x.hello(1) for x in made[:2]])
        assert all(set(why) == {"three"} and "not reachable" in why["three"] for why in missing)
        with pytest.raises(FederationError, match=r"too few neighbours came .*three: not reachable"):
            made[0].hello(2)


def test_a_dead_neighbour_costs_less_every_round(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1,)], deadlines=Deadlines(hello=1, round=2.0, transfer=1.0, linger=0.5))
    with made[0] as one:
        waited = []
        for t in range(1, 6):
            started = time.monotonic()
            assert one.share(t, "models", rows_of(one)).ids == (0,)
            waited.append(time.monotonic() - started)
            assert "not reachable" in one.report().missing["two"]
        assert sum(waited[2:]) < 0.5 * 3 * 2.0  # by halves it is 0.5 + 0.25 + 0.2 at most, and a busy machine's delays
        assert waited[0] < 2.0 + 2.0


def test_an_address_in_use_is_told(keys: Path) -> None:
    made = peers_of(keys, [(0,), (1,)])
    with made[0]:
        twin = GrpcExchange(made[0].plan, made[0].identity, Pages(), LOG)
        with pytest.raises(FederationError, match="cannot listen on"), twin:
            pass


def test_a_state_that_lacks_a_part_is_not_collected(trio: list[GrpcExchange]) -> None:
    """Who catches up needs all of it; a neighbour that leaves a part out is as good as silent."""
    states = [{"classifier": torch.ones(len(x.plan.clients), 4)} for x in trio]
    for exchange, state in zip(trio[1:], (states[1], {}), strict=True):
        exchange.enter(3)
        exchange.publish(3, "state", state)
    assert set(trio[0].collect("state", states[0], 0)) == {"two"}
