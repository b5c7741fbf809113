"""What the clients of a cohort hold: one pool of uint8 images on the device, and who owns which.

The lists of the clients have unequal lengths; they are padded to one table (C, longest) with counts,
so that drawing a batch for all clients is one gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from semidfl.data.dataset import Dataset
from semidfl.data.fingerprint import client_prints
from semidfl.data.partition import Split
from semidfl.draws import Draws
from semidfl.models.stacked import fused

__all__ = ["Index", "Rows", "Shards", "Space", "by_length"]

Rows = slice | list[int]
"""Some of a cohort's clients, by their place in it."""


@dataclass(frozen=True)
class Space:
    """What an image is and how a network wants it: the part of a data set that all clients agree on."""

    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: tuple[str, ...] = ()  # of the classes

    @classmethod
    def of(cls, data: Dataset) -> "Space":
        return cls(data.channels, data.height, data.width, len(data.classes), data.mean, data.std, data.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (…, ch, H, W) -> float, as the classifier wants it."""
        scale, shift = _affine(self.mean, self.std, images.device)
        if fused(images):
            from semidfl.models import kernels

            return kernels.scaled(images, scale, shift)
        return images.float() * scale + shift


@cache  # a copy to the device would make it wait
def _affine(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    scale, shift = [1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]
    return tuple(torch.tensor(x, device=device)[:, None, None] for x in (scale, shift))  # type: ignore[return-value]


@dataclass(frozen=True)
class Index:
    """The pool positions of each client's samples."""

    table: Tensor  # (C, longest) int64, padded with 0
    count: Tensor  # (C,) int64
    held: tuple[int, ...]  # count on the host, so that asking who has what never waits for the device
    total: Tensor | None = None  # (C,) what these are a part of, if they are but a part

    @classmethod
    def of(cls, lists: Sequence[np.ndarray], device: torch.device) -> "Index":
        held = tuple(len(x) for x in lists)
        table = torch.zeros(len(lists), max([1, *held]), dtype=torch.int64)
        for row, positions in zip(table, lists, strict=True):
            row[: len(positions)] = torch.from_numpy(np.asarray(positions, dtype=np.int64))
        return cls(table.to(device), torch.tensor(held, device=device), held)

    def rows(self, rows: Rows) -> "Index":
        held = self.held[rows] if isinstance(rows, slice) else tuple(self.held[i] for i in rows)
        # Trimmed to the longest list left: a chunk of small clients does no work for large ones.
        total = None if self.total is None else self.total[rows]
        return Index(self.table[rows][:, : max([1, *held])], self.count[rows], held, total)

    def some(self, t: int, draws: Draws, most: int) -> "Index":
        """At most so many samples of each client, drawn anew in every round; who has no more keeps all, as they are."""
        if max(self.held, default=0) <= most:
            return self
        key = draws.bits(t, "looked at", self.table.shape[1])
        key = torch.where((self.count > most)[:, None], key, torch.arange(key.shape[1], device=key.device))
        place = torch.where(self.valid(), key, 2**32).argsort(dim=1, stable=True)[:, :most]
        held = tuple(min(n, most) for n in self.held)
        return Index(self.table.gather(1, place), self.count.clamp(max=most), held, self.count)

    def stands_for(self) -> Tensor:
        """(C, 1): how many of the client's samples each of these stands for."""
        total = self.count if self.total is None else self.total
        return (total / self.count.clamp(min=1))[:, None].float()

    def valid(self) -> Tensor:
        """(C, longest) bool: which cells hold a sample."""
        return torch.arange(self.table.shape[1], device=self.table.device) < self.count[:, None]


def by_length(index: Index) -> list[int]:
    """The clients that hold samples, those with the most first: chunks of them need little padding."""
    return sorted((i for i, n in enumerate(index.held) if n), key=lambda i: -index.held[i])


@dataclass(frozen=True)
class Shards:
    """The training data of C clients."""

    images: Tensor  # (n, ch, H, W) uint8, the pool
    labels: Tensor  # (n,) int64; of the unlabelled ones used only to report precision, -1 if nobody knows
    labelled: Index
    unlabelled: Index
    prints: Tensor | None = None  # (C,) int64 on the host, to tell changed data by

    @classmethod
    def of(cls, data: Dataset, split: Split, clients: Sequence[int], device: torch.device) -> "Shards":
        labelled, unlabelled = ([lists[i] for i in clients] for lists in (split.labelled, split.unlabelled))
        return cls(
            torch.from_numpy(data.train_images).to(device),
            torch.from_numpy(data.train_labels).to(device),
            Index.of(labelled, device),
            Index.of(unlabelled, device),
            client_prints(data.train_prints, data.train_labels, labelled, unlabelled, data.common_print),
        )

    def rows(self, rows: Rows) -> "Shards":
        prints = None if self.prints is None else self.prints[rows]
        return Shards(self.images, self.labels, self.labelled.rows(rows), self.unlabelled.rows(rows), prints)
