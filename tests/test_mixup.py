"""MixUp against a plain loop; who is blended with whom."""

import pytest
import torch
from helpers import assert_close, draws_of, random
from hypothesis import given
from hypothesis import strategies as st

from semidfl.learn.mixup import mixup, partners

masks = st.integers(1, 9).flatmap(
    lambda slots: st.lists(st.lists(st.booleans(), min_size=slots, max_size=slots), min_size=1, max_size=4)
)


@given(masks, st.integers(1, 100))
def test_partners_permute_the_valid_slots_among_themselves(mask: list[list[bool]], t: int) -> None:
    valid = torch.tensor(mask)
    partner = partners(draws_of(len(mask)).bits(t, "partner", 3, valid.shape[1]), valid)
    for client, row in enumerate(mask):
        for step in range(3):
            pairs = list(enumerate(partner[client, step].tolist()))
            assert sorted(n for _, n in pairs) == list(range(len(row)))
            assert all(row[m] == row[n] for m, n in pairs)


def test_partners_do_not_depend_on_slots_without_a_sample() -> None:
    """A client alone has only its own slots; among others it has theirs, too, without weight."""
    bits = draws_of(1).bits(1, "partner", 5, 12)
    has = torch.tensor([[True] * 4 + [False] * 4 + [True] * 4])
    wide = partners(bits, has)
    slots = has[0].nonzero()[:, 0]
    narrow = partners(bits[:, :, slots], has[:, slots])
    assert torch.equal(wide[:, :, slots], slots[narrow])


def test_every_pair_occurs() -> None:
    partner = partners(draws_of(1).bits(1, "partner", 3000, 4), torch.ones(1, 4, dtype=torch.bool))[0]
    for m in range(4):
        share = torch.bincount(partner[:, m], minlength=4) / 3000
        assert (share - 0.25).abs().max().item() < 0.04


def test_mixup_is_the_blend_of_two_samples() -> None:
    images, targets = random(1, 2, 3, 4, 1, 5, 5), random(2, 2, 3, 4, 10).softmax(3)
    share = torch.tensor([[0.1, 0.5, 0.9], [0.0, 1.0, 0.3]])
    partner = torch.tensor([[[1, 0, 3, 2], [0, 1, 2, 3], [3, 2, 1, 0]], [[2, 3, 0, 1], [1, 2, 3, 0], [3, 0, 1, 2]]])
    x, y = mixup(images, targets, share, partner)
    for c in range(2):
        for e in range(3):
            lam = max(share[c, e].item(), 1 - share[c, e].item())  # the sample itself keeps the larger part
            for m in range(4):
                n = partner[c, e, m]
                assert_close(x[c, e, m], lam * images[c, e, m] + (1 - lam) * images[c, e, n])
                assert_close(y[c, e, m], lam * targets[c, e, m] + (1 - lam) * targets[c, e, n])
    assert y.sum(3).tolist() == pytest.approx(torch.ones(2, 3, 4))


@given(st.floats(0, 1, width=32))
def test_the_larger_part_is_the_samples_own(share: float) -> None:
    own, other = torch.zeros(1, 1, 2, 1), torch.tensor([[[[1.0], [0.0]]]])
    _, y = mixup(own, other, torch.tensor([[share]]), torch.tensor([[[1, 0]]]))
    assert 0.5 <= y[0, 0, 0, 0].item() <= 1
    assert y[0, 0, 0, 0].item() == pytest.approx(max(share, 1 - share))
