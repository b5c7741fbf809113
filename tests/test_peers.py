"""A federation of real processes gives what the simulator gives, and a peer's data and files are what it says."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import QUICK, SHORT, Live, digits, live, reread
from folders import save
from small import TINY

import semidfl
from semidfl.cli import main
from semidfl.config import from_toml, override
from semidfl.node.audit import sum_up
from semidfl.node.federation import read
from semidfl.record.checkpoint import load_model

FULL: dict[str, object] = {
    path: value for path, value in TINY.items() if not path.startswith(("graph.", "name", "data.dataset", "compute."))
} | {"compute.report": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits(tmp_path_factory.mktemp("data"))


def simulated(made: Live, folder: Path) -> Path:
    """The same config in memory, all clients in one process."""
    config = override(made.federation.config, {"compute.threads": 1, "compute.device": "cpu"})
    return semidfl.run(config, folder).folder


def distances(made: Live, folder: Path) -> dict[str, float]:
    """How far each peer's final weights are from those of the simulation, as a share of their length.

    Of single weights a few are further off than the rest: Adam makes whole steps of gradients that are all rounding.
    """
    found = {}
    for peer in made.federation.peers:
        for part in ("classifier", "generator"):
            for client in made.federation.clients_of(peer.name):
                file = f"models/{part}-{client:04d}.safetensors"
                if not (folder / file).exists():
                    continue
                ours, theirs = (load_model(place / file)[0] for place in (made.run_folder(peer.name), folder))
                assert ours.keys() == theirs.keys()
                mine, other = (torch.cat([x[name].flatten() for name in sorted(x)]) for x in (ours, theirs))
                found[f"{peer.name} {part} {client}"] = float((mine - other).norm() / other.norm())
    return found


TEN = {f"p{k}": role for k, role in enumerate("LLMMUUUUUU")}
LEVERS = {
    "compute.deterministic": True,
    "pseudo.align": True,
    "classifier.turns": 1.0,
    "aggregation.momentum": True,
    "aggregation.idle": 0.2,
    "aggregation.gossip": 2,
}
SHORTENED = {
    "compute.deterministic": True,
    "exchange.dtype": "bf16",
    "exchange.generator_dtype": "int8",
    "aggregation.robust": "median",
    "aggregation.gossip": 3,
    "attack.kind": "sign-flip",
    "attack.who": "3",
}
PATIENT = SHORT | {"round": 60.0, "hello": 60.0, "transfer": 30.0, "linger": 30.0}


def assert_undisturbed(made: Live, rounds: int) -> None:
    for peer in made.federation.peers:
        records = made.records(peer.name)
        assert [record["round"] for record in records] == list(range(1, rounds + 1))
        assert not any(record["missing"] or record["stale"] or record["refused"] for record in records)


@pytest.mark.parametrize(
    ("roles", "topology", "more", "most"),
    [
        (TEN, "fig1", LEVERS, 0.0),
        (TEN, "fig1", {}, 1e-4),
        ({f"p{k}": role for k, role in enumerate("LMUUU")}, "full", SHORTENED, 0.0),
    ],
    ids=["bit for bit", "to rounding", "few bytes, among a liar"],
)
def test_peers_end_with_the_weights_of_the_simulation(
    roles: dict[str, str], topology: str, more: dict[str, object], most: float, data: Path, tmp_path: Path
) -> None:
    with live(tmp_path / "f", data, roles, FULL | more, topology=topology, deadlines=PATIENT) as made:
        made.start_all()
        whole = simulated(made, tmp_path / "whole")
        made.ends(*roles, limit=120.0)
        gaps = distances(made, whole)
        assert len(gaps) == 2 * len(roles)
        assert max(gaps.values()) <= most, gaps
        assert_undisturbed(made, 5)


def test_a_peer_that_hosts_several_clients(data: Path, tmp_path: Path) -> None:
    """Seven clients at three peers, still bit for bit."""
    config = FULL | {"compute.deterministic": True, "rounds": 3}
    roles = {"a": "M", "b": "L", "c": "U"}
    with live(tmp_path / "f", data, roles, config, topology="ring", deadlines=PATIENT) as made:
        for name, clients in (("a", 2), ("c", 4)):
            reread(made, lambda text, n=name, k=clients: text.replace(f'name = "{n}"', f'name = "{n}"\nclients = {k}'))
        made.start_all()
        whole = simulated(made, tmp_path / "whole")
        made.ends(*roles, limit=120.0)
        kept = from_toml((made.run_folder("a") / "config.toml").read_text())
        assert (kept.name, kept.compute.threads) == ("a", 1)  # the federation's, and what is the peer's own
        gaps = distances(made, whole)
        assert len(gaps) == 14
        assert max(gaps.values()) == 0.0, gaps


@pytest.fixture
def sites(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Own data of three sites, one of them a folder; the one with labels has some to test with, too."""
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    with np.load(data) as whole:
        x, y, x_test, y_test = (whole[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    np.savez(tmp_path / "north.npz", x_train=x[:100], y_train=y[:100], x_test=x_test, y_test=y_test)
    for k in range(100, 300):
        save(tmp_path / "south" / (str(y[k]) if k < 150 else "unlabeled") / f"{k}.png", x[k])
    np.savez(tmp_path / "west.npz", x_train=x[300:])
    return {"north": tmp_path / "north.npz", "south": tmp_path / "south", "west": tmp_path / "west.npz"}


def own_data(tmp_path: Path, sites: dict[str, Path], *more: str) -> Live:
    flags = [word for path, value in FULL.items() if path != "data.ratio" for word in (f"--{path}", str(value))]
    words = ["federation", "new", str(tmp_path / "f"), "--peers", "north=L,south=M,west=U", "--topology", "line"]
    words += ["--classes", ",".join("0123456789"), "--image", "1x8x8", "--deadlines.linger", "10", *flags]
    assert main(words) == 0
    made = Live(tmp_path / "f", read(tmp_path / "f" / "federation.toml"))
    for name, file in sites.items():
        made.start(name, "--data", str(file), *more)
    return made


def test_sites_with_data_of_their_own(sites: dict[str, Path], tmp_path: Path) -> None:
    made = own_data(tmp_path, sites, "--compute.report", "true")
    try:
        made.ends(*sites)
    finally:
        made.end()
    assert_undisturbed(made, 5)
    assert_written_up(made)
    north, south, west = (made.summary(name) for name in ("north", "south", "west"))
    assert 0 < north["held_out_accuracy"][0] <= 1
    assert 0 <= south["held_out_accuracy"][0] <= 1  # a fifth of its folder's labels
    assert west["held_out_accuracy"] is None  # it has no labels to be judged by
    assert all(0 <= s["generated_accuracy"][0] <= 1 for s in (north, west))
    assert all(record.get("pseudo_precision", [None]) == [None] for record in made.records("west"))
    found = sum_up(made.run_folder("west"))
    assert not found.broken
    assert {peer for peer, _ in found.sizes} == {"south"}  # the only neighbour
    assert found.tensors["models"] == {"classifier", "velocity", "generator", "accuracy"}
    assert found.tensors["shares"] == {"predicted", "labelled", "tilt"}
    assert set(found.tensors) == {"models", "classifiers", "counts", "shares", "control"}  # and no image


def assert_written_up(made: Live) -> None:
    """A report and a model card at every peer, each with what it knows."""
    north, west = made.run_folder("north"), made.run_folder("west")
    assert f"semidfl predict runs/{made.federation.name}-north --input" in (north / "model_card.md").read_text()
    for folder, result in ((north, made.summary("north")["held_out_accuracy"][0]), (west, None)):
        page, card = (folder / "report.html").read_text(), (folder / "model_card.md").read_text()
        shown = "no test" if result is None else f"{100 * result:.2f} %"
        assert f">{shown}<" in page
        assert "each peer&#39;s own" in page
        assert ("Not known: this peer has no held-out labels" if result is None else f"**{shown}**") in card
    assert (north / "confusion.json").is_file()
    assert not (west / "confusion.json").is_file()
    assert main(["report", str(north), str(west), "--out", str(north / "both.html")]) == 0
    assert main(["compare", str(north), str(west)]) == 2


def test_the_same_without_certificates(sites: dict[str, Path], tmp_path: Path) -> None:
    made = own_data(tmp_path, sites, "--insecure")
    try:
        made.ends(*sites)
    finally:
        made.end()
    lines = made.log("west").splitlines()
    assert all(" west INSECURE " in line for line in lines if not line.startswith("run folder"))
    assert not (made.run_folder("west") / "identity").exists()


def test_stopped_by_ctrl_c_and_gone_on(data: Path, tmp_path: Path) -> None:
    config = QUICK | {"rounds": 40}
    with live(tmp_path / "f", data, {"a": "L", "b": "U"}, config, deadlines=SHORT | {"linger": 10.0}) as made:
        made.start("a", fault="slowly")
        made.start("b", fault="slowly")
        made.wait_for_round("b", 2)
        os.kill(made.running["b"].pid, signal.SIGINT)
        made.running["b"].join(30.0)
        assert made.running["b"].exitcode == 130
        assert "go on with the same command" in made.log("b")
        made.start("b", fault="slowly")
        made.ends("a", "b")
        assert made.records("b")[-1]["round"] == 40


def test_a_local_federation_in_one_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["local-federation", "--peers", "2", "--folder", "two", "--dataset", str(data)]
    words += [word for path, value in QUICK.items() for word in (f"--{path}", str(value))]
    assert main([*words, "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    assert "peer-00 done: accuracy on own held-out labels" in said
    assert re.search(r"peer-01  role U +\d+\.\d\d %", said)
    assert main(["audit", "two/runs/peer-00"]) == 0
    cases = {
        "--rounds=3": "config",
        "--rounds=2 --compute.chunk=1": "config",
        "--rounds=2 --deadlines.round=9": "deadlines",
    }
    for other, what in cases.items():
        assert main([*words, *other.split()]) == 2  # it does not go on as if they had not been given
        assert f"two was made with other options ({what})" in capsys.readouterr().err
    assert main([*words, "--rounds", "none", "--overwrite"]) == 2
    assert (tmp_path / "two/runs/peer-00").is_dir(), "what is not legal removes nothing"
