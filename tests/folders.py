"""Folders of images as users have them, made of the digits."""

from pathlib import Path

import numpy as np
from PIL import Image

from semidfl.data import sources

__all__ = ["colours", "digits", "few_labels", "save", "twelve_classes"]


def digits(count: int) -> list[tuple[np.ndarray, int]]:
    """The first images (8, 8) with their labels."""
    data = sources.load("digits")
    return [(data.train_images[k, 0], int(data.train_labels[k])) for k in range(count)]


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def few_labels(root: Path, labels: int = 20, count: int = 150) -> Path:
    """A folder a class, 20 labels in all, the others in unlabeled/."""
    held: dict[int, int] = {}
    for k, (pixels, label) in enumerate(digits(count)):
        known = sum(held.values()) < labels and held.get(label, 0) < labels // 10
        held[label] = held.get(label, 0) + known
        save(root / (str(label) if known else "unlabeled") / f"{k:04d}.png", pixels)
    assert sum(held.values()) == labels
    return root


def twelve_classes(root: Path, count: int = 160) -> Path:
    """Ten digits, and two of them in negative; unbalanced."""
    for k, (pixels, label) in enumerate(digits(count)):
        save(root / str(label) / f"{k:04d}.png", pixels)
        if label < 2 and k % (label + 2) == 0:
            save(root / str(10 + label) / f"{k:04d}.png", 255 - pixels)
    return root


def colours(root: Path, count: int = 60) -> Path:
    """Red, green and blue digits of unequal sizes, labels in a table, a third of them missing."""
    random, rows = np.random.default_rng(0), ["file,label"]
    for k, (pixels, _) in enumerate(digits(count)):
        channel, (h, w) = k % 3, random.integers(9, 40, 2)
        large = np.asarray(Image.fromarray(pixels).resize((w, h)))
        image = np.zeros((h, w, 3), np.uint8)
        image[..., channel] = large
        name = f"images/{k:03d}.{'png' if k % 2 else 'bmp'}"
        save(root / name, image)
        rows.append(f"{name},{('red', 'green', 'blue')[channel] if k % 3 != k // 3 % 3 else ''}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root
