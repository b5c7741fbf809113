"""Runs on Ray: the same numbers as in memory, wherever clients are and whoever is lost on the way."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray", reason="Ray is not installed: pip install 'semidfl[ray]'")

from semidfl.bench.ray import main as bench
from semidfl.cli import main
from semidfl.cluster.start import cluster, need_ray
from semidfl.config import Config, to_toml
from semidfl.errors import CheckpointError, ConfigError, DataError, SemiDFLError, Stopped
from semidfl.experiment import resume, run
from semidfl.record.folder import read_records
from semidfl.terminal import Progress
from tests.fragile import MARKS
from tests.small import flags
from tests.test_rounds import ten

# An actor takes seconds to come up and Ray itself some more, on a busy machine many.
pytestmark = pytest.mark.timeout(600)

ROUNDS = 5


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Ray for all tests that do not start their own: room for three actors or more. Started as runs start theirs,
    which try again where a busy machine was too slow for Ray."""
    os.environ[MARKS] = str(tmp_path_factory.mktemp("marks"))
    with cluster(spread(3)) as module:
        yield module


def spread(actors: int, **overrides: object) -> Config:
    """The paper's ten clients on Ray, small and deterministic."""
    exact = {"rounds": ROUNDS, "classifier__iterations": 3, "compute__deterministic": True, "compute__report": False}
    exact["aggregation__gossip"] = 2
    return ten(**(exact | {"compute__engine": "ray", "compute__actors": actors} | overrides))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run in memory."""
    return run(spread(0, compute__engine="memory"), tmp_path_factory.mktemp("alone"), progress=silent()).folder


def silent() -> Progress:
    return Progress(plain=True, stream=io.StringIO())


def models(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted((folder / "models").iterdir())}


def figures(folder: Path) -> list[dict[str, Any]]:
    """All that a run has told, but for its times."""
    return [{k: x for k, x in record.items() if k not in ("seconds", "ray")} for record in read_records(folder)]


def assert_same(ours: Path, theirs: Path) -> None:
    """Bit for bit."""
    mine, expected = models(ours), models(theirs)
    assert mine.keys() == expected.keys()
    assert len(expected) == 20  # a classifier and a generator of each client
    for name, tensors in expected.items():
        assert all(torch.equal(x, mine[name][part]) for part, x in tensors.items()), name
    assert figures(ours) == figures(theirs)
    for name in ("clients.json", "confusion.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    cards = [(folder / "model_card.md").read_text().partition("## Accuracy")[0] for folder in (ours, theirs)]
    assert cards[0].splitlines()[4:] == cards[1].splitlines()[4:]  # below the names of run and method
    for path in (theirs / "samples").iterdir():
        assert path.read_bytes() == (ours / "samples" / path.name).read_bytes()


def actors_left(ray: Any) -> int:
    """Processes that still host clients; a killed one needs a moment."""
    for _ in range(50):
        left = sum("ray::Host" in name for name in session(os.getsid(0)))
        if not left:
            return 0
        time.sleep(0.2)
    return left


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actors", [2, 3])
def test_clients_in_actors_end_with_the_bits_they_end_with_in_memory(
    ray: Any, alone: Path, tmp_path: Path, actors: int
) -> None:
    result = run(spread(actors), tmp_path / "run", progress=silent())
    assert_same(result.folder, alone)
    assert result.summary["device"].startswith(f"{actors} actors on cpu: ")
    records = read_records(result.folder)
    assert records[0]["ray"]["startup"] > 0
    assert all("startup" not in record["ray"] for record in records[1:])
    for record in records:
        assert record["ray"]["actors"] == actors
        assert set(record["ray"]["bytes"]) == {"classifiers", "counts", "models", "models-2"}
        # Fewer than all edges are cut, and a client goes to an actor once, however many neighbours it has there.
        assert all(0 < n < sum(record["bytes_sent"][topic]) for topic, n in record["ray"]["bytes"].items())
        assert 0 <= record["ray"]["waiting"] <= record["ray"]["exchange"] <= record["seconds"]["round"]
    assert len(list((result.folder / "samples").glob("*.png"))) == 2
    assert not list(result.folder.glob(".seen-*"))
    assert actors_left(ray) == 0


def test_stacked_clients_agree_to_rounding(ray: Any, tmp_path: Path) -> None:
    """To 1e-4 in all figures and classifiers. Some weights of a generator have no effect (a bias before a
    normalisation), so that Adam makes whole steps of rounding errors: generators are held as vectors."""
    here = run(spread(0, compute__engine="memory", compute__deterministic=False), tmp_path / "here", progress=silent())
    there = run(spread(2, compute__deterministic=False), tmp_path / "there", progress=silent())
    found = models(there.folder)
    for name, tensors in models(here.folder).items():
        ours, theirs = (torch.cat([x[part].flatten() for part in tensors]) for x in (found[name], tensors))
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
        if name.startswith("classifier"):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    for mine, expected in zip(figures(there.folder), figures(here.folder), strict=True):
        assert flat(mine) == pytest.approx(flat(expected), abs=1e-4, nan_ok=True)


def flat(x: Any) -> list[float]:
    """All numbers of a record, in the order of names."""
    if isinstance(x, dict):
        return [n for name in sorted(x) for n in flat(x[name])]
    if isinstance(x, list):
        return [n for row in x for n in flat(row)]
    return [float("nan") if x is None else float(x)]


def test_a_run_goes_on_with_other_actors_and_without_any(ray: Any, alone: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="after round 2"):
        run(spread(2), tmp_path / "run", progress=Interrupting(1))  # heard of in the round after
    with pytest.raises(Stopped, match="after round 4"):
        resume(tmp_path / "run", Interrupting(3), {"engine": "memory"})
    with pytest.raises(ConfigError, match=r"only compute\.\* can change"):
        resume(tmp_path / "run", silent(), {"rounds": 9})
    assert_same(resume(tmp_path / "run", silent(), {"engine": "ray", "actors": 3}).folder, alone)


def test_a_run_that_has_lost_a_part_of_its_checkpoint_is_not_begun_anew(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="after round 3"):
        run(spread(2), tmp_path / "run", progress=Interrupting(2))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2-of-2")
    with pytest.raises(CheckpointError, match=r"^no checkpoint can be read .* has to start anew"):
        resume(tmp_path / "run", silent())


class Interrupting(Progress):
    """Presses Ctrl-C in a round."""

    def __init__(self, at: int) -> None:
        super().__init__(plain=True, stream=io.StringIO())
        self.at = at

    def update(self, round: int, record: Any) -> None:
        super().update(round, record)
        if round == self.at:
            os.kill(os.getpid(), signal.SIGINT)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_lost_actor_is_replaced_and_the_round_done_again(ray: Any, alone: Path, tmp_path: Path) -> None:
    shown = silent()
    result = run(spread(2, method="tests.fragile:DiesOnce", name="dies"), tmp_path / "run", progress=shown)
    assert_same(result.folder, alone)
    assert result.summary["faults"] == 1
    assert "1 actors were lost in round 3" in shown.stream.getvalue()  # type: ignore[attr-defined]
    assert "from round 3 on with 2 actors" in shown.stream.getvalue()  # type: ignore[attr-defined]


def test_a_parcel_that_is_lost_stalls_nobody(ray: Any, alone: Path, tmp_path: Path) -> None:
    shown = silent()
    config = spread(2, method="tests.fragile:LosesMailOnce", name="lost")
    result = run(config, tmp_path / "run", progress=shown)
    assert_same(result.folder, alone)
    assert result.summary["faults"] == 1
    assert "round 3 was not finished" in shown.stream.getvalue()  # type: ignore[attr-defined]


def test_a_loss_before_the_first_checkpoint_starts_from_the_beginning(ray: Any, alone: Path, tmp_path: Path) -> None:
    config = spread(2, method="tests.fragile:DiesOnce", name="early", compute__checkpoint_every=4)
    assert_same(run(config, tmp_path / "run", progress=silent()).folder, alone)


def test_a_loss_without_checkpoints_is_a_clear_error(ray: Any, tmp_path: Path) -> None:
    config = spread(2, method="tests.fragile:DiesOnce", name="none", compute__checkpoint_every=0)
    with pytest.raises(CheckpointError, match=r"lost after round 2 and there is no checkpoint .* has to start anew"):
        run(config, tmp_path / "run", progress=silent())
    assert actors_left(ray) == 0


def test_a_fault_that_comes_again_and_again_ends_the_run(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semidfl.cluster.driver._FAULTS", 1)
    config = spread(2, method="tests.fragile:AlwaysDies", compute__checkpoint_every=4)  # rounds 1 and 2 succeed again
    with pytest.raises(SemiDFLError, match="gave up after 2 faults at round 3"):
        run(config, tmp_path / "run", progress=silent())
    assert actors_left(ray) == 0


def test_an_error_in_an_actor_is_told_as_it_is(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^client 7 has no such sample$"):
        run(spread(2, method="tests.fragile:Refuses"), tmp_path / "run", progress=silent())
    assert actors_left(ray) == 0


def test_more_than_a_node_has_is_refused(ray: Any, tmp_path: Path) -> None:
    most = int(ray.cluster_resources()["CPU"])
    with pytest.raises(SemiDFLError, match=rf"compute.cores = {most + 1}: no node .* the largest has {most}$"):
        run(spread(2, compute__cores=most + 1), tmp_path / "run", progress=silent())
    with pytest.raises(SemiDFLError, match="no node of the Ray cluster has a GPU"):
        run(spread(2, compute__device="cuda"), tmp_path / "gpu", progress=silent())


# --- many runs --------------------------------------------------------------------------------------------------------


def test_a_table_and_a_sweep_are_spread_over_the_cluster(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        f for f in flags(rounds=2, method="dfl-lb") if not f.startswith(("--name", "--graph", "--data", "--method"))
    ]
    asked = ["--dataset=digits", "--ratio=5", "--alpha=100", "--method=dfl-lb", "--seeds=2", *small]
    assert main(["reproduce", "table-main", *asked, "--engine=ray"]) == 0
    out = capsys.readouterr().out
    assert "run 2/2  dfl-lb digits" in out
    spread_table = (tmp_path / "results/table-main-digits.csv").read_text()
    assert main(["reproduce", "table-main", *asked, "--runs=here", "--out=here"]) == 0
    assert untimed(spread_table) == untimed((tmp_path / "here/table-main-digits.csv").read_text())
    words = ["sweep", "paper", *flags(rounds=2, method="dfl-lb"), "--classifier.lr=0.05,0.1,-1"]
    assert main([*words, "--engine=ray", "--name=s"]) == 2
    assert "classifier.lr = -1.0 is not legal" in capsys.readouterr().err
    assert main([*words[:-1], "--classifier.lr=0.05,0.1", "--engine=ray", "--name=s"]) == 0
    assert main([*words[:-1], "--classifier.lr=0.05,0.1", "--name=t"]) == 0
    tables = [(tmp_path / f"runs/{name}/sweep.csv").read_text() for name in "st"]
    assert untimed(tables[0]) == untimed(tables[1])


def untimed(text: str) -> list[list[str]]:
    """The cells of a table, without those of the column `seconds`."""
    rows = [line.split(",") for line in text.splitlines()]
    at = rows[0].index("seconds")
    return sorted([cell for k, cell in enumerate(row) if k != at] for row in rows)


# --- clusters of their own --------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to the whole group of processes."""
    config = spread(2, method="dfl-lb", rounds=10**6, evaluation__every=1)
    (tmp_path / "config.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "semidfl", "run", "config.toml"]
    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    told = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": os.environ | {"PYTHONPATH": paths},
    }
    started = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **told)
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("round"):
            break
    os.killpg(started.pid, signal.SIGINT)
    rest = started.stdout.read()
    assert started.wait(120) == 130, rest
    assert "go on with: semidfl resume runs/tiny" in rest
    done = len(read_records(tmp_path / "runs/tiny"))
    assert (tmp_path / f"runs/tiny/checkpoints/2-of-2/round-{done:06d}.safetensors").exists()
    for _ in range(100):
        if not (left := session(started.pid)):
            break
        time.sleep(0.2)
    assert left == []


