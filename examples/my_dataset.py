"""A data set of one's own: bars at ten angles, with noise."""

import numpy as np

from semidfl.data.dataset import Dataset


def _draw(count: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % 10
    y, x = np.mgrid[-7.5:8, -7.5:8]
    angles = np.pi * (labels + random.uniform(-0.3, 0.3, count)) / 10
    distance = np.abs(x * np.sin(angles)[:, None, None] - y * np.cos(angles)[:, None, None])
    images = 220 * (distance < 1.5) + random.uniform(0, 35, (count, 16, 16))
    return images.astype(np.uint8)[:, None], labels.astype(np.int64)  # (n, channels, height, width), (n,)


def bars() -> Dataset:
    random = np.random.RandomState(0)
    train_images, train_labels = _draw(2000, random)
    test_images, test_labels = _draw(500, random)
    names = tuple(f"{18 * k} degrees" for k in range(10))
    return Dataset("bars", train_images, train_labels, test_images, test_labels, names, mean=(0.5,), std=(0.5,))
