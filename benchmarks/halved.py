"""CIFAR-10 where a CPU core takes minutes a run: images of half the side, a ResNet of three blocks.

    python benchmarks/halved.py --cells 5:0.1 --seeds 0 --out found.jsonl recipe= labels=method:dfl-lb

Variants are those of explore.py; 20,000 of the training images train, 4,000 others judge. What is better here has to be
tried on the whole, whose network is larger and whose runs are longer.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from explore import main

from semidfl import setup
from semidfl.data import sources
from semidfl.data.dataset import Images
from semidfl.models.resnet import ResNet18

COUNT = 24_000
USUAL = {
    "rounds": "160",
    "classifier.iterations": "25",
    "pseudo.pool": "400",
    "augment.pad": "2",
    "evaluation.every": "20",
    "evaluation.last": "1",
    "compute.threads": "1",
}


class SmallResNet(ResNet18):
    widths, depth, groups = (16, 32, 64), 1, 8


def halved(images: Images) -> Images:
    """Each pixel the mean of four."""
    n, channels, height, width = images.shape
    fours = images.reshape(n, channels, height // 2, 2, width // 2, 2)
    return fours.mean((3, 5), dtype=np.float32).round().astype(np.uint8)


def put_in_place() -> None:
    """What semidfl calls cifar10 and resnet18 is the small copy from here on, in this process."""
    whole = sources.CATALOGUE["cifar10"]

    def read(folder: Path) -> sources.Arrays:
        images, labels, test_images, test_labels = whole.read(folder)
        return halved(images[:COUNT]), labels[:COUNT], halved(test_images), test_labels

    sources.CATALOGUE["cifar10"] = replace(whole, train=COUNT, shape=(3, 16, 16), read=read)
    setup.ResNet18 = SmallResNet  # type: ignore[misc]


if __name__ == "__main__":
    put_in_place()
    main(__doc__, "cifar10", USUAL)