def session(leader: int) -> list[str]:
    """What is still running of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *numbers = path.read_text().rpartition(")")[2].split()
            if int(numbers[2]) == leader and state != "Z":
                found.append(path.with_name("cmdline").read_text().replace("\0", " "))
    return found


def test_many_clients_are_measured_against_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The small version of `make bench-ray`."""
    assert bench(["--clients", "40", "--rounds", "2", "--actors", "2", "--format", "json"]) == 0
    memory, ray = json.loads(capsys.readouterr().out)
    assert ray["accuracy"] == pytest.approx(memory["accuracy"], abs=0.01)
    assert ray["startup"] > 0
    assert 0 < ray["sent"] < 40 * 4 * 4 * 7000
    assert 10**8 < memory["memory"] < ray["memory"] < 4 * 2**30


def test_a_node_is_lost_in_the_middle_of_a_run(alone: Path, tmp_path: Path) -> None:
    """Three nodes on this machine, an actor on each; with one gone, two actors share its clients."""
    module = need_ray()
    module.shutdown()
    from ray.cluster_utils import Cluster

    store = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    # A node is lost after ten seconds, not half a minute; less, and a busy machine loses one while it starts.
    soon = {"health_check_initial_delay_ms": 5000, "health_check_period_ms": 500, "health_check_failure_threshold": 20}
    head = store | {"include_dashboard": False, "_system_config": soon}
    machines = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [machines.add_node(**store) for _ in range(2)]
        config = spread(3, compute__ray_address=machines.address)
        shown = Removing(2, lambda: machines.remove_node(nodes[1], allow_graceful=False))
        result = run(config, tmp_path / "run", progress=shown)
    finally:
        module.shutdown()
        machines.shutdown()
    assert_same(result.folder, alone)
    assert result.summary["faults"] == 1
    assert [record["ray"]["actors"] for record in read_records(result.folder)][-1] == 2


class Removing(Progress):
    """Takes something away while the round after `at` goes on."""

    def __init__(self, at: int, remove: Any) -> None:
        super().__init__(plain=True, stream=io.StringIO())
        self.at, self.remove = at, remove

    def update(self, round: int, record: Any) -> None:
        super().update(round, record)
        if round == self.at and self.remove:
            import threading

            threading.Thread(target=self.remove, daemon=True).start()
            self.remove = None
