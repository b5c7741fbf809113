"""Whether data is still what it was: a fingerprint of all that a client trains on and is tested on.

A run that went on with other data would test on images that it has trained on, and nothing would show.
"""

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["client_prints", "image_prints", "sample_print"]

Prints = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]


def image_prints(images: npt.NDArray[np.uint8]) -> Prints:
    """(n,): the CRC-32 of every image; all of CIFAR-10 in about a tenth of a second."""
    return np.fromiter(map(zlib.crc32, np.ascontiguousarray(images)), dtype=np.uint32, count=len(images))


def sample_print(prints: Prints, labels: npt.NDArray[np.int64]) -> bytes:
    """Of images, by their prints, with their labels, in this order."""
    return hashlib.blake2b(prints.tobytes() + b"|" + labels.tobytes(), digest_size=8).digest()


def client_prints(
    prints: Prints,
    labels: npt.NDArray[np.int64],
    labelled: Sequence[Positions],
    unlabelled: Sequence[Positions],
    common: bytes,
) -> Tensor:
    """(C,) int64: of the samples that lie at these positions of the pool, and of what is `common` to all clients."""
    found = []
    for lists in zip(labelled, unlabelled, strict=True):
        parts = b"".join(sample_print(prints[own], labels[own]) for own in lists)
        found.append(int.from_bytes(hashlib.blake2b(parts + common, digest_size=8).digest(), "little", signed=True))
    return torch.tensor(found, dtype=torch.int64)
