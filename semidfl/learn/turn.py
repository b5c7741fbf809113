"""Images turned by quarters, and by how many (Gidaris et al. 2018, arXiv:1803.07728).

To tell that, a network must see what is in an image, and nobody has to label it: a client without labels, and
before the first pseudo-label, learns what its images look like.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.data.augment import Augmentation
from semidfl.data.shards import Shards
from semidfl.draws import Draws

__all__ = ["QUARTERS", "Turned", "turn", "turning_loss"]

QUARTERS = 4


@dataclass(frozen=True)
class Turned:
    """E batches of B images a client."""

    images: Tensor  # (C, E, B, ch, H, W) uint8, square
    quarters: Tensor  # (C, E, B) by which they were turned
    there: Tensor  # (C,) bool: whether the client holds any image


def turn(t: int, steps: int, size: int, augment: Augmentation, shards: Shards, draws: Draws) -> Turned:
    """Draws among all that a client holds, labelled or not, with replacement.

    Of the unlabelled ones, only those looked at in this round are seen; they stand for the others, too.
    """
    labelled, unlabelled = shards.labelled, shards.unlabelled
    total = labelled.count + (unlabelled.count if unlabelled.total is None else unlabelled.total)
    place = draws.below(t, "turn which", total, steps, size)
    first, seen = labelled.count[:, None, None], unlabelled.count.clamp(min=1)[:, None, None]
    table = torch.cat([labelled.table, unlabelled.table], dim=1)
    place = torch.where(place < first, place, (place - first) % seen + labelled.table.shape[1])
    index = table.gather(1, place.flatten(1)).view(place.shape)
    images = augment(shards.images, index, draws, t, "turn")
    quarters = draws.below(t, "turn quarters", QUARTERS, steps, size)
    every = torch.stack([images.rot90(k, (-2, -1)) for k in range(QUARTERS)])
    at = quarters[None, ..., None, None, None].expand(1, *images.shape)
    return Turned(every.gather(0, at)[0], quarters, total > 0)


def turning_loss(logits: Tensor, quarters: Tensor) -> Tensor:
    """(C, B, QUARTERS), (C, B) -> (C,): the mean cross-entropy of every client."""
    each = F.cross_entropy(logits.flatten(0, 1), quarters.flatten(), reduction="none")
    return each.view(quarters.shape).mean(1)
