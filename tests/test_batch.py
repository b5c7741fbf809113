"""Batches: every sample is the client's own and carries its own label; nobody is disturbed by company."""

from dataclasses import replace

import pytest
import torch
from helpers import draws_of, pixels, random, shards_of

from semidfl.cohort import Synthetic, take
from semidfl.data.augment import Augment
from semidfl.data.shards import Shards
from semidfl.draws import Draws
from semidfl.learn.batch import Batch, PseudoLabels, compose, draw_kept
from semidfl.learn.loss import (
    cross_entropy_by_source,
    entropy_and_distance,
    mean_cross_entropy,
    mean_cross_entropy_times_sources,
)

CLASSES = 4
AS_IS = Augment(0, False)
ONE_LABEL, MIXED, REJECTED, NOTHING, UNLABELLED = range(5)
LABELLED = [[17], [3, 40, 8], [], [], []]
UNLABELLED_LISTS = [[], [1, 2, 5, 30], [9, 10], [], [50, 51, 52, 53, 54, 55]]
KEPT = {MIXED: [0, 3], UNLABELLED: [1, 2, 5]}  # places in the lists above


def shards() -> Shards:
    """60 pictures, each filled with its own number, so that a sample tells where it came from."""
    images = torch.arange(60, dtype=torch.uint8).reshape(60, 1, 1, 1).expand(60, 1, 4, 4).contiguous()
    return shards_of(images, (torch.arange(60) * 7 + 1) % CLASSES, LABELLED, UNLABELLED_LISTS)


def pseudo() -> PseudoLabels:
    kept = torch.zeros(5, 6, dtype=torch.bool)
    for client, places in KEPT.items():
        kept[client, places] = True
    return PseudoLabels(random(1, 5, 6, CLASSES).softmax(2), kept)


def synthetic() -> Synthetic:
    """7 generated pictures a client, numbered from 100 on; MIXED has thrown away all, ONE_LABEL all but 2."""
    images = (100 + torch.arange(35, dtype=torch.uint8)).reshape(5, 7, 1, 1, 1).expand(5, 7, 1, 4, 4)
    kept = torch.ones(5, 7, dtype=torch.bool)
    kept[MIXED] = False
    kept[ONE_LABEL] = torch.tensor([False, False, True, False, False, True, False])
    labels = torch.arange(35).reshape(5, 7) % CLASSES
    return Synthetic(images, labels, kept, images[:, :1], labels[:, :1])


def batch_of(
    *, t: int = 1, steps: int = 30, size: int = 10, augment: Augment = AS_IS, rows=slice(None), **parts
) -> Batch:
    """What some of the five clients draw, if they have all sources or those given."""
    parts = {"shards": shards(), "draws": draws_of(5), "pseudo": pseudo(), "synthetic": synthetic()} | parts
    chunk = {name: x if isinstance(x, bool) else take(x, rows) for name, x in parts.items()}
    return compose(t, "classify", steps, size, augment, CLASSES, **chunk)


def one_hot(label: int) -> list[float]:
    return [float(c == label) for c in range(CLASSES)]


def own_samples(client: int, source: int) -> dict[int, list[float]]:
    """Number on the picture -> target of all that a client may draw from a source, from the lists above."""
    if source == 0:
        return {n: one_hot((n * 7 + 1) % CLASSES) for n in LABELLED[client]}
    if source == 1:
        places = KEPT.get(client, [])
        return {UNLABELLED_LISTS[client][p]: pseudo().targets[client, p].tolist() for p in places}
    made = synthetic()
    return {100 + 7 * client + p: one_hot(int(made.labels[client, p])) for p in range(7) if bool(made.kept[client, p])}


def test_every_sample_is_the_clients_own_and_carries_its_target() -> None:
    batch = batch_of()
    assert batch.steps == 30
    assert batch.images.dtype == torch.uint8
    assert batch.slots.tolist() == list(range(30))
    for client in range(5):
        for source in range(3):
            block = slice(10 * source, 10 * source + 10)
            allowed = own_samples(client, source)
            assert batch.valid[client, block].tolist() == [bool(allowed)] * 10
            if not allowed:
                continue
            numbers = batch.images[client, :, block, 0, 0, 0].flatten().tolist()
            targets = batch.targets[client, :, block].flatten(0, 1).tolist()
            assert set(numbers) == set(allowed)  # nothing else, and in 300 draws everything
            assert all(target == allowed[number] for number, target in zip(numbers, targets, strict=True))


def test_samples_of_a_source_are_drawn_equally_often() -> None:
    numbers = batch_of(steps=400).images[UNLABELLED, :, 10:20, 0, 0, 0].flatten().tolist()
    for n in own_samples(UNLABELLED, 1):
        assert numbers.count(n) / len(numbers) == pytest.approx(1 / 3, abs=0.03)


