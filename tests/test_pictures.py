"""Picture files against Pillow and torch: every mode, every size; damaged ones are named, never raised."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from semidfl.data import pictures
from semidfl.data.pictures import Look, decode, look, read_pictures, resize, shape_for, weights

SIDES = st.integers(1, 70)


@settings(max_examples=60)
# From 2 on: of a picture one pixel wide torch 2.13 repeats the first row.
@given(st.integers(2, 70), st.integers(2, 70), st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_resizing_is_torchs_bilinear_with_antialias(h: int, w: int, height: int, width: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (3, h, w), dtype=np.uint8)
    ours = resize(image, height, width)
    theirs = F.interpolate(
        torch.from_numpy(image)[None].double(), (height, width), mode="bilinear", antialias=True, align_corners=False
    )[0].numpy()
    assert np.abs(ours - theirs).max() <= 0.5 + 1e-2


@pytest.mark.parametrize("size", [(8, 8), (31, 17), (64, 48), (5, 90)])
def test_resizing_is_nearly_pillows(size: tuple[int, int]) -> None:
    image = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    theirs = np.asarray(Image.fromarray(image).resize((20, 12), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(resize(image, 12, 20) - theirs).max() <= 1  # Pillow rounds between the two passes


@given(SIDES, SIDES)
def test_weights_share_out_everything(old: int, new: int) -> None:
    found = weights(old, new)
    assert found.shape == (new, old)
    assert found.sum(1) == pytest.approx(1)
    assert (found >= 0).all()
    if old == new:
        assert (found == np.eye(old)).all()


RAMP = np.add.outer(np.arange(6) * 20, np.arange(5) * 25).astype(np.uint8)  # 6 high, 5 wide
COLOUR = np.stack([RAMP, 255 - RAMP, RAMP // 2], axis=2)


def stored(tmp_path: Path, image: Image.Image, name: str = "x.png", **options: Any) -> Path:
    image.save(tmp_path / name, **options)
    return tmp_path / name


def test_modes_become_bytes(tmp_path: Path) -> None:
    grey, colour = Image.fromarray(RAMP), Image.fromarray(COLOUR)
    wide = Image.fromarray(RAMP.astype(np.uint16) * 257)
    palette = colour.quantize(256, dither=Image.Dither.NONE)
    for picture, name, expected in (
        (grey, "l.png", RAMP[None]),
        (wide, "16bit.png", RAMP[None]),
        (wide, "16bit.tif", RAMP[None]),
        (grey.convert("LA"), "la.png", RAMP[None]),
        (grey.convert("1"), "1.png", np.asarray(grey.convert("1").convert("L"))[None]),
    ):
        path = stored(tmp_path, picture, name)
        found = look(path)
        assert isinstance(found, Look), found
        assert (found.height, found.width, found.grey) == (6, 5, True)
        assert np.array_equal(decode(path, (1, 6, 5)), expected), name
        assert np.array_equal(decode(path, (3, 6, 5)), expected.repeat(3, axis=0)), name
    for picture, name in ((colour, "rgb.png"), (colour.convert("RGBA"), "rgba.png"), (palette, "p.png")):
        path = stored(tmp_path, picture, name)
        found = look(path)
        assert isinstance(found, Look)
        assert not found.grey
        assert np.array_equal(decode(path, (3, 6, 5)), COLOUR.transpose(2, 0, 1)), name


def test_what_is_transparent_is_black(tmp_path: Path) -> None:
    layer = np.dstack([COLOUR, np.full((6, 5), 255, np.uint8)])
    layer[:3, :, 3] = 0
    found = decode(stored(tmp_path, Image.fromarray(layer)), (3, 6, 5))
    assert isinstance(found, np.ndarray)
    assert (found[:, :3] == 0).all()
    assert np.array_equal(found[:, 3:], COLOUR.transpose(2, 0, 1)[:, 3:])


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    path = stored(tmp_path, Image.fromarray(RAMP), exif=exif)
    assert look(path) == Look(5, 6, True)
    assert np.array_equal(decode(path, (1, 5, 6)), np.rot90(RAMP, -1)[None])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.png", b"", "cannot identify"),
        ("b.png", b"not a picture", "cannot identify"),
        ("c.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, ""),
        ("gone.png", None, "no such file"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for reason in (look(tmp_path / name), decode(tmp_path / name, (1, 4, 4))):
        assert isinstance(reason, str)
        assert words in reason
        assert "\n" not in reason
        assert str(tmp_path) not in reason


def test_floating_point_pixels_have_no_range(tmp_path: Path) -> None:
    path = stored(tmp_path, Image.fromarray(np.ones((4, 4), np.float32)), "f.tif")
    assert "floating-point" in str(decode(path, (1, 4, 4)))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(st.sampled_from(["png", "jpeg", "gif", "bmp", "tiff", "webp"]), st.data())
def test_damaged_files_are_never_raised(tmp_path_factory: Any, kind: str, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged", numbered=True) / f"x.{kind}"
    Image.fromarray(COLOUR).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    found = decode(path, (3, 8, 8))
    assert isinstance(found, str) or (found.shape == (3, 8, 8) and found.dtype == np.uint8)


@pytest.mark.parametrize(
    ("looks", "size", "channels", "shape"),
    [
        ([Look(8, 8, True)] * 3, 0, 0, (1, 8, 8)),
        ([Look(20, 30, True)] * 3, 0, 0, (1, 20, 30)),
        ([Look(8, 8, True), Look(8, 9, True)], 0, 0, (1, 32, 32)),
        ([Look(300, 300, True)], 0, 0, (1, 32, 32)),
        ([Look(2, 2, True)], 0, 0, (1, 32, 32)),
        ([Look(8, 8, True), Look(8, 8, False)], 0, 0, (3, 8, 8)),
        ([Look(8, 8, False)], 16, 1, (1, 16, 16)),
        ([Look(8, 8, False)], (12, 14), 3, (3, 12, 14)),
        ([], 0, 0, (1, 32, 32)),
    ],
)
def test_the_shape_suits_the_pictures(looks: list[Look], size: Any, channels: int, shape: Any) -> None:
    assert shape_for(looks, size, channels) == shape


def test_order_and_failures_are_kept(tmp_path: Path) -> None:
    paths = []
    for k in range(40):
        paths.append(stored(tmp_path, Image.fromarray(np.full((4, 4), k, np.uint8)), f"{k}.png"))
    paths[7].write_bytes(b"junk")
    found = read_pictures(paths, 0, 0)
    assert found.images[:, 0, 0, 0].tolist() == [k for k in range(40) if k != 7]
    assert found.good == tuple(k for k in range(40) if k != 7)
    assert list(found.failures) == [7]
    assert found.sizes == {"4x4 grey": 39}


def test_the_cache_is_used_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [stored(tmp_path, Image.fromarray(RAMP + k), f"{k}.png") for k in range(3)]
    paths[1].write_bytes(b"junk")
    cache = tmp_path / "cache" / "x.npz"
    first = read_pictures(paths, 0, 0, cache)
    assert cache.parent.stat().st_mode & 0o077 == 0  # nobody else can look at private images
    calls: list[Path] = []
    plain = decode
    monkeypatch.setattr(pictures, "decode", lambda path, shape: (calls.append(path), plain(path, shape))[1])
    again = read_pictures(paths, 0, 0, cache)
    assert not calls
    assert np.array_equal(first.images, again.images)
    assert (first.good, first.failures, first.sizes) == (again.good, again.failures, again.sizes)
    assert read_pictures(paths, 9, 0, tmp_path / "cache" / "x.npz").images.shape == (2, 1, 9, 9)
    assert calls
    calls.clear()
    read_pictures(paths, 0, 0, cache)
    os.utime(paths[0], ns=(1, 1))
    read_pictures(paths, 0, 0, cache)
    assert len(calls) == 4  # both readable ones, twice
    cache.write_bytes(b"damaged")
    assert np.array_equal(read_pictures(paths, 0, 0, cache).images, first.images)


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = stored(tmp_path, Image.fromarray(RAMP))
    assert read_pictures([path], 0, 0, tmp_path / "file" / "x.npz").good == (0,)
