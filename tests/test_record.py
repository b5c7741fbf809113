"""Run folders, checkpoints and pictures: what they keep, and what is left of them when something goes wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from semidfl.errors import CheckpointError, RunFolderError
from semidfl.record import checkpoint, images
from semidfl.record.atomic import replacing
from semidfl.record.folder import RunFolder, read_records


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that runs some code and talks over pipes."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lines(path: Path) -> list[str]:
    return (path / "metrics.jsonl").read_text().splitlines()


# --- run folder -------------------------------------------------------------------------------------------------------


def test_a_new_run_has_its_config_and_folders(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs" / "a", "seed = 3\n") as folder:
        assert folder.config_toml == "seed = 3\n"
        assert folder.records() == []
    names = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert names == {".lock", "config.toml", "checkpoints", "models", "samples"}


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    record = {"round": 1, "loss": 1 / 3, "accuracy": [0.1, 0.2], "seconds": {"train": 1e-9}, "text": "é\r\n\u2028"}
    with RunFolder.create(tmp_path, "") as folder:
        folder.append(record)
        assert folder.records() == [record]
    assert read_records(tmp_path) == [record]


def test_what_json_lacks_becomes_null_and_arrays_become_lists(tmp_path: Path) -> None:
    odd = {"a": float("nan"), "b": [np.float32("inf"), 1.0], "c": {"d": torch.tensor([1.0, float("nan")])}, "e": (1, 2)}
    with RunFolder.create(tmp_path, "") as folder:
        folder.append(odd)
        folder.write_summary(odd)
    expected = {"a": None, "b": [None, 1.0], "c": {"d": [1.0, None]}, "e": [1, 2]}

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(lines(tmp_path)[0], parse_constant=refuse) == expected
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse) == expected


def test_a_line_is_seen_by_others_at_once(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as folder:
        folder.append({"round": 1})
        assert lines(tmp_path) == ['{"round": 1}']


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "old").close()
    with pytest.raises(RunFolderError, match=rf"already holds a run: .*semidfl resume {tmp_path}.*--name.*--overwrite"):
        RunFolder.create(tmp_path, "new")
    with RunFolder.open(tmp_path) as folder:  # the refusal gave the lock back
        assert folder.config_toml == "old"


def test_overwrite_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "old") as folder:
        folder.append({"round": 1})
        folder.write_summary({})
        checkpoint.save(folder.checkpoints, 1, {"x": torch.ones(1)}, {})
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder.create(tmp_path, "new", overwrite=True) as folder:
        assert (folder.config_toml, folder.records(), list(folder.checkpoints.iterdir())) == ("new", [], [])
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "summary.json").exists()


def test_open_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no run folder .*nowhere"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"config\.toml is missing"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.open(tmp_path / "file")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=rf"cannot write .*{name}: .*is a file, not a folder"):
        RunFolder.create(tmp_path / name, "")


def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user (root) may write everywhere")
    with pytest.raises(RunFolderError, match="no permission"):
        RunFolder.create(tmp_path / "run", "")


def test_permission_refused_by_the_system_becomes_a_plain_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunFolderError, match=r"cannot write .*run: no permission"):
        RunFolder.create(tmp_path / "run", "")


HOLD = """
import sys
from semidfl.record.folder import RunFolder
with RunFolder.open(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "").close()
    with python(HOLD, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for refused in (lambda: RunFolder.open(tmp_path), lambda: RunFolder.create(tmp_path, "", overwrite=True)):
            with pytest.raises(RunFolderError, match=rf"in use by another process \(pid {holder.pid}\)"):
                refused()
        holder.send_signal(signal.SIGKILL)
    RunFolder.open(tmp_path).close()  # the system gave the lock of the dead process back
    assert (tmp_path / "config.toml").exists()


def test_a_full_disk_leaves_only_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def half(handle: int, data: memoryview) -> int:
        if len(data) < 12:
            no_room()
        return write(handle, data[: len(data) // 2])

    with RunFolder.create(tmp_path, "") as folder:
        folder.append({"round": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(RunFolderError, match="disk is full"):
                folder.append({"round": 2, "text": "x" * 40})
        assert lines(tmp_path) == ['{"round": 1}']
        folder.append({"round": 3})
        assert [record["round"] for record in folder.records()] == [1, 3]


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    with RunFolder.create(tmp_path, "") as folder:
        folder.append({"round": 12345})
    assert lines(tmp_path) == ['{"round": 12345}']


def test_a_full_disk_keeps_the_old_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path, "") as folder:
        folder.write_summary({"rounds": 1})
        monkeypatch.setattr(os, "fsync", no_room)
        with pytest.raises(RunFolderError, match=r"summary\.json: the disk is full"):
            folder.write_summary({"rounds": 2})
        folder.append({"round": 1})
        with pytest.raises(RunFolderError, match="disk is full"):
            folder.sync()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"rounds": 1}
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("tail", [b"", b'{"round": 5, "lo', b'{"round": 5}', b"\0\0\0\0\n"])
def test_truncate_drops_later_rounds_and_a_half_written_line(tmp_path: Path, tail: bytes) -> None:
    with RunFolder.create(tmp_path, "") as folder:
        for number in range(1, 5):
            folder.append({"round": number})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert [record["round"] for record in read_records(tmp_path)] == [1, 2, 3, 4]
    with RunFolder.open(tmp_path) as folder:
        folder.truncate(4)
        assert len(lines(tmp_path)) == 4
        folder.truncate(2)
        folder.append({"round": 3, "again": True})
    assert lines(tmp_path) == ['{"round": 1}', '{"round": 2}', '{"round": 3, "again": true}']


def test_truncate_without_metrics_is_no_error(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as folder:
        folder.truncate(0)
        assert folder.records() == []


def test_a_damaged_line_amid_good_ones_is_named_not_dropped(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as folder:
        (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
        with pytest.raises(RunFolderError, match=r"line 2 of .* is damaged"):
            folder.records()
        with pytest.raises(RunFolderError, match=r"line 2 of .* is damaged"):
            folder.truncate(3)
        assert len(lines(tmp_path)) == 3
        folder.truncate(1)
        assert lines(tmp_path) == ['{"round": 1}']


# --- checkpoints ------------------------------------------------------------------------------------------------------


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((2, 3), float(number)), "step": torch.tensor(number)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def two_checkpoints(folder: Path) -> None:
    checkpoint.save(folder, 10, state(10), {"kind": "a"})
    checkpoint.save(folder, 20, state(20), {"kind": "b"})


def assert_latest(folder: Path, number: int) -> None:
    found, tensors, _ = checkpoint.load_latest(folder)
    assert found == number
    assert torch.equal(tensors["weights"], state(number)["weights"])


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {
        "view": flat[:6].view(2, 3),
        "other view": flat[3:9],
        "transposed": flat.view(3, 4).T,
        "last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "learned": torch.nn.Parameter(torch.ones(2)),
    }
    checkpoint.save(tmp_path, 123, tensors, {"seed": "0", "words": "ä\n"})
    number, loaded, meta = checkpoint.load_latest(tmp_path)
    assert (number, meta, names(tmp_path)) == (123, {"seed": "0", "words": "ä\n"}, ["round-000123.safetensors"])
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in (5, 999_999, 1_000_000):
        checkpoint.save(tmp_path, number, state(number), {})
    assert names(tmp_path) == ["round-1000000.safetensors", "round-999999.safetensors"]
    assert_latest(tmp_path, 1_000_000)


def test_a_save_drops_what_a_resume_gave_up_and_leftovers(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    (tmp_path / ".round-000017.safetensors.tmp").touch()
    checkpoint.save(tmp_path, 15, state(15), {})
    assert names(tmp_path) == ["round-000010.safetensors", "round-000015.safetensors"]


def test_no_checkpoint_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            checkpoint.load_latest(folder)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_newest_falls_back_to_the_one_before(tmp_path: Path, size: int) -> None:
    two_checkpoints(tmp_path)
    newest = tmp_path / "round-000020.safetensors"
    newest.write_bytes(newest.read_bytes()[:size])
    with pytest.warns(UserWarning, match=r"round-000020\.safetensors is damaged"):
        assert_latest(tmp_path, 10)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.save_model(path, state(3), {"kind": "a"})
    good = path.read_bytes()
    harmless = 0
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            tensors, meta = checkpoint.load_model(path)
        except CheckpointError:
            continue
        # White space around the header carries nothing.
        assert (tensors["weights"].tolist(), meta) == (state(3)["weights"].tolist(), {"kind": "a"})
        harmless += 1
    assert harmless <= 8
    path.write_bytes(good)
    checkpoint.load_model(path)


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(CheckpointError, match="no readable checkpoint"):
        checkpoint.load_latest(tmp_path)


def test_a_full_disk_keeps_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_checkpoints(tmp_path)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        with pytest.raises(CheckpointError, match=r"round-000030.*disk is full.*is kept"):
            checkpoint.save(tmp_path, 30, state(30), {})
    assert names(tmp_path) == before
    assert_latest(tmp_path, 20)


LIMITED = """
import resource, sys, torch
from pathlib import Path
from semidfl.errors import CheckpointError
from semidfl.record import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    checkpoint.save(Path(sys.argv[1]), 30, {"weights": torch.zeros(100_000)}, {})
except CheckpointError as error:
    print(error)
"""


def test_a_write_that_the_system_refuses_midway_keeps_the_last_good_one(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    before = names(tmp_path)
    told, _ = python(LIMITED, tmp_path).communicate(timeout=60)
    assert "larger than allowed" in told
    assert names(tmp_path) == before
    assert_latest(tmp_path, 20)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from semidfl.record import checkpoint
setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
checkpoint.save(Path(sys.argv[1]), 30, {"weights": torch.full((2, 3), 30.0)}, {})
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_kill_between_write_and_replace_leaves_a_loadable_state(tmp_path: Path, moment: str) -> None:
    two_checkpoints(tmp_path)
    with python(KILLED, tmp_path, moment) as process:
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert ".round-000030.safetensors.tmp" in names(tmp_path)
    assert_latest(tmp_path, 20)
    checkpoint.save(tmp_path, 30, state(30), {})
    assert names(tmp_path) == ["round-000020.safetensors", "round-000030.safetensors"]
    assert_latest(tmp_path, 30)


def test_models_are_written_and_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "models" / "client-0.safetensors"
    checkpoint.save_model(path, state(1), {"model": "cnn"})
    tensors, meta = checkpoint.load_model(path)
    assert meta == {"model": "cnn"}
    assert torch.equal(tensors["weights"], state(1)["weights"])
    with pytest.raises(CheckpointError, match="there is no file"):
        checkpoint.load_model(tmp_path / "none.safetensors")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"weights": torch.full((2, 3), 1.0, device="cuda")}, {})
    assert_latest(tmp_path, 1)


# --- pictures and atomic writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_shows_every_image_at_its_place(tmp_path: Path, channels: int) -> None:
    shown = np.random.default_rng(0).integers(0, 256, (2, 3, channels, 4, 5), dtype=np.uint8)
    images.save_png(tmp_path / "samples" / "a.png", shown, scale=2)
    with Image.open(tmp_path / "samples" / "a.png") as picture:
        pixels = np.asarray(picture).reshape(2 * 8 + 2, 3 * 10 + 2 * 2, channels)
    for row in range(2):
        for column in range(3):
            tile = pixels[row * 10 : row * 10 + 8, column * 12 : column * 12 + 10]
            assert np.array_equal(tile[::2, ::2].transpose(2, 0, 1), shown[row, column])
            assert np.array_equal(tile[1::2, 1::2].transpose(2, 0, 1), shown[row, column])
    assert (pixels[8:10] == 255).all()
    assert names(tmp_path / "samples") == ["a.png"]


def test_a_grid_refuses_other_arrays() -> None:
    for shape, kind in (((2, 3, 2, 4, 4), np.uint8), ((3, 1, 4, 4), np.uint8), ((1, 1, 1, 4, 4), np.float32)):
        with pytest.raises(ValueError, match="need uint8"):
            images.grid(np.zeros(shape, kind))


def test_a_picture_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(RunFolderError, match=r"a\.png: the disk is full"):
        images.save_png(tmp_path / "a.png", np.zeros((1, 1, 1, 2, 2), np.uint8))
    assert names(tmp_path) == []


def test_an_interrupted_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_and_stop() -> None:
        with replacing(path) as temp:
            temp.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]
