"""A data set in memory fits together or is not made; a user's own `.npz` is read, or the error says what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semidfl.config import DataConfig
from semidfl.data import sources
from semidfl.data.dataset import Dataset
from semidfl.errors import ConfigError, DataError

Arrays = dict[str, Any]


# --- A user's own .npz


def good(rgb: bool = True) -> Arrays:
    rng = np.random.default_rng(1)
    shape = (4, 5, 3) if rgb else (4, 5)
    return {
        "x_train": rng.integers(0, 256, (6, *shape), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
        "x_test": rng.integers(0, 256, (2, *shape), dtype=np.uint8),
        "y_test": np.array([2, 0], dtype=np.int32),
    }


@pytest.mark.parametrize("rgb", [True, False])
def test_npz_is_read_channels_first(tmp_path: Path, rgb: bool) -> None:
    arrays = good(rgb)
    np.savez_compressed(tmp_path / "own.npz", **arrays)
    data = sources.load(str(tmp_path / "own.npz"))
    assert data.shape == ((3, 4, 5) if rgb else (1, 4, 5))
    back = data.train_images.transpose(0, 2, 3, 1)
    assert np.array_equal(back if rgb else back[..., 0], arrays["x_train"])
    assert data.test_labels.tolist() == [2, 0]
    assert data.classes == ("0", "1", "2")
    assert len(data.mean) == len(data.std) == data.channels


def test_npz_may_name_its_classes_and_have_one_channel(tmp_path: Path) -> None:
    arrays = good(rgb=False)
    arrays |= {"x_train": arrays["x_train"][..., None], "x_test": arrays["x_test"][..., None]}
    np.savez(tmp_path / "own.npz", classes=np.array(["cat", "dog", "eel", "fox"]), **arrays)
    with pytest.warns(UserWarning, match="y_train is of class fox, which nobody can learn"):
        report = sources.check(str(tmp_path / "own.npz"))
    assert report.shape == (1, 4, 5)
    assert report.classes == ("cat", "dog", "eel", "fox")
    assert report.train_counts == (2, 2, 2, 0)


def test_labels_that_count_from_one_are_told_of(tmp_path: Path) -> None:
    arrays = good(rgb=False)
    np.savez(tmp_path / "own.npz", **arrays | {name: arrays[name] + 1 for name in ("y_train", "y_test")})
    with pytest.warns(UserWarning, match="y_train is of class 0, .* labels count from 0, without gaps"):
        sources.load(str(tmp_path / "own.npz"))


BAD: dict[str, tuple[Arrays, str]] = {
    "float images": ({"x_train": np.zeros((6, 4, 5, 3), np.float32)}, "x_train is float32; expected uint8"),
    "NaN images": ({"x_test": np.full((2, 4, 5, 3), np.nan)}, "x_test is float64 and holds NaN; expected uint8"),
    "flat images": ({"x_train": np.zeros((6, 60), np.uint8)}, r"x_train has the shape \(6, 60\); expected .*\(n, H, W"),
    "channels first": ({"x_train": np.zeros((6, 3, 4, 5), np.uint8)}, r"x_train has the shape \(6, 3, 4, 5\)"),
    "no images": ({"x_test": np.zeros((0, 4, 5, 3), np.uint8)}, "x_test has the shape .*at least one image"),
    "other size": ({"x_test": np.zeros((2, 5, 5, 3), np.uint8)}, "test images are 3x5x5, training images 3x4x5"),
    "float labels": ({"y_train": np.zeros(6)}, "y_train is float64; expected whole numbers"),
    "NaN labels": ({"y_test": np.array([0, np.nan])}, "y_test is float64 and holds NaN; expected whole numbers"),
    "one-hot labels": ({"y_train": np.eye(6, dtype=int)}, r"y_train has the shape \(6, 6\); expected .*\(n,\)"),
    "negative labels": ({"y_train": np.array([0, 1, 2, 0, 1, -2])}, "y_train runs from -2 to 2; expected whole"),
    "huge label": ({"y_test": np.array([0, 2**63], np.uint64)}, "y_test runs from 0 to 9223372036854775808"),
    "one class": ({"y_train": np.zeros(6, int)}, "training labels hold one class only"),
    "lengths": ({"y_train": np.array([0, 1, 2])}, "x_train holds 6 images, but y_train 3 labels"),
    "pickled": ({"y_train": np.array([0, "a"], dtype=object)}, "y_train cannot be read .*allow_pickle"),
    "few names": ({"classes": np.array(["a", "b"])}, "train labels run from 0 to 2, expected 0 to 1"),
    "odd names": ({"classes": np.array([1, 2, 3])}, "classes is int64 .*expected one name"),
}


@pytest.mark.parametrize(("change", "words"), BAD.values(), ids=BAD.keys())
def test_bad_npz_names_file_array_and_expectation(tmp_path: Path, change: Arrays, words: str) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **(good() | change))
    with pytest.raises(DataError, match=words) as caught:
        sources.load(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("missing", ["x_train", "y_train", "x_test", "y_test"])
def test_npz_without_an_array_names_it(tmp_path: Path, missing: str) -> None:
    arrays = good()
    del arrays[missing]
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=f"{missing} is missing"):
        sources.load(str(tmp_path / "own.npz"))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **good())
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF  # among the pixels of the first array: found by the archive's checksum
    for content in (b"", b"hello", whole[:300], bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"own\.npz: .* cannot be read .*expected an \.npz archive"):
            sources.load(str(path))
    with pytest.raises(DataError, match="there is no such file"):
        sources.load(str(tmp_path / "other.npz"))


# --- Dataset


def test_dataset_refuses_parts_that_do_not_fit() -> None:
    images, labels = np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 1, 0, 1])
    fits: Arrays = {
        "name": "x", "train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels,
        "classes": ("a", "b"), "mean": (0.5,), "std": (0.5,),
    }  # fmt: skip
    assert Dataset(**fits).shape == (1, 2, 2)
    for change, words in (
        ({"train_images": images.astype(np.float32)}, "train images are float32"),
        ({"test_images": images[0]}, "test images are uint8"),
        ({"train_labels": labels.astype(np.int32)}, "train labels are int32"),
        ({"test_labels": labels[:3]}, "test labels are int64"),
        ({"classes": ("a",)}, "train labels run from 0 to 1"),
        ({"mean": (0.5, 0.5)}, "mean and std"),
        ({"std": (0.0,)}, "mean and std"),
    ):
        with pytest.raises(DataError, match=f"data set x: {words}"):
            Dataset(**(fits | change))


def test_held_out_samples_replace_the_test_samples() -> None:
    whole = sources.load("digits")
    data = sources.load("digits", DataConfig("digits", held_out=300), seed=7)
    assert (len(data.train_labels), len(data.test_labels)) == (len(whole.train_labels) - 300, 300)
    kept, aside, tested = (
        {image.tobytes() for image in images} for images in (data.train_images, data.test_images, whole.test_images)
    )
    assert kept | aside == {image.tobytes() for image in whole.train_images}
    assert not aside & tested
    again = sources.load("digits", DataConfig("digits", held_out=300), seed=8)
    assert np.array_equal(again.test_images, data.test_images)  # whatever the seed, or tuning would see them all
    shown = sources.outline("digits", DataConfig("digits", held_out=300))
    assert (len(shown.train_labels), len(shown.test_labels)) == (len(data.train_labels), 300)


def test_samples_without_a_label_are_not_held_out() -> None:
    images, labels = np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), np.array([0, -1, 1, 0, -1, 1])
    data = Dataset("x", images, labels, images[:1], labels[:1], ("a", "b"), (0.5,), (0.5,), ("p", "q"), labels % 2)
    part = data.holding_out(2)
    assert sorted(part.train_labels)[:2] == [-1, -1]
    assert min(part.test_labels) >= 0
    assert part.owners is not None
    assert part.owners.tolist() == (part.train_labels % 2).tolist()
    with pytest.raises(DataError, match="held_out = 4 leaves no label to train on: only 4 are known"):
        data.holding_out(4)


def test_what_cannot_be_held_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held_out is for data sets with test images of their own, not for folders"):
        sources.load(str(tmp_path), DataConfig(str(tmp_path), held_out=3))
    for look in (sources.load, sources.outline):
        with pytest.raises(DataError, match=r"data\.held_out = 1437 leaves no"):
            look("digits", DataConfig("digits", held_out=1437))
