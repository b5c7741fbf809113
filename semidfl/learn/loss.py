"""What training makes small: one number a client, from the logits of a batch.

The sources of a batch are weighed together (one mean over all samples) or by themselves (a mean for each, then
the sum), as the method's publication has it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.learn.batch import PSEUDO, Batch

__all__ = [
    "Loss",
    "cross_entropy_by_source",
    "entropy_and_distance",
    "mean_cross_entropy",
    "mean_cross_entropy_times_sources",
    "soft_cross_entropy",
]

Loss = Callable[[Tensor, Tensor, Batch], Tensor]
"""(logits (C, S, K), targets (C, S, K), the batch they are of) -> (C,)."""


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(…, K) and (…, K) -> (…); a target of zeros has no loss."""
    return -(targets * F.log_softmax(logits, dim=-1)).sum(-1)


def mean_cross_entropy(logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """SemiDFL, line 17: one mean over all samples of a client."""
    return (soft_cross_entropy(logits, targets) * batch.weights()).sum(1)


def mean_cross_entropy_times_sources(logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """A batch of labelled and one of pseudo-labelled samples count as two, not as one of twice the size.

    Who has both takes steps twice as large as by the mean, and so has more say in what neighbours agree on. Generated
    samples, which all have, do not count as a source.
    """
    return mean_cross_entropy(logits, targets, batch) * batch.own_sources()


def cross_entropy_by_source(logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """FixMatch and FlexMatch (Zhang et al. 2021, Eq. 8 and L = L_s + L_u): a mean for each source, then the sum.

    A sample under its threshold has a target of zeros: it adds nothing, but counts in the mean.
    """
    return (soft_cross_entropy(logits, targets) * batch.weights_by_source()).sum(1)


def entropy_and_distance(logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """MixMatch (Berthelot et al. 2019, Eq. 3 to 5): L_X + lambda_U L_U.

    L_X is the cross-entropy of what was labelled; L_U the squared distance of the probabilities, averaged over the
    classes, of what was guessed: unlike the cross-entropy it is bounded, so a wrong guess does less harm. lambda_U is
    how far the batch trusts the guesses.
    """
    entropy = soft_cross_entropy(logits, targets)  # Eq. 3
    distance = (logits.softmax(-1) - targets).square().mean(-1)  # Eq. 4
    losses = torch.where(batch.source == PSEUDO, distance, entropy)
    return (losses * batch.weights_by_source()).sum(1)  # Eq. 5
