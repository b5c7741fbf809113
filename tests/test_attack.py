"""Simulated attackers: who they are, what they send, and that the honest send what they always did."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import semidfl
from semidfl.config import Config, override
from semidfl.data.partition import partition
from semidfl.data.sources import load
from semidfl.errors import ConfigError
from semidfl.exchange.attack import Hostile, hostile, mislabelled
from semidfl.exchange.base import Neighbourhood
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare
from semidfl.learn.aggregate import adaptive_weights
from semidfl.topology import build
from tests.helpers import random
from tests.test_rounds import rounds_of, ten


def attackers(**values: Any) -> tuple[int, ...]:
    config = override(Config(), {"attack.kind": "noise"} | {f"attack.{name}": value for name, value in values.items()})
    return hostile(config, build(config.graph, config.seed))


def told(kind: str, **values: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What four clients mean and what the others hear, with client 12, in the second row, lying."""
    config = override(Config(), {"attack.kind": kind} | {f"attack.{name}": value for name, value in values.items()})
    own = (10, 12, 3, 7)
    truth = {"classifier": random(1, 4, 50), "accuracy": torch.full((4,), 0.3), "counts": torch.arange(4)[:, None]}
    truth["taught"] = torch.ones(4)
    return truth, Hostile.around(MemoryExchange(own), config, own, [12, 99]).share(3, "models", truth).tensors


def test_nobody_attacks_unless_asked() -> None:
    assert attackers(kind="none") == ()


def test_attackers_are_named_or_drawn() -> None:
    assert attackers(who="7, 3") == (3, 7)
    drawn = {hostile(override(Config(), {"attack.kind": "noise", "attack.count": 3, "seed": s}), GRAPH) for s in SEEDS}
    assert all(len(ids) == 3 == len(set(ids)) and list(ids) == sorted(ids) for ids in drawn)
    assert len(drawn) > 10  # it is a draw
    assert {i for ids in drawn for i in ids} == set(range(10))


GRAPH, SEEDS = build(Config().graph, 0), range(40)


def test_labels_are_flipped_by_those_who_have_some() -> None:
    for seed in SEEDS:
        config = override(Config(), {"attack.kind": "label-flip", "attack.count": 2, "seed": seed})
        assert set(hostile(config, GRAPH)) <= {0, 1, 2, 3}
    config = override(Config(), {"attack.kind": "label-flip", "attack.who": "8"})
    assert hostile(config, GRAPH, all_labelled=True) == (8,)
    with pytest.raises(ConfigError, match=r"attack\.who = '8' is not legal: client 8 has no labels to flip"):
        hostile(config, GRAPH)


@pytest.mark.parametrize("who", ["10", "-1", "a", "1,,2", "1;2", "²", "1.5", "9" * 5000])
def test_ids_that_do_not_exist_are_refused(who: str) -> None:
    with pytest.raises(ConfigError, match=r"attack\.who = .* is not legal: ids from 0 to 9, parted by commas"):
        attackers(who=who)


def test_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attack\.count = 11 is not legal: only 10 clients could attack so"):
        attackers(count=11)
    with pytest.raises(ConfigError, match="leaves no client honest"):
        attackers(count=10)
    with pytest.raises(ConfigError, match=r"attack\.count = 5 is not legal: only 4 clients"):
        attackers(kind="label-flip", count=5)


def test_a_turned_model() -> None:
    truth, heard = told("sign-flip", strength=2.5)
    assert torch.equal(heard["classifier"][1], -2.5 * truth["classifier"][1])
    assert heard["accuracy"].tolist() == pytest.approx([0.3, 1.0, 0.3, 0.3])
    assert heard["taught"].tolist() == [1.0, 2.0, 1.0, 1.0]


def test_noise_has_its_size_and_changes_with_the_round() -> None:
    truth, heard = told("noise", strength=3.0)
    noise = heard["classifier"][1] - truth["classifier"][1]
    size = float(noise.norm() / truth["classifier"][1].norm())
    assert 2 < size < 4
    config = override(Config(), {"attack.kind": "noise"})
    exchange = Hostile(MemoryExchange([0, 1]), config, [0, 1], [1])
    model = {"classifier": random(1, 2, 50)}
    sent = [exchange.share(t, topic, model).tensors["classifier"][1] for t in (1, 2) for topic in ("models", "other")]
    assert len({tuple(x.tolist()) for x in sent}) == 4
    assert torch.equal(exchange.share(1, "models", model).tensors["classifier"][1], sent[0])


