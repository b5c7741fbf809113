"""Who goes on with a run must find it as it was: its data, its federation file, its figures, its checkpoint's parts."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import QUICK
from folders import digits, save
from small import tiny

import semidfl
from semidfl import experiment
from semidfl.cohort import Cohort
from semidfl.config import Config, from_toml, override
from semidfl.data.dataset import load_npz
from semidfl.errors import CheckpointError, DataError, RunFolderError
from semidfl.experiment import prepare, save_checkpoint
from semidfl.node.audit import Audit
from semidfl.node.federation import Federation, read
from semidfl.node.local import new_federation
from semidfl.node.restart import SENT_BEFORE, open_folder, sent, take_up
from semidfl.node.site import load_site
from semidfl.record import checkpoint, parts
from semidfl.record.folder import RunFolder, read_records
from semidfl.record.history import History
from semidfl.together import joined

CPU = torch.device("cpu")
Arrays = dict[str, np.ndarray]


def write_data(path: Path, change: Callable[[Arrays], object] = lambda arrays: None) -> Path:
    images, labels = (np.array(x) for x in zip(*digits(400), strict=True))
    arrays = {"x_train": images[:300], "y_train": labels[:300], "x_test": images[300:], "y_test": labels[300:]}
    change(arrays)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Config, Path], None]:
    """Begins a run that fails after the checkpoint of a round."""

    def begin(last: int, config: Config, folder: Path) -> None:
        def save_or_fail(config: Config, kept: RunFolder, done: int, cohort: Cohort) -> None:
            save_checkpoint(config, kept, done, cohort)
            if done == last:
                raise DataError("stopped here")

        with monkeypatch.context() as patch:
            patch.setattr(experiment, "save_checkpoint", save_or_fail)
            with pytest.raises(DataError, match="stopped here"):
                semidfl.run(config, folder)

    return begin


def rounds_of(folder: Path) -> list[int]:
    return [record["round"] for record in read_records(folder)]


# --- the data ---------------------------------------------------------------------------------------------------------


def flip_a_bit(arrays: Arrays, name: str) -> None:
    arrays[name] = arrays[name].copy()
    arrays[name].flat[5] ^= 1


def swap_two(arrays: Arrays) -> None:
    arrays["x_train"], arrays["y_train"] = (arrays[n][[1, 0, *range(2, 300)]] for n in ("x_train", "y_train"))


CHANGES: dict[str, Callable[[Arrays], object]] = {
    "an image": lambda arrays: flip_a_bit(arrays, "x_train"),
    "a label": lambda arrays: flip_a_bit(arrays, "y_train"),
    "a test image": lambda arrays: flip_a_bit(arrays, "x_test"),
    "a test label": lambda arrays: flip_a_bit(arrays, "y_test"),
    "the order": swap_two,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_refused_and_the_same_data_goes_on(change: str, tmp_path: Path, stop_after: Any) -> None:
    config = tiny(method="dfl-lb", rounds=3, data__dataset=str(write_data(tmp_path / "data.npz")))
    stop_after(2, config, tmp_path / "run")
    write_data(tmp_path / "data.npz", CHANGES[change])
    with pytest.raises(CheckpointError, match=r"the data is not what this run began with .*--overwrite"):
        semidfl.resume(tmp_path / "run")
    assert rounds_of(tmp_path / "run") == [1, 2]
    write_data(tmp_path / "data.npz")
    semidfl.resume(tmp_path / "run")
    assert rounds_of(tmp_path / "run") == [1, 2, 3]


def test_pictures_that_were_added_to_a_folder_are_noticed(tmp_path: Path, stop_after: Any) -> None:
    for k, (pixels, label) in enumerate(digits(150)):
        save(tmp_path / "own" / (str(label) if k < 100 else "unlabeled") / f"{k}.png", pixels)
    stop_after(2, tiny(method="dfl-lb", rounds=3, data__dataset=str(tmp_path / "own")), tmp_path / "run")
    for k, (pixels, label) in enumerate(digits(170)[150:]):
        save(tmp_path / "own" / str(label) / f"new-{k}.png", pixels)
    with pytest.raises(CheckpointError, match="the data is not what this run began with"):
        semidfl.resume(tmp_path / "run")


def test_a_checkpoint_from_before_prints_goes_on(tmp_path: Path, stop_after: Any) -> None:
    config = tiny(method="dfl-lb", rounds=3, data__dataset=str(write_data(tmp_path / "data.npz")))
    stop_after(2, config, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        tensors, meta = checkpoint.load_model(file)
        del tensors["data"]
        checkpoint.save_model(file, tensors, meta)
    semidfl.resume(tmp_path / "run")
    assert rounds_of(tmp_path / "run") == [1, 2, 3]


def test_clients_have_the_same_print_alone_in_blocks_and_among_other_runs(tmp_path: Path) -> None:
    data = load_npz(write_data(tmp_path / "data.npz"))
    configs = [tiny(name="a"), tiny(name="b", seed=1)]
    alone = [prepare(config, data) for config in configs]
    prints = [cohort.shards.prints for _, cohort in alone]
    assert prints[0] is not None
    assert len(set(prints[0].tolist())) == 4
    assert torch.equal(prepare(configs[0], data, [2, 0])[1].shards.prints, prints[0][[2, 0]])
    _, cohort, runs = joined(configs, alone)
    assert all(torch.equal(run.part(cohort).state()["data"], own) for run, own in zip(runs, prints, strict=True))


# --- its figures ------------------------------------------------------------------------------------------------------


def test_lost_figures_are_refused_and_can_be_done_again(tmp_path: Path, stop_after: Any) -> None:
    config = tiny(method="dfl-lb", data__dataset=str(write_data(tmp_path / "data.npz")))
    whole = semidfl.run(config, tmp_path / "whole").summary
    stop_after(4, config, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.unlink()
    with pytest.raises(RunFolderError, match="lost rounds 1 to 4"):
        semidfl.resume(tmp_path / "run")
    metrics.write_bytes(b"".join(lines[:3]))
    with pytest.raises(RunFolderError, match=r"lost round 4, .*remove the checkpoints after round 3"):
        semidfl.resume(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "round-000004.safetensors").unlink()
    again = semidfl.resume(tmp_path / "run").summary
    assert (again["per_client"], again["rounds"]) == (whole["per_client"], whole["rounds"])


def test_names_of_new_files_and_folders_are_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: set[int] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (forced.add(os.fstat(handle).st_ino), fsync(handle)))
    with RunFolder.create(tmp_path / "runs" / "a", "") as folder:
        assert {tmp_path.stat().st_ino, (tmp_path / "runs").stat().st_ino} <= forced
        folder.append({"round": 1})
        forced.clear()
        folder.sync()
        assert forced == {folder.path.stat().st_ino, (folder.path / "metrics.jsonl").stat().st_ino}


# --- the parts of a checkpoint ----------------------------------------------------------------------------------------


def save_part(folder: Path, part: int, t: int, value: float) -> None:
    parts.save(folder, part, 2, t, [2 * part, 2 * part + 1], {"x": torch.full((2, 1), value)}, "c")


def test_parts_of_two_histories_are_never_mixed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "") as kept:
        for t in (1, 2):
            kept.append({"round": t})
            for part in (0, 1):
                save_part(kept.checkpoints, part, t, t)
        (kept.checkpoints / "2-of-2" / "round-000002.safetensors").write_bytes(b"broken")
        with pytest.warns(UserWarning, match="trying the checkpoint before it"):
            done, _ = parts.load_latest(kept.checkpoints, range(4), "c")
        kept.truncate(done)
        save_part(kept.checkpoints, 1, 2, 777)  # round 2 of another history; and killed before the other part
        done, found = parts.load_latest(kept.checkpoints, range(4), "c")
        assert (done, found["x"].flatten().tolist()) == (1, [1, 1, 1, 1])


def test_a_run_killed_in_its_first_checkpoint_of_parts_starts_from_the_beginning(
    tmp_path: Path, stop_after: Any
) -> None:
    config = tiny(method="dfl-lb", rounds=3, data__dataset=str(write_data(tmp_path / "data.npz")))
    stop_after(1, config, tmp_path / "run")
    saved, part = tmp_path / "run" / "checkpoints", tmp_path / "run" / "checkpoints" / "1-of-2"
    part.mkdir()
    shutil.move(saved / "round-000001.safetensors", part)
    semidfl.resume(tmp_path / "run")
    assert rounds_of(tmp_path / "run") == [1, 2, 3]


def test_a_lost_part_is_not_taken_for_a_first_checkpoint(tmp_path: Path, stop_after: Any) -> None:
    config = tiny(method="dfl-lb", rounds=3, data__dataset=str(write_data(tmp_path / "data.npz")))
    stop_after(2, config, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints"
    files = list(saved.iterdir())
    (saved / "1-of-2").mkdir()
    for file in files:
        shutil.move(file, saved / "1-of-2")
    with pytest.raises(CheckpointError, match="start anew"):
        semidfl.resume(tmp_path / "run")
    assert rounds_of(tmp_path / "run") == [1, 2]


# --- a peer's federation file, data and run folder --------------------------------------------------------------------


IMAGES = {"classes": [str(k) for k in range(10)], "channels": 1, "height": 8, "width": 8}


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    peers = {name: (role, f"127.0.0.1:{5000 + k}") for k, (name, role) in enumerate({"a": "L", "b": "M"}.items())}
    config = {path: value for path, value in QUICK.items() if path != "data.ratio"}
    values = {"name": "test", "recipe": "paper", "topology": "line"}
    return new_federation(tmp_path / "f", peers, values, {"config": config, "images": IMAGES})


def peer(federation: Federation, data: Path, **compute: object) -> tuple[Config, Cohort]:
    config = override(federation.config, {"name": "a", "compute.device": "cpu"} | compute)
    site = load_site(data, federation.images.space, "L")
    method, whole = prepare(config, load_npz(data), (0,), federation.graph)
    return config, experiment.gather(method, whole.ids, site.shards(CPU))


def one_round(folder: Path, federation: Federation, data: Path) -> None:
    config, cohort = peer(federation, data)
    with open_folder(folder, config, overwrite=False) as kept:
        done, marks = take_up(kept, config, federation, cohort)
        kept.append({"round": done + 1})
        save_checkpoint(config, kept, done + 1, cohort, marks)


def goes_on(folder: Path, federation: Federation, data: Path, **compute: object) -> int:
    config, cohort = peer(federation, data, **compute)
    with open_folder(folder, config, overwrite=False) as kept:
        return take_up(kept, config, federation, cohort)[0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"0", "1"', '"1", "0"', "classes"),
        ("[images]", "[images]\nmean = [0.1]\nstd = [0.9]", "images"),
        ('role = "M"', 'role = "U"', "another config"),
        ('name = "b"', 'name = "c"', "peers"),
    ],
)
def test_a_peer_refuses_another_federation_file(
    old: str, new: str, words: str, federation: Federation, tmp_path: Path
) -> None:
    data, path = write_data(tmp_path / "data.npz"), tmp_path / "f" / "federation.toml"
    one_round(tmp_path / "run", federation, data)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=rf"{words}.*--overwrite"):
        goes_on(tmp_path / "run", read(path), data)
    path.write_text(text.replace("5001", "5002"))  # where a peer is found is no part of what is agreed
    assert goes_on(tmp_path / "run", read(path), data) == 1


def test_a_peer_refuses_other_data_of_its_own(federation: Federation, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.npz")
    one_round(tmp_path / "run", federation, data)
    for change in CHANGES.values():
        with pytest.raises(CheckpointError, match="the data is not what this run began with"):
            goes_on(tmp_path / "run", federation, write_data(tmp_path / "other.npz", change))
    assert goes_on(tmp_path / "run", federation, data) == 1


def test_a_peers_checkpoint_from_before_marks_goes_on(federation: Federation, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.npz")
    config, cohort = peer(federation, data)
    with open_folder(tmp_path / "run", config, overwrite=False) as kept:
        kept.append({"round": 1})
        save_checkpoint(config, kept, 1, cohort)
    with open_folder(tmp_path / "run", config, overwrite=False) as kept:
        done, marks = take_up(kept, config, federation, cohort)
    assert (done, marks[SENT_BEFORE]) == (1, "0")


def test_config_toml_of_a_peer_is_of_the_run_that_goes_on(federation: Federation, tmp_path: Path) -> None:
    """Also where the peer was stopped before its first round, and the federation file has been changed since."""
    data, path = write_data(tmp_path / "data.npz"), tmp_path / "f" / "federation.toml"
    assert goes_on(tmp_path / "run", federation, data) == 0
    path.write_text(path.read_text().replace("rounds = 5", "rounds = 9"))
    assert goes_on(tmp_path / "run", read(path), data) == 0
    assert from_toml((tmp_path / "run" / "config.toml").read_text()).rounds == 9
    one_round(tmp_path / "run", read(path), data)
    goes_on(tmp_path / "run", read(path), data, **{"compute.threads": 2})
    kept = from_toml((tmp_path / "run" / "config.toml").read_text())
    assert (kept.rounds, kept.compute.threads, kept.name) == (9, 2, "a")


def test_bytes_of_an_overwritten_run_are_not_counted(federation: Federation, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.npz")
    one_round(tmp_path / "run", federation, data)
    audit = Audit(tmp_path / "run")
    audit.sends("b", "models", 1, ["classifier"], 1000, b"x" * 32)
    config, cohort = peer(federation, data)
    with open_folder(tmp_path / "run", config, overwrite=True) as kept:
        _, marks = take_up(kept, config, federation, cohort)
        kept.append({"round": 1})
        save_checkpoint(config, kept, 1, cohort, marks)
    audit.sends("b", "models", 1, ["classifier"], 30, b"x" * 32)
    audit.close()
    with open_folder(tmp_path / "run", config, overwrite=False) as kept:  # and it goes on, which changes nothing
        _, marks = take_up(kept, config, federation, cohort)
    assert sent(tmp_path / "run") - int(marks[SENT_BEFORE]) == 30


# --- who only looks ---------------------------------------------------------------------------------------------------


def test_looking_at_a_folder_runs_no_code_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "open('owned', 'w')\ndef go(n, seed): return [(i, i + 1) for i in range(n - 1)]\n"
    (tmp_path / "payload.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with RunFolder.create(tmp_path / "run", '[graph]\ntopology = "payload:go"\n'):
        pass
    History(tmp_path / "run").refresh()
    assert not (tmp_path / "owned").exists()
