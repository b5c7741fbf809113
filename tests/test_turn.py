"""Images turned by quarters: drawn, turned and learnt from, against slow plain versions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CPU, draws_of, pixels
from small import tiny
from torch import Tensor
from torch.nn import functional as F

from semidfl.data.augment import Augment
from semidfl.data.dataset import Dataset
from semidfl.data.shards import Index, Shards
from semidfl.data.sources import load
from semidfl.errors import ConfigError
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, run, train
from semidfl.learn.batch import compose
from semidfl.learn.turn import QUARTERS, turn, turning_loss
from semidfl.record.checkpoint import load_model
from semidfl.record.log import RoundLog
from semidfl.use.deploy import Deployed
from semidfl.use.export import export
from semidfl.use.model import load_classifier

AS_THEY_ARE = Augment(0, False)


def shards() -> Shards:
    """Three clients: two labelled and three unlabelled images, four labelled ones, one unlabelled."""
    labelled = [np.array(x, dtype=np.int64) for x in ([0, 1], [2, 3, 4, 5], [])]
    unlabelled = [np.array(x, dtype=np.int64) for x in ([6, 7, 8], [], [9])]
    return Shards(pixels(0, 10, 3, 6, 6), torch.zeros(10).long(), Index.of(labelled, CPU), Index.of(unlabelled, CPU))


def test_images_are_turned_as_said_and_are_the_clients_own() -> None:
    held = shards()
    found = turn(5, 40, 6, AS_THEY_ARE, held, draws_of(3))
    assert found.images.shape == (3, 40, 6, 3, 6, 6)
    owned = [{0, 1, 6, 7, 8}, {2, 3, 4, 5}, {9}]
    for client, own in enumerate(owned):
        seen = set()
        for image, quarters in zip(found.images[client].flatten(0, 1), found.quarters[client].flatten(), strict=True):
            back = np.rot90(image.numpy(), -int(quarters), (1, 2))
            (which,) = [k for k in range(10) if np.array_equal(held.images[k].numpy(), back)]
            seen.add(which)
        assert seen == own  # all of them in 240 draws, labelled or not
    counts = torch.bincount(found.quarters.flatten(), minlength=QUARTERS)
    assert len(counts) == QUARTERS
    assert counts.min() > 140  # of 720


def test_of_a_pool_each_image_stands_for_several() -> None:
    """Two labelled images beside twenty others, of which five are looked at: an eleventh is labelled, not 2 of 7."""
    labelled, unlabelled = (Index.of([np.arange(a, b)], CPU) for a, b in ((0, 2), (2, 22)))
    held, draws = Shards(pixels(0, 22, 1, 4, 4), torch.zeros(22).long(), labelled, unlabelled), draws_of(1)
    seen = unlabelled.some(3, draws, 5)
    found = turn(3, 100, 20, AS_THEY_ARE, Shards(held.images, held.labels, labelled, seen), draws)
    drawn = []
    for image, quarters in zip(found.images.flatten(0, 2), found.quarters.flatten(), strict=True):
        back = np.rot90(image.numpy(), -int(quarters), (1, 2))
        drawn += [k for k in range(22) if np.array_equal(held.images[k].numpy(), back)]
    assert set(drawn) == {0, 1, *seen.table[0].tolist()}
    counts = np.bincount(drawn, minlength=22)
    assert counts[:2].sum() == pytest.approx(2000 / 11, rel=0.2)
    assert counts[seen.table[0]].min() > 0.8 * 2000 * 10 / 11 / 5


def test_who_holds_no_image_learns_nothing() -> None:
    config = tiny(method="dfl-lb", classifier__turns=1.0)
    method, cohort = prepare(config, load("digits"))
    before, held = cohort.classifier.params.clone(), cohort.shards
    lists = [
        [x[i, :n].numpy() for i, n in enumerate(k)]
        for x, k in ((held.labelled.table, held.labelled.held), (held.unlabelled.table, (*held.unlabelled.held[:3], 0)))
    ]
    cohort.shards = Shards(held.images, held.labels, *(Index.of(x, CPU) for x in lists))
    method.train_classifier(1, cohort, None, log := RoundLog(1, CPU))
    changed = (cohort.classifier.params != before).any(1).tolist()
    assert changed == [True, True, True, False]
    assert float(log.figures["loss"][3]) == 0.0


def test_draws_are_the_same_in_any_company_and_others_in_every_round() -> None:
    held, draws = shards(), draws_of(3)
    together = turn(5, 4, 6, Augment(2, True), held, draws)
    for client in range(3):
        alone = turn(5, 4, 6, Augment(2, True), held.rows([client]), draws.rows([client]))
        assert torch.equal(alone.images[0], together.images[client])
        assert torch.equal(alone.quarters[0], together.quarters[client])
    assert not torch.equal(turn(6, 4, 6, Augment(2, True), held, draws).quarters, together.quarters)


def test_the_loss_is_the_mean_of_each_client() -> None:
    logits, quarters = torch.randn(3, 5, QUARTERS, generator=torch.Generator().manual_seed(0)), torch.arange(15) % 4
    found = turning_loss(logits, quarters.view(3, 5))
    for client in range(3):
        assert found[client] == pytest.approx(float(F.cross_entropy(logits[client], quarters.view(3, 5)[client])))


def test_a_step_adds_the_turned_images_to_the_batch() -> None:
    """One step of SGD without momentum: the gradient of the sum of both losses, each from the plain network."""
    changes = {"classifier__iterations": 1, "classifier__momentum": 0.0, "classifier__turns": 0.7, "compute__chunk": 2}
    method, cohort = prepare(tiny(method="dfl-lb", **changes), load("digits"))
    setup, start = method.setup, cohort.classifier.params.clone()
    c, network = setup.config.classifier, setup.classifier
    batch = compose(1, "classify", 1, c.batch, setup.augment, 10, cohort.shards, cohort.draws, None, None)
    turned = turn(1, 1, c.batch, setup.augment, cohort.shards, cohort.draws)
    method.train_classifier(1, cohort, None, log := RoundLog(1, CPU))
    for client, labels in enumerate(cohort.shards.labelled.held):
        params = start[client : client + 1].clone().requires_grad_()

        def logits(images: Tensor, params: Tensor = params, client: int = client) -> Tensor:
            return network(params, setup.space.normalise(images[client : client + 1, 0]), whole=True)[0]

        loss = 0.7 * F.cross_entropy(logits(turned.images)[:, 10:], turned.quarters[client, 0])
        if labels:
            loss = loss + F.cross_entropy(logits(batch.images)[:, :10], batch.targets[client, 0])
        (grad,) = torch.autograd.grad(loss, params)
        expected = start[client] - c.lr * grad[0]
        torch.testing.assert_close(cohort.classifier.params[client], expected, atol=1e-6, rtol=1e-4)
        assert float(log.figures["loss"][client]) == pytest.approx(loss.item(), rel=1e-4)
        assert grad.any()  # who has no labels learns, too
    assert 0 in cohort.shards.labelled.held


def test_they_fade_as_the_rate_does() -> None:
    """In round 3 of 4 of a cosine, both the rate and the weight of turned images are a half of what they were."""
    changes = {"classifier__iterations": 1, "classifier__momentum": 0.0, "compute__chunk": 2, "rounds": 4}
    steps = {}
    for schedule, turns, rate in (("cosine", 0.8, 0.02), ("constant", 0.4, 0.01)):
        fields = changes | {"classifier__schedule": schedule, "classifier__turns": turns, "classifier__lr": rate}
        method, cohort = prepare(tiny(method="dfl-lb", **fields), load("digits"))
        method.train_classifier(3, cohort, None, RoundLog(3, CPU))
        steps[schedule] = cohort.classifier.params
    torch.testing.assert_close(steps["cosine"], steps["constant"], atol=1e-7, rtol=1e-6)


def test_others_see_the_classes_alone(tmp_path: Path) -> None:
    """Tests, pseudo-labels and exported models: four outputs more are nobody's business but training's."""
    config = tiny(rounds=2, classifier__turns=1.0)
    run(config, tmp_path / "run")
    model = load_classifier(tmp_path / "run")
    images = torch.from_numpy(load("digits").test_images[:6])
    network = model.classifier
    whole = network(model.params, model.space.normalise(images)[None], whole=True)
    assert whole.shape == (1, 6, 10 + QUARTERS)
    answers = network(model.params, model.space.normalise(images)[None])
    assert torch.equal(answers, whole[..., :10])
    torch.testing.assert_close(Deployed(model)(images), answers[0].softmax(1))
    assert export(model, "safetensors", tmp_path / "one.safetensors") < 1e-6
    tensors, _ = load_model(tmp_path / "one.safetensors")
    assert (tensors["out.weight"].shape, tensors["out.bias"].shape) == ((10, 50), (10,))
    assert torch.equal(tensors["out.bias"], network.named(model.params)["out.bias"][0, :10])


def test_it_learns_to_tell_turns() -> None:
    config = tiny(method="dfl-lb", rounds=30, classifier__turns=1.0, classifier__iterations=10)
    method, cohort = prepare(config, load("digits"))
    losses = [r["loss"] for r in train(config, method, cohort, MemoryExchange(cohort.ids))]
    without = [i for i, n in enumerate(cohort.shards.labelled.held) if not n]
    first, last = (np.mean([row[i] for i in without]) for row in (losses[0], losses[-1]))
    assert first == pytest.approx(np.log(QUARTERS), rel=0.05)
    assert last < 0.6 * first


def test_only_square_images_can_be_turned() -> None:
    wide = load("digits")
    wide = Dataset(**vars(wide) | {name: vars(wide)[name][..., :6] for name in ("train_images", "test_images")})
    with pytest.raises(ConfigError, match=r"classifier\.turns is for square images, not 8x6"):
        prepare(tiny(classifier__turns=1.0), wide)