def test_nan() -> None:
    _, heard = told("nan")
    assert heard["classifier"][1].isnan().all()


@pytest.mark.parametrize("kind", ["sign-flip", "noise", "nan"])
def test_the_honest_and_what_is_no_model_stay_as_they_are(kind: str) -> None:
    truth, heard = told(kind)
    honest = [0, 2, 3]
    assert torch.equal(heard["classifier"][honest], truth["classifier"][honest])
    assert torch.equal(truth["classifier"], random(1, 4, 50))  # the attacker itself goes on with its own model
    assert torch.equal(heard["counts"], truth["counts"])


def test_without_a_liar_here_the_exchange_is_as_it_was() -> None:
    inner = MemoryExchange([0, 1])
    assert Hostile.around(inner, override(Config(), {"attack.kind": "noise"}), [0, 1], [5]) is inner
    assert Hostile.around(inner, override(Config(), {"attack.kind": "label-flip"}), [0, 1], [0]) is inner


def test_flipped_labels_touch_nobody_else() -> None:
    config, data = ten(data__ratio=0.2), load("digits")
    with pytest.warns(UserWarning, match="drawn with replacement"):  # so few labels that a liar shares one
        split = partition(data.train_labels, "LLMMUUUUUU", config.data.ratio, config.data.alpha, config.seed)
    assert set(split.labelled[1]) & set(split.labelled[2])
    flipped, after = mislabelled(data, split, [1, 3])
    for client, (old, new) in enumerate(zip(split.labelled, after.labelled, strict=True)):
        assert np.array_equal(data.train_images[old], flipped.train_images[new])
        expected = 9 - data.train_labels[old] if client in (1, 3) else data.train_labels[old]
        assert np.array_equal(flipped.train_labels[new], expected)
    assert after.unlabelled is split.unlabelled
    assert np.array_equal(flipped.train_labels[: len(data.train_labels)], data.train_labels)


def test_the_pool_is_as_long_wherever_the_attackers_are() -> None:
    """Else what two parts of a network remember of their samples could not be put together."""
    config, data = ten(attack__kind="label-flip", attack__who="1,3"), load("digits")
    pools = [prepare(config, data, clients)[1].shards.labels for clients in ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9])]
    assert all(torch.equal(pool, pools[0]) for pool in pools)


def test_a_run_trains_on_flipped_labels_and_says_who_did() -> None:
    """A client alone with its labels learns to call 0 a 9."""
    values = {"method": "dfl-ub", "graph__topology": "line", "graph__clients": 2, "graph__roles": "LL", "rounds": 1}
    values |= {"classifier__iterations": 200, "classifier__lr": 0.03, "attack__kind": "label-flip", "attack__who": "0"}
    method, cohort, _ = rounds_of(ten(**values, aggregation__robust="clip", aggregation__clip=1e-6))
    setup = method.setup
    images = setup.space.normalise(setup.test_images.expand(2, -1, -1, -1, -1))
    guess, truth = setup.classifier(cohort.classifier.params, images).argmax(2), setup.test_labels[0]
    assert (guess[0] == 9 - truth).float().mean() > 0.7
    assert (guess[1] == truth).float().mean() > 0.7


def test_the_result_has_the_honest_apart(tmp_path: Path, capsys: Any) -> None:
    config = ten(rounds=2, attack__kind="sign-flip", attack__who="2,4", attack__strength=3.0)
    summary = semidfl.run(config, tmp_path / "run").summary
    honest = [x for i, x in enumerate(summary["per_client"]) if i not in (2, 4)]
    assert summary["attackers"] == [2, 4]
    assert summary["honest_accuracy"] == pytest.approx(sum(honest) / 8)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["attackers"] == [2, 4]
    assert "attackers" not in semidfl.run(ten(rounds=1), tmp_path / "other").summary


def test_a_claim_of_more_than_all_counts_as_all() -> None:
    """Eq. 12 with an accuracy of a million would give the liar all the weight, with NaN nobody any."""
    method, _ = prepare(ten(), load("digits"))
    near = Neighbourhood.of(method.setup.graph, [0], [0, 2, 6, 7, 8], torch.device("cpu"))
    claims = torch.tensor([0.5, 1e6, float("nan"), float("-inf"), 1.0], dtype=torch.float64)
    honest = torch.tensor([0.5, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert torch.equal(method.weights(near, claims), adaptive_weights(honest, near))
