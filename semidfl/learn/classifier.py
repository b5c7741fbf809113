"""The classifier: trained on consensus MixUp batches, and judged."""

from dataclasses import replace

import torch
from torch import Tensor

from semidfl.cohort import Learner
from semidfl.data.shards import Space
from semidfl.draws import Draws
from semidfl.learn.batch import Batch
from semidfl.learn.descend import Outcome, descend
from semidfl.learn.loss import Loss, mean_cross_entropy, soft_cross_entropy
from semidfl.learn.mixup import mixup, partners
from semidfl.learn.optimise import Optimiser
from semidfl.learn.packing import run_packed
from semidfl.learn.turn import Turned, turning_loss
from semidfl.models.stacked import Network

_RAREST = 0.02
"""share below which a class counts as absent"""

__all__ = ["accuracy", "probabilities", "soft_cross_entropy", "train_classifier"]


def train_classifier(
    t: int,
    network: Network,
    optimiser: Optimiser,
    scale: float,
    beta: float,
    adjustment: float,
    space: Space,
    learner: Learner,
    batch: Batch,
    draws: Draws,
    per_sample: bool = False,
    loss: Loss = mean_cross_entropy,
    turned: Turned | None = None,
    turns: float = 0.0,
) -> Outcome:
    """E steps on MixUp of the batch; returns parameters, optimiser state, mean loss.

    MixUp's lambda is drawn once a batch, or `per_sample`. `turned` images run beside the batch and count `turns`; they
    teach how to see at all, so they fade with the rate, when what is left to learn are the classes.
    """
    steps, images, targets = batch.steps, space.normalise(batch.images), batch.targets
    if beta:
        partner = partners(batch.chosen(draws.bits(t, "partner", steps, batch.capacity)), batch.valid)
        if per_sample:
            share = batch.chosen(draws.beta(t, "lambda", beta, steps, batch.capacity))
        else:
            share = draws.beta(t, "lambda", beta, steps)
        images, targets = mixup(images, targets, share, partner)
    present, classes = batch.valid.shape[1], targets.shape[3]
    trains, stepped = batch.valid.any(1), [images, targets]
    if turned is not None:
        images = torch.cat([images, space.normalise(turned.images)], dim=2)
        if batch.held:  # one more block, which all have
            batch = replace(batch, held=(*batch.held, (True,) * len(images)))
        trains, stepped = trains | turned.there, [images, targets, turned.quarters]
    offset = adjustment * batch.class_shares().clamp(min=_RAREST).log()[:, None]  # (C, 1, K)

    def loss_of(params: Tensor, images: Tensor, targets: Tensor, *rest: Tensor) -> Tensor:
        quarters, rest = (None, rest) if turned is None else (rest[0], rest[1:])
        offset, valid, trust, slots, there, *packing = rest
        logits = run_packed(network, tuple(packing), len(batch.held), params, images)
        now = replace(batch, images=images[:, :present], targets=targets, valid=valid, trust=trust, slots=slots)
        known = loss(logits[:, :present, :classes] + offset, targets, now)
        if quarters is None:
            return known
        return known + turns * there * turning_loss(logits[:, present:, classes:], quarters)

    kind = (loss, batch.capacity, len(batch.held), batch.doubled, turns)
    there = trains if turned is None else turned.there * scale
    fixed = (offset, batch.valid, batch.trust, batch.slots, there, *batch.packing(network))
    return descend(loss_of, kind, network, optimiser, learner, trains, stepped, fixed, scale)


@torch.no_grad()
def probabilities(network: Network, space: Space, params: Tensor, images: Tensor, limit: int) -> Tensor:
    """params (C, D), images uint8 (C or 1, n, ch, H, W) -> softmax (C, n, K), `limit` samples a client at a time."""
    clients, count = params.shape[0], images.shape[1]
    passes = max(1, -(-count // limit))
    parts = []
    for some in images.split(max(1, -(-count // passes)), dim=1):  # of equal size
        x = space.normalise(some).expand(clients, *some.shape[1:])
        parts.append(network(params, x).softmax(dim=2))
    return torch.cat(parts, dim=1)


def accuracy(network: Network, space: Space, params: Tensor, images: Tensor, labels: Tensor, limit: int) -> Tensor:
    """Share of right answers of every client (C,); images and labels may be shared by all (first axis 1)."""
    p = probabilities(network, space, params, images, limit)
    right = (p.argmax(2) == labels) & ~p[..., 0].isnan()  # a network that has diverged answers nothing, not class 0
    return right.double().mean(1)