def test_weights_are_the_mean_over_what_a_client_has() -> None:
    parts = {"synthetic": None}
    weights = batch_of(**parts).weights()
    assert weights.shape == (5, 20)
    assert weights[ONE_LABEL].tolist() == pytest.approx([0.1] * 10 + [0.0] * 10)
    assert weights[MIXED].tolist() == pytest.approx([0.05] * 20)
    assert weights[UNLABELLED].tolist() == pytest.approx([0.0] * 10 + [0.1] * 10)
    assert not weights[[REJECTED, NOTHING]].any()  # all pseudo-labels rejected is as good as no data
    assert weights.sum(1).tolist() == pytest.approx([1, 1, 0, 0, 1])
    assert batch_of().weights().sum(1).tolist() == pytest.approx([1] * 5)


def test_pseudo_labels_weigh_as_far_as_they_are_trusted() -> None:
    trust = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.2])
    weights = batch_of(pseudo=replace(pseudo(), trust=trust)).weights()
    assert weights[MIXED].tolist() == pytest.approx([0.05] * 10 + [0.025] * 10 + [0.0] * 10)
    assert weights[UNLABELLED].tolist() == pytest.approx([0.0] * 10 + [0.01] * 10 + [0.05] * 10)


@pytest.mark.parametrize("made", [None, synthetic()], ids=["without generated", "with generated"])
def test_who_has_both_sources_takes_steps_of_both(made) -> None:
    batch = batch_of(synthetic=made)
    logits, targets = random(1, *batch.targets[:, 0].shape), batch.targets[:, 0]
    times = mean_cross_entropy_times_sources(logits, targets, batch) / mean_cross_entropy(logits, targets, batch)
    there = [ONE_LABEL, MIXED, UNLABELLED]
    assert times[there].tolist() == pytest.approx([1, 2, 1])
    if made is None:  # the loss of each source by itself, then the sum
        by_source = cross_entropy_by_source(logits, targets, batch)
        assert torch.allclose(mean_cross_entropy_times_sources(logits, targets, batch), by_source)


def test_one_label_fills_a_batch() -> None:
    batch = batch_of(rows=[ONE_LABEL], synthetic=None, pseudo=None)
    assert batch.images.shape == (1, 30, 10, 1, 4, 4)
    assert batch.images.unique().tolist() == [17]
    assert batch.weights().sum().item() == pytest.approx(1)


@pytest.mark.parametrize("rows", [[NOTHING], [NOTHING, REJECTED], slice(3, 4)])
def test_clients_without_anything_get_no_weight_and_no_error(rows) -> None:
    batch = batch_of(rows=rows, synthetic=None)
    assert batch.images.shape[:2] == (len(batch.valid), 30)
    assert not batch.weights().any()
    assert batch.chosen(random(1, len(batch.valid), 30, batch.capacity)).shape == batch.targets.shape[:3]


def test_sources_that_nobody_has_take_no_room() -> None:
    assert batch_of(rows=[UNLABELLED], synthetic=None).slots.tolist() == list(range(10, 20))
    assert batch_of(rows=[UNLABELLED]).slots.tolist() == list(range(10, 30))
    assert batch_of(rows=[ONE_LABEL]).slots.tolist() == [*range(10), *range(20, 30)]
    assert batch_of(pseudo=None).slots.tolist() == [*range(10), *range(20, 30)]


def test_doubled_pseudo_labels_stand_in_the_slots_of_generated_ones() -> None:
    batch = batch_of(doubled=True, synthetic=None)
    assert batch.slots.tolist() == list(range(30))
    assert batch.source.tolist() == [0] * 10 + [1] * 20
    for client in (MIXED, UNLABELLED):
        allowed = own_samples(client, 1)
        for block in (slice(10, 20), slice(20, 30)):
            numbers = batch.images[client, :, block, 0, 0, 0].flatten().tolist()
            targets = batch.targets[client, :, block].flatten(0, 1).tolist()
            assert set(numbers) == set(allowed)
            assert all(target == allowed[number] for number, target in zip(numbers, targets, strict=True))
        assert not torch.equal(batch.images[client, :, 10:20], batch.images[client, :, 20:])
    assert batch.valid[[ONE_LABEL, REJECTED, NOTHING], 10:].any().item() is False


