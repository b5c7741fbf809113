"""Resumed == uninterrupted, bit for bit: killed at any moment, stopped by a signal, or failed in the middle."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small import flags, tiny

import semidfl
from semidfl.cli import main
from semidfl.data.sources import load
from semidfl.terminal import Progress

ROUNDS = 8
# With averages, which are to be resumed too.
VALUES: dict[str, Any] = {"rounds": ROUNDS, "classifier__iterations": 4, "classifier__ema": 0.5, "generator__ema": 0.5}
SEMIDFL = [sys.executable, "-m", "semidfl"]

# Kills itself when Python is about to do something to a file (see "Audit events table" in Python's documentation).
KILL = """
import os, signal, sys
def hook(event, args):
    if event == sys.argv[1] and any(sys.argv[2] in str(arg) for arg in args):
        os.kill(os.getpid(), signal.SIGKILL)
from semidfl.cli import main
sys.addaudithook(hook)
main(sys.argv[3:])
"""


def tensors(folder: Path, files: str) -> dict[str, torch.Tensor]:
    return {f"{file.name}: {name}": x for file in folder.glob(files) for name, x in load_file(file).items()}


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same(one: Path, two: Path) -> None:
    """All that two runs leave is the same, apart from seconds."""
    assert [untimed(r) for r in records(one)] == [untimed(r) for r in records(two)]
    summaries = [untimed(json.loads((folder / "summary.json").read_text())) for folder in (one, two)]
    assert summaries[0] == summaries[1]
    for part in (f"checkpoints/round-{len(records(one)):06d}*", "models/*"):
        a, b = tensors(one, part), tensors(two, part)
        assert a
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
    pictures = [{file.name: file.read_bytes() for file in (folder / "samples").iterdir()} for folder in (one, two)]
    assert pictures[0] == pictures[1]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of all runs; on some of the digits in a file, for scikit-learn takes two seconds to load."""
    data, file = load("digits"), tmp_path_factory.mktemp("data") / "some.npz"
    images, labels = data.train_images[:, 0], data.train_labels
    np.savez(file, x_train=images[:600], y_train=labels[:600], x_test=images[600:700], y_test=labels[600:700])
    return VALUES | {"data__dataset": str(file)}


@pytest.fixture(scope="module")
def run(values: dict[str, Any]) -> list[str]:
    """The command."""
    return ["run", "paper", *flags(**values)]


@pytest.fixture(scope="module")
def whole(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never stopped."""
    return semidfl.run(tiny(**values), tmp_path_factory.mktemp("whole") / "run").folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run of this test goes."""
    monkeypatch.chdir(tmp_path)
    return Path("runs/tiny")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes, and ends them with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, rounds: float, pace: float = 0.0) -> None:
    """Until the run has done so many rounds; a fraction is waited for at `pace` seconds a round."""
    while len(records_so_far(folder)) < int(rounds):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    time.sleep(rounds % 1 * pace)


def records_so_far(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


# --- killed -----------------------------------------------------------------------------------------------------------

_draw = random.Random(2)
MOMENTS = [1 + 0.9 * (k + _draw.random()) for k in range(5)]
"""in rounds, from the second to about three rounds before the end"""


@pytest.mark.parametrize("moment", MOMENTS, ids="{:.2f} rounds".format)
def test_killed_at_a_random_moment(moment: float, run: list[str], whole: Path, folder: Path, start: Any) -> None:
    pace = sum(record["seconds"]["round"] for record in records(whole)) / ROUNDS
    process = start(*SEMIDFL, *run)
    wait_for_rounds(process, folder, moment, pace)
    kill(process)
    assert not (folder / "summary.json").exists()
    assert main(["resume", str(folder)]) == 0
    assert_same(folder, whole)


@pytest.mark.parametrize(
    ("event", "file"),
    [
        ("os.rename", "round-000001.safetensors"),  # the first checkpoint is written, but has not its name yet
        ("os.rename", "round-000004.safetensors"),  # a later one
        ("os.remove", "round-000002.safetensors"),  # there is a newer one, and one too many
        ("os.rename", "summary.json"),  # all is done but the last file
    ],
)
def test_killed_while_writing(event: str, file: str, run: list[str], whole: Path, folder: Path, start: Any) -> None:
    process = start(sys.executable, "-c", KILL, event, file, *run)
    assert process.wait() == -signal.SIGKILL, process.communicate()
    assert main(["resume", str(folder)]) == 0
    assert_same(folder, whole)


def test_killed_twice(run: list[str], whole: Path, folder: Path, start: Any) -> None:
    first = start(*SEMIDFL, *run)
    wait_for_rounds(first, folder, 3)
    kill(first)
    before = len(records_so_far(folder))
    second = start(*SEMIDFL, "resume", str(folder))
    wait_for_rounds(second, folder, before + 2)
    kill(second)
    assert main(["resume", str(folder)]) == 0
    assert_same(folder, whole)


def test_killed_before_there_was_anything_to_resume(
    run: list[str], whole: Path, folder: Path, start: Any, capsys: Any
) -> None:
    process = start(sys.executable, "-c", KILL, "os.rename", "config.toml", *run)
    assert process.wait() == -signal.SIGKILL, process.communicate()
    assert main(["resume", str(folder)]) == 2
    assert "config.toml is missing" in capsys.readouterr().err
    assert main(run) == 0  # the folder is not in the way of a new run
    assert_same(folder, whole)


# --- stopped ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_after_the_round_and_says_how_to_go_on(
    run: list[str], whole: Path, folder: Path, start: Any
) -> None:
    process = start(*SEMIDFL, *run, "--compute.checkpoint_every=0")
    wait_for_rounds(process, folder, 2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    done = len(records(folder))
    assert process.returncode == 130
    assert 2 <= done < ROUNDS
    assert said == f"stopped after round {done}; go on with: semidfl resume runs/tiny\n"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"round-{done:06d}.safetensors"]

    again = start(sys.executable, "-m", *said.partition("go on with: ")[2].split())
    assert again.wait() == 0, again.communicate()
    assert_same(folder, whole)


