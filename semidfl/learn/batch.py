"""A round's batches for all clients: labelled, pseudo-labelled and generated samples side by side.

Every source has its fixed block of slots. A client that lacks a source gets no weight there; a source
that nobody in the chunk has is left out of the tensors. Draws are made for all slots all the same, so
that what a client draws does not depend on who is computed with it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Synthetic
from semidfl.data.augment import Augmentation
from semidfl.data.shards import Rows, Shards
from semidfl.draws import Draws
from semidfl.learn.packing import Held, pack
from semidfl.models.stacked import Network

__all__ = ["GENERATED", "LABELLED", "PSEUDO", "Batch", "PseudoLabels", "compose", "draw_kept"]

SOURCES = 3
LABELLED, PSEUDO, GENERATED = range(SOURCES)


@dataclass(frozen=True)
class PseudoLabels:
    """P_i: a target for every unlabelled sample and whether it qualified."""

    targets: Tensor  # (C, n, K)
    kept: Tensor  # (C, n) bool
    trust: Tensor | None = None  # (C,) weight of a pseudo-labelled sample beside a labelled one; None: the same

    def rows(self, rows: Rows) -> "PseudoLabels":
        trust = None if self.trust is None else self.trust[rows]
        return PseudoLabels(self.targets[rows], self.kept[rows], trust)


@dataclass(frozen=True)
class Batch:
    """E batches of up to SOURCES x B samples a client; S slots are present."""

    images: Tensor  # (C, E, S, ch, H, W) uint8
    targets: Tensor  # (C, E, S, K)
    valid: Tensor  # (C, S) bool: whether the client has the slot's source
    trust: Tensor  # (C, S) weight of the slot's source
    slots: Tensor  # (S,) which of the SOURCES x B slots these are
    capacity: int  # SOURCES x B
    held: Held = ()  # which clients may have each present source, as far as the host knows
    doubled: bool = False  # pseudo-labelled samples stand in the slots of generated ones, too

    @property
    def steps(self) -> int:
        """E."""
        return self.targets.shape[1]

    def weights(self) -> Tensor:
        """(C, S): the mean over a client's valid samples, each as far as trusted; all zero where it has none."""
        counted = self.valid * self._each()
        return counted * self.trust / counted.sum(1, keepdim=True).clamp(min=1)

    def weights_by_source(self) -> Tensor:
        """(C, S): the mean over each source by itself, so that the loss is the sum of its parts'."""
        return self.valid * self._each() * self.trust * (SOURCES / self.capacity)

    def _each(self) -> Tensor | float:
        """(S,): what a sample counts. Twice as many of a source count as much as once: only with less chance."""
        return torch.where(self.source == PSEUDO, 0.5, 1.0) if self.doubled else 1.0

    def own_sources(self) -> Tensor:
        """(C,): of how many sources the client has samples of its own, labelled or pseudo-labelled; 1 at least."""
        has = [(self.valid & (self.source == source)).any(1) for source in (LABELLED, PSEUDO)]
        return torch.stack(has).sum(0).clamp(min=1)

    @property
    def source(self) -> Tensor:
        """(S,): LABELLED, PSEUDO or GENERATED."""
        block = self.slots // (self.capacity // SOURCES)
        return block.clamp(max=PSEUDO) if self.doubled else block

    def class_shares(self, but: int | None = None) -> Tensor:
        """(C, K): how often each class is a target in the client's batches of this round, one source left out."""
        counted = self.weights() if but is None else self.weights() * (self.source != but)
        mass = (self.targets * counted[:, None, :, None]).sum((1, 2))
        return mass / mass.sum(1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)

    def filled_in(self) -> "Batch":
        """Generated samples weighed by the share of classes that the client's other samples lack.

        They count as so much less of a sample, too: the others' part of the loss is what it would be without them.
        """
        classes, made = self.targets.shape[3], self.source == GENERATED
        lacking = (1 - self.class_shares(but=GENERATED).clamp(max=1 / classes).sum(1, keepdim=True)).clamp(min=0)
        counted = (self.valid * torch.where(made, lacking, 1.0)).sum(1, keepdim=True)
        grown = self.valid.sum(1, keepdim=True) / counted.clamp(min=torch.finfo(counted.dtype).tiny)
        trust = torch.where(made, lacking, self.trust) * torch.where(counted > 0, grown, 1.0)
        return replace(self, trust=trust)

    def packing(self, network: Network) -> tuple[Tensor, ...]:
        """How to run a network without empty slots: on a GPU, where a stack is large."""
        return pack(network, self.held, self.images.device) if self.held and self.images.is_cuda else ()

    def chosen(self, drawn: Tensor) -> Tensor:
        """The present slots of something drawn for all: (C, E, SOURCES x B, …) -> (C, E, S, …)."""
        return drawn if self.slots.shape[0] == self.capacity else drawn[:, :, self.slots]


