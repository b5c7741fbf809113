"""Alignment with the network's class shares, which all find by gossip."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from semidfl.config import GraphConfig
from semidfl.exchange.base import Neighbourhood, Shared
from semidfl.exchange.codec import Spec, decode_body, encode_body
from semidfl.learn.align import Shares, aligned, averaging, gossip_weights, summed
from semidfl.topology import Topology, build

CPU = torch.device("cpu")


def test_alignment_against_a_plain_loop() -> None:
    p = torch.rand(2, 3, 4).softmax(2)
    tilt = torch.tensor([[1.0, 2.0, 0.5, 1.0], [3.0, 1.0, 1.0, 0.1]])
    found = aligned(p, tilt.log())
    for c in range(2):
        for n in range(3):
            raised = [float(p[c, n, k]) * float(tilt[c, k]) for k in range(4)]
            assert found[c, n].tolist() == pytest.approx([x / sum(raised) for x in raised], rel=1e-5)


def test_sums_leave_padding_out() -> None:
    p = torch.rand(2, 5, 3)
    valid = torch.tensor([[True, True, False, False, False], [False] * 5])
    found = summed(p, valid)
    torch.testing.assert_close(found[0], p[0, :2].sum(0))
    assert found[1].tolist() == [0, 0, 0]


# --- alignment by gossip, of predictions that do not change ----------------------------------------------------------


@dataclass
class Network:
    """Clients of a graph, each class dealt to them by a Dirichlet draw; the classifiers are nearly always right."""

    graph: Topology
    truth: torch.Tensor  # (C, n)
    valid: torch.Tensor
    p: torch.Tensor  # (C, n, K)
    labels: torch.Tensor  # (C, K), all at the first client
    prior: float

    @classmethod
    def of(
        cls, topology: str, alpha: float, shares: list[float], labels: int, prior: float, merged: bool = False
    ) -> "Network":
        graph, random = build(GraphConfig(topology), 0), np.random.RandomState(1)
        clients, classes = graph.clients, len(shares)
        truth = np.repeat(np.arange(classes), [round(3000 * share) for share in shares])
        deal = random.dirichlet([alpha] * clients, classes)
        owner = np.array([random.choice(clients, p=deal[k]) for k in truth])
        rows = [torch.from_numpy(truth[owner == i]) for i in range(clients)]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        valid = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        logits = torch.randn(*padded.shape, classes, generator=torch.Generator().manual_seed(0))
        logits += 5 * F.one_hot(padded, classes)
        if merged:  # the second class is taken for the first, but less surely than the first itself
            logits[..., 0] = torch.where(padded == 1, logits[..., 1] + 2, logits[..., 0])
        counts = torch.zeros(clients, classes)
        counts[0] = torch.tensor([labels * share for share in shares])
        return cls(graph, padded, valid, logits.softmax(2), counts, prior)

    def align(
        self, rounds: int = 300, lost: float = 0.0, restarts: tuple[int, ...] = (), liar: bool = False, **rule: bool
    ) -> Shares:
        everyone, random = tuple(range(self.graph.clients)), np.random.RandomState(2)
        shares = Shares.start(self.labels)
        for t in range(rounds):
            own = summed(aligned(self.p, shares.tilt), self.valid)
            said = {name: x.clone() for name, x in shares.public().items()}
            if liar:  # client 5 says that all labels are of the last class
                said["labelled"][5], said["labelled"][5, -1] = 0.0, 1e9
            met = []
            for i in everyone:  # each hears from whom it hears, and always itself
                heard = tuple(j for j in everyone if j == i or random.rand() >= lost)
                seen = Shared(heard, {name: x[list(heard)] for name, x in said.items()})
                met.append(shares.rows([i]).averaged(seen.tensors, averaging(self.graph, (i,), seen, CPU, **rule)))
            shares = Shares(*(torch.cat(rows) for rows in zip(*(vars(s).values() for s in met), strict=True)))
            shares = shares.renewed(own, self.labels)
            shares = replace(shares, tilt=shares.raised(self.graph.clients, self.prior))
            if t in restarts:  # client 3 comes back with nothing
                anew = Shares.start(self.labels)
                parts = [(getattr(shares, f), getattr(anew, f)) for f in vars(shares)]
                shares = Shares(*(torch.cat([x[:3], y[3:4], x[4:]]) for x, y in parts))
        return shares

    def right(self, tilt: torch.Tensor) -> float:
        return float(((aligned(self.p, tilt).argmax(2) == self.truth) & self.valid).sum() / self.valid.sum())


EVEN = [0.1] * 10


@pytest.mark.parametrize("topology", ["fig1", "ring", "star"])
def test_skewed_clients_keep_what_was_right(topology: str) -> None:
    """Classes are even in the network and skewed at each client, and 60 labels lie at one: nothing is to be raised."""
    network = Network.of(topology, 0.1, EVEN, 60, prior=200.0)
    shares = network.align()
    before = network.right(torch.zeros(10, 10))
    assert before > 0.99
    assert network.right(shares.tilt) > before - 0.005
    total = shares.labelled.sum(0)  # no client's labels count twice, on no graph
    torch.testing.assert_close(total, network.labels.sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("alpha", [100.0, 0.1])
def test_alignment_parts_classes_that_were_seen_as_one(alpha: float) -> None:
    network = Network.of("fig1", alpha, EVEN, 60, prior=200.0, merged=True)
    assert network.right(torch.zeros(10, 10)) < 0.91
    assert network.right(network.align().tilt) > 0.97


@pytest.mark.parametrize("labels", [40, 200])
def test_rare_classes_are_not_made_frequent_by_few_labels(labels: int) -> None:
    network = Network.of("fig1", 100.0, [0.95, 0.05], labels, prior=1.0)
    tilt = network.align().tilt
    ill = aligned(network.p, tilt)[..., 1] > 0.95
    assert (network.truth[ill & network.valid] == 1).float().mean() > 0.97
    assert network.right(tilt) > 0.99
    sure_of_even = replace(network, prior=200.0)  # what the prior is for, and what it does where it is wrong
    assert sure_of_even.right(sure_of_even.align().tilt) < 0.97


def test_estimates_follow_at_once() -> None:
    """Over all clients they sum to the predictions of the round: factors that learn of them late would swing."""
    network = Network.of("fig1", 0.1, EVEN, 60, prior=200.0)
    for rounds in range(1, 4):  # the tilt moves, and with it the aligned predictions
        shares, now = network.align(rounds), summed(aligned(network.p, network.align(rounds - 1).tilt), network.valid)
        torch.testing.assert_close(shares.predicted.sum(0), now.sum(0))
    assert not torch.equal(shares.told, network.align(1).told)


def test_neighbours_take_what_a_client_sends_whose_predictions_turn() -> None:
    """It takes out of its estimate more of a class than is left there; the sum over all clients stays right."""
    start, labels = Shares.start(torch.zeros(1, 2)), torch.zeros(1, 2)
    before = start.renewed(torch.tensor([[100.0, 0.0]]), labels)
    spread = replace(before, predicted=torch.tensor([[10.0, 10.0]]))  # after some rounds of gossip
    sent = spread.renewed(torch.tensor([[0.0, 100.0]]), labels).public()
    assert sent["predicted"][0, 0] < 0
    body = encode_body(sent)
    found = decode_body(bytearray(body.data), body.digest, Spec.of(start.public(), {}), 1)
    assert torch.equal(found["predicted"], sent["predicted"])


@pytest.mark.parametrize("trouble", [{"lost": 0.13}, {"restarts": (60, 120, 200)}])
def test_alignment_gets_over_lost_messages_and_restarts(trouble: dict) -> None:
    network = Network.of("fig1", 0.1, EVEN, 60, prior=200.0)
    before = network.right(torch.zeros(10, 10))
    assert network.right(network.align(**trouble).tilt) > before - 0.005


def test_one_liar_decides_unless_the_median_is_taken() -> None:
    network = Network.of("fig1", 0.1, EVEN, 60, prior=200.0)
    assert network.right(network.align(100, liar=True).tilt) < 0.8
    assert network.right(network.align(100, liar=True, robust=True).tilt) > 0.95  # medians of skewed shares are rough


def test_what_is_out_of_date_counts_less() -> None:
    graph, everyone = build(GraphConfig("full", 3), 0), (0, 1, 2)
    values = torch.tensor([[0.0], [3.0], [6.0]])
    fresh, old = (
        averaging(graph, everyone, Shared(everyone, {}, trust), CPU) for trust in (None, torch.tensor([1, 1, 0.5]))
    )
    assert fresh(values, values).tolist() == [pytest.approx([3.0])] * 3
    assert old(values, values).flatten().tolist() == pytest.approx([2.0, 1 + 1 + 0.5, 3 / 3 + 6 * (0.5 / 3 + 0.5 / 3)])


def test_gossip_weights_are_alike_in_both_directions() -> None:
    graph = build(GraphConfig("star"), 0)
    everyone = tuple(range(10))
    weights = gossip_weights(graph, everyone, everyone, CPU)
    near = Neighbourhood.of(graph, everyone, everyone, CPU)
    dense = torch.zeros(10, 10, dtype=torch.float64).scatter_add_(1, near.index, weights)
    assert torch.equal(dense, dense.T)
    assert (dense.sum(1) <= 1 + 1e-12).all()
    assert dense[0, 5] == dense[5, 0] == 1 / 10
    some = gossip_weights(graph, everyone, (0, 2, 3), CPU)  # those who did not answer are left out
    assert some.shape == (10, 3)
    assert some[2].tolist() == [1 / 10, 1 / 2, 0.0]


def test_a_class_without_labels_or_predictions_stays_finite() -> None:
    nothing = torch.zeros(1, 3)
    shares = Shares(torch.tensor([[1.0, 0.0, 0.0]]), nothing, nothing, nothing)
    for _ in range(200):
        shares = replace(shares, tilt=shares.raised(5, 50.0))
    assert torch.isfinite(shares.tilt).all()
    assert shares.tilt.abs().max() <= 4.6
    assert shares.tilt[0, 0] < shares.tilt[0, 1] == shares.tilt[0, 2]
    assert Shares.start(nothing).raised(5, 1.0).tolist() == [pytest.approx([0, 0, 0], abs=1e-6)]