def test_a_scheduler_s_sigterm_is_taken_like_ctrl_c(run: list[str], folder: Path, start: Any) -> None:
    process = start(*SEMIDFL, *run)
    wait_for_rounds(process, folder, 1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 130
    assert f"stopped after round {len(records(folder))}; go on with: semidfl resume runs/tiny" in said


def test_a_second_process_is_refused(run: list[str], whole: Path, folder: Path, start: Any, capsys: Any) -> None:
    process = start(*SEMIDFL, *run)
    wait_for_rounds(process, folder, 1)
    process.send_signal(signal.SIGSTOP)  # it holds the folder and does nothing
    before = records_so_far(folder)
    for words in (run, [*run, "--overwrite"], ["resume", str(folder)]):
        assert main(words) == 2
        assert f"runs/tiny is in use by another process (pid {process.pid})" in capsys.readouterr().err
    assert records_so_far(folder) == before
    kill(process)
    assert main(["resume", str(folder)]) == 0
    assert_same(folder, whole)


# --- failed in the middle, within this process ------------------------------------------------------------------------


class Fails(Progress):
    """Stands for any failure after a round's metrics are written and before its checkpoint is."""

    def __init__(self, at: int) -> None:
        super().__init__(plain=True)
        self.at = at

    def update(self, round: int, record: Mapping[str, Any]) -> None:
        if round == self.at:
            raise MemoryError


@pytest.mark.parametrize(
    "lever",
    [
        {"compute__checkpoint_every": 3, "compute__chunk": 3},
        {"compute__deterministic": True},
        {"classifier__optimizer": "adam", "classifier__schedule": "cosine", "generator__keep_agreed": True},
        {"classifier__nesterov": True, "pseudo__npl_draw": "sample", "aggregation__weights": "adatest"},
        {"generator__kind": "none", "pseudo__kind": "apl"},
        {"method": "dfl-lb"},
        {"method": "dfl-ub"},
    ],
    ids=lambda lever: " ".join(f"{name.split('__')[-1]}={value}" for name, value in lever.items()),
)
def test_failed_in_the_middle(lever: dict[str, Any], values: dict[str, Any], tmp_path: Path) -> None:
    config = tiny(**values | {"rounds": 5} | lever)
    semidfl.run(config, tmp_path / "whole")
    with pytest.raises(MemoryError):
        semidfl.run(config, tmp_path / "broken", progress=Fails(5))
    semidfl.resume(tmp_path / "broken")
    assert_same(tmp_path / "broken", tmp_path / "whole")


# --- what may be resumed ----------------------------------------------------------------------------------------------


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The finished run, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_finished_run_is_resumed_without_harm(whole: Path, copy: Path) -> None:
    assert main(["resume", str(copy)]) == 0
    assert_same(copy, whole)
    for name in ("summary.json", "metrics.jsonl"):  # the seconds too
        assert (copy / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("old", "new"), [("seed = 0", "seed = 1"), ("lr = 0.1", "lr = 0.2"), ("rounds = 8", "rounds = 9")]
)
def test_a_checkpoint_of_another_config_is_refused(old: str, new: str, copy: Path, capsys: Any) -> None:
    text = (copy / "config.toml").read_text()
    assert text.count(old) == 1
    (copy / "config.toml").write_text(text.replace(old, new))
    before = contents(copy)
    assert main(["resume", str(copy)]) == 2
    assert "another config" in capsys.readouterr().err
    assert contents(copy) == before


def test_where_a_run_is_computed_may_change(whole: Path, copy: Path) -> None:
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("checkpoint_every = 1", "checkpoint_every = 5"))
    assert main(["resume", str(copy)]) == 0
    assert_same(copy, whole)


def test_a_damaged_checkpoint_costs_one_round(whole: Path, copy: Path) -> None:
    (copy / "summary.json").unlink()
    newest = copy / "checkpoints" / f"round-{ROUNDS:06d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match="is damaged: .*trying the checkpoint before it"):
        assert main(["resume", str(copy)]) == 0
    assert_same(copy, whole)


def test_without_a_readable_checkpoint_the_run_must_start_anew(copy: Path, capsys: Any) -> None:
    for path in (copy / "checkpoints").iterdir():
        path.write_bytes(b"")
    before = contents(copy)
    with pytest.warns(UserWarning, match="is damaged"):
        assert main(["resume", str(copy)]) == 2
    assert "no readable checkpoint" in capsys.readouterr().err
    assert contents(copy) == before


def test_without_a_checkpoint_the_run_starts_anew(whole: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert main(["resume", str(copy)]) == 0
    assert_same(copy, whole)