def test_doubled_pseudo_labels_count_as_much_as_once() -> None:
    """The loss of two halves is the mean of theirs, whether sources are weighed together or by themselves."""
    trust = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.2])
    parts = {"synthetic": None, "pseudo": replace(pseudo(), trust=trust)}
    batch = batch_of(doubled=True, **parts)
    assert batch.weights()[MIXED].tolist() == pytest.approx([0.05] * 10 + [0.0125] * 20)
    assert batch.weights()[UNLABELLED].tolist() == pytest.approx([0.0] * 10 + [0.01] * 20)
    logits, targets = random(1, *batch.targets[:, 0].shape), batch.targets[:, 0]
    once = batch_of(**parts)
    for loss in (mean_cross_entropy, mean_cross_entropy_times_sources, cross_entropy_by_source, entropy_and_distance):
        halves = [loss(logits[:, some], targets[:, some], once) for some in HALVES]
        assert torch.allclose(loss(logits, targets, batch), (halves[0] + halves[1]) / 2)


HALVES = [list(range(20)), [*range(10), *range(20, 30)]]


def test_generated_samples_keep_their_slots() -> None:
    """Doubled or not, where there are some, or no pseudo-labels."""
    for parts in ({}, {"pseudo": None}, {"pseudo": None, "synthetic": None}):
        plain, doubled = batch_of(**parts), batch_of(doubled=True, **parts)
        assert torch.equal(plain.images, doubled.images)
        assert torch.equal(plain.weights(), doubled.weights())
        assert torch.equal(plain.source, doubled.source)


@pytest.mark.parametrize(
    ("made", "doubled"),
    [(None, False), (None, True), (synthetic(), False)],
    ids=["without generated", "doubled", "with generated"],
)
def test_a_client_draws_the_same_alone_and_in_company(made: Synthetic | None, doubled: bool) -> None:
    """Its valid slots hold the same pictures, augmented alike, and the same numbers are drawn for them."""
    pool = replace(shards(), images=pixels(3, 60, 1, 4, 4))
    parts = {"augment": Augment(2, True), "shards": pool, "synthetic": made, "doubled": doubled}
    company = batch_of(**parts)
    noise = random(1, 5, 30, company.capacity)
    for client in range(5):
        alone = batch_of(rows=[client], **parts)
        mine, theirs = alone.valid[0], company.valid[client]
        assert alone.slots[mine].tolist() == company.slots[theirs].tolist()
        assert torch.equal(alone.images[0][:, mine], company.images[client][:, theirs])
        assert torch.equal(alone.targets[0][:, mine], company.targets[client][:, theirs])
        chosen = alone.chosen(noise[[client]])[0][:, mine]
        assert torch.equal(chosen, noise[client][:, alone.slots[mine]])
        assert torch.equal(chosen, company.chosen(noise)[client][:, theirs])


def test_rounds_purposes_and_sources_are_drawn_apart() -> None:
    first = batch_of().images
    assert not torch.equal(first, batch_of(t=2).images)
    same_lists = shards_of(shards().images, shards().labels, [list(range(60))], [list(range(60))])
    everything = PseudoLabels(torch.ones(1, 60, CLASSES), torch.ones(1, 60, dtype=torch.bool))
    batch = batch_of(shards=same_lists, draws=draws_of(1), pseudo=everything, synthetic=None)
    assert not torch.equal(batch.images[:, :, :10], batch.images[:, :, 10:])


def test_a_chunk_of_small_clients_is_not_as_wide_as_the_largest() -> None:
    lists = shards().rows([ONE_LABEL, MIXED]).unlabelled
    assert lists.table.tolist() == [[0, 0, 0, 0], [1, 2, 5, 30]]
    assert lists.valid().tolist() == [[False] * 4, [True] * 4]
    assert lists.held == (0, 4)


def test_only_real_pictures_are_augmented() -> None:
    batch = batch_of(augment=Augment(3, False))
    assert (batch.images[MIXED, :, :20].flatten(2) == 0).any()
    assert not (batch.images[:, :, 20:] == 0).any()


def test_strong_augmentation_is_for_pseudo_labelled_pictures() -> None:
    def dark(pool, index, draws, t, purpose):
        return torch.zeros(*index.shape, *pool.shape[1:], dtype=torch.uint8)

    batch = batch_of(strong=dark)
    assert not batch.images[:, :, 10:20].any()
    assert torch.equal(batch.images[:, :, :10], batch_of().images[:, :, :10])
    assert torch.equal(batch.images[:, :, 20:], batch_of().images[:, :, 20:])


def test_draw_kept_draws_kept_places_only() -> None:
    kept = random(3, 40, 9) > 0.5
    kept[5], kept[6] = False, True
    places = draw_kept(kept, Draws.of([1] * 40, range(40), kept.device), 1, "x", 20, 10)
    assert places.shape == (40, 20, 10)
    for row, drawn in zip(kept.tolist(), places.flatten(1).tolist(), strict=True):
        if any(row):
            assert set(drawn) == {p for p, keep in enumerate(row) if keep}
