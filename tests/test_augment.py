"""Weak augmentation against padding, cropping and flipping pixel by pixel."""

from collections import Counter

import pytest
import torch
from helpers import draws_of, pixels, plain_augment
from scipy import stats

from semidfl.data.augment import Augment


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("pad", "height", "width"), [(2, 5, 7), (4, 3, 3), (0, 4, 6)])
def test_every_picture_is_padded_cropped_and_flipped_by_its_own_draw(
    pad: int, height: int, width: int, flip: bool
) -> None:
    pool = pixels(1, 6, 2, height, width)
    index = torch.tensor([[[0, 1, 2, 0], [5, 5, 5, 3]], [[4, 4, 4, 4], [2, 1, 0, 3]]])  # (C, E, S)
    draws = draws_of(2)
    images = Augment(pad, flip)(pool, index, draws, 3, "x")
    assert images.dtype == torch.uint8
    assert images.shape == (2, 2, 4, 2, height, width)
    down, right = (draws.below(3, f"x {way}", 2 * pad + 1, 2, 4) - pad for way in ("down", "right"))
    mirror = draws.below(3, "x mirror", 2, 2, 4)
    for c, e, s in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(4)).tolist():
        move = (pad, int(down[c, e, s]), int(right[c, e, s]), bool(flip and mirror[c, e, s]))
        assert torch.equal(images[c, e, s], plain_augment(pool[index[c, e, s]], *move))


def test_without_padding_and_flips_nothing_changes() -> None:
    pool, index = pixels(1, 9, 3, 6, 5), torch.arange(8).reshape(2, 4) + 1
    assert torch.equal(Augment(0, False)(pool, index, draws_of(2), 1, "x"), pool[index])


def test_all_shifts_and_flips_are_as_likely() -> None:
    """The marked pixel of a 3x3 picture tells where it went: 9 shifts, and in the middle row flips look alike."""
    pool = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    pool[0, 0, 1, 1] = 1
    images = Augment(1, True)(pool, torch.zeros(2, 9000, dtype=torch.int64), draws_of(2), 1, "x")
    for row in images:
        places = Counter(row.flatten(1).argmax(1).tolist())
        assert stats.chisquare([places[k] for k in range(9)]).pvalue > 0.001
    pool[0, 0] = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    flipped = Augment(0, True)(pool, torch.zeros(1, 4000, dtype=torch.int64), draws_of(1), 1, "x")[0, :, 0, 0, 2]
    assert abs(flipped.float().mean().item() - 0.5) < 0.03


def test_shifts_flips_rounds_and_purposes_are_drawn_apart() -> None:
    """With one draw for both ways a picture would only move along the diagonal."""
    pool, index = pixels(1, 1, 1, 6, 6), torch.zeros(1, 200, dtype=torch.int64)
    augment, draws = Augment(2, True), draws_of(1)
    images = augment(pool, index, draws, 1, "x")
    assert len({tuple(x.flatten().tolist()) for x in images[0]}) > 40  # of 5 x 5 x 2
    assert not torch.equal(images, augment(pool, index, draws, 2, "x"))
    assert not torch.equal(images, augment(pool, index, draws, 1, "y"))