def compose(
    t: int,
    purpose: str,
    steps: int,
    size: int,
    augment: Augmentation,
    classes: int,
    shards: Shards,
    draws: Draws,
    pseudo: PseudoLabels | None,
    synthetic: Synthetic | None,
    strong: Augmentation | None = None,
    doubled: bool = False,
) -> Batch:
    """Draws `steps` batches with `size` samples of each source, with replacement.

    `strong` augments the pseudo-labelled samples, in place of `augment`; `doubled`, twice as many of them are drawn
    where there are no generated ones.
    """
    doubled = doubled and pseudo is not None and synthetic is None
    parts: list[tuple[int, Tensor, Tensor, Tensor]] = []  # block of slots, images, targets, valid
    held: list[tuple[bool, ...]] = []
    if any(shards.labelled.held):
        place = draws.below(t, f"{purpose} labelled", shards.labelled.count, steps, size)
        index = _gather(shards.labelled.table, place)
        images = augment(shards.images, index, draws, t, f"{purpose} labelled")
        known = shards.labels[index].clamp(min=0)  # a client without labels draws any sample, which does not count
        held.append(tuple(n > 0 for n in shards.labelled.held))
        parts.append((LABELLED, images, F.one_hot(known, classes).float(), shards.labelled.count > 0))
    if pseudo is not None and any(shards.unlabelled.held):
        place = draw_kept(pseudo.kept, draws, t, f"{purpose} pseudo", steps, (1 + doubled) * size)
        index = _gather(shards.unlabelled.table, place)
        images = (strong or augment)(shards.images, index, draws, t, f"{purpose} pseudo")
        targets = _gather(pseudo.targets, place)
        blocks = (PSEUDO, GENERATED) if doubled else (PSEUDO,)
        for block, *drawn in zip(blocks, images.split(size, 2), targets.split(size, 2), strict=True):
            held.append(tuple(n > 0 for n in shards.unlabelled.held))
            parts.append((block, *drawn, pseudo.kept.any(1)))
    if synthetic is not None:
        place = draw_kept(synthetic.kept, draws, t, f"{purpose} generated", steps, size)
        labels = F.one_hot(_gather(synthetic.labels, place), classes).float()
        held.append((True,) * len(draws))
        parts.append((GENERATED, _gather(synthetic.images, place), labels, synthetic.kept.any(1)))
    if not parts:  # nobody here has anything to learn from: one slot without weight keeps the shapes whole
        return _nothing(steps, size, classes, shards)
    slots = torch.cat([torch.arange(size) + source * size for source, *_ in parts])
    one = torch.ones(len(draws), device=draws.keys.device)
    trust = {}
    if pseudo is not None and pseudo.trust is not None:
        trust = {PSEUDO: pseudo.trust} | ({GENERATED: pseudo.trust} if doubled else {})
    return Batch(
        torch.cat([images for _, images, _, _ in parts], dim=2),
        torch.cat([targets for _, _, targets, _ in parts], dim=2),
        torch.cat([has[:, None].expand(-1, size) for *_, has in parts], dim=1),
        torch.cat([trust.get(source, one)[:, None].expand(-1, size) for source, *_ in parts], dim=1),
        slots.to(draws.keys.device),
        SOURCES * size,
        tuple(held),
        doubled,
    )


def draw_kept(kept: Tensor, draws: Draws, t: int, purpose: str, *shape: int) -> Tensor:
    """(C, *shape) places drawn with replacement among the True cells of each row of `kept` (C, n)."""
    found = kept.cumsum(1)
    drawn = draws.below(t, purpose, kept.sum(1), *shape)  # which of those
    place = torch.searchsorted(found, drawn.flatten(1) + 1).reshape(drawn.shape)
    return place * (place < kept.shape[1])  # a row without any


def _gather(table: Tensor, place: Tensor) -> Tensor:
    """table[c, place[c, …]]: (C, n, …) and (C, *shape) -> (C, *shape, …)."""
    clients = torch.arange(table.shape[0], device=table.device)
    return table[clients.reshape(-1, *(1 for _ in place.shape[1:])), place]


def _nothing(steps: int, size: int, classes: int, shards: Shards) -> Batch:
    clients, device = len(shards.labelled.held), shards.images.device
    return Batch(
        shards.images.new_zeros(clients, steps, 1, *shards.images.shape[1:]),
        torch.zeros(clients, steps, 1, classes, device=device),
        torch.zeros(clients, 1, dtype=torch.bool, device=device),
        torch.zeros(clients, 1, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        SOURCES * size,
    )
