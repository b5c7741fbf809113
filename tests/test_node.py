"""The parts of a peer one by one: the federation file, own data, the audit, the command."""

import errno
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import save

from semidfl.cli import main
from semidfl.data.shards import Space
from semidfl.errors import DataError, FederationError, RunFolderError, SemiDFLError
from semidfl.node.audit import Audit, sum_up
from semidfl.node.federation import read
from semidfl.node.site import load_site

# --- the federation file ----------------------------------------------------------------------------------------------

FILE = """
name = "clinics"
recipe = "demo"
seed = 3
edges = [["north", "south"], ["south", "west"]]

[config]
rounds = 7
"classifier.lr" = 0.2

[config.generator]
kind = "none"

[images]
classes = ["ill", "healthy"]
channels = 3
height = 16
width = 12
mean = [0.4, 0.5, 0.6]
std = [0.2, 0.2, 0.3]

[deadlines]
round = 5

[[peers]]
name = "north"
address = "10.0.0.1:7443"
role = "L"

[[peers]]
name = "south"
address = "10.0.0.2:7443"
listen = "0.0.0.0:7443"

[[peers]]
name = "west"
address = "10.0.0.3:7443"
role = "U"
"""


def read_text(tmp_path: Path, text: str) -> Any:
    (tmp_path / "federation.toml").write_text(text)
    return read(tmp_path / "federation.toml")


def test_a_federation_file(tmp_path: Path) -> None:
    made = read_text(tmp_path, FILE)
    config = made.config
    assert (config.rounds, config.seed, config.classifier.lr, config.generator.kind) == (7, 3, 0.2, "none")
    assert config.graph.roles == "LMU"
    assert made.images.space == Space(3, 16, 12, 2, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3), ("ill", "healthy"))
    assert made.graph.neighbours == ((1,), (0, 2), (1,))
    assert [peer.name for peer in made.neighbours_of("south")] == ["north", "west"]
    plan = made.plan("south")
    assert (plan.listen, plan.clients, plan.rounds, plan.deadlines.round) == ("0.0.0.0:7443", (1,), 7, 5.0)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("rounds = 7", "rounds = 8", False),
        ("seed = 3", "seed = 4", False),
        ('["ill", "healthy"]', '["healthy", "ill"]', False),
        ("0.4, 0.5, 0.6", "0.4, 0.5, 0.7", False),
        ('role = "U"', 'role = "M"', False),
        ('["south", "west"]]', '["north", "west"]]', False),
        ("rounds = 7", 'rounds = 7\n"exchange.dtype" = "bf16"', False),
        ("10.0.0.1:7443", "10.0.0.9:7000", True),
        ("round = 5", "round = 50", True),
        ('recipe = "demo"', '# a comment\nrecipe = "demo"', True),
        ("rounds = 7", 'rounds = 7\n"compute.threads" = 3', True),
        ("rounds = 7", 'rounds = 7\n"compute.deterministic" = true', False),
    ],
)
def test_what_the_peers_must_agree_on(old: str, new: str, same: bool, tmp_path: Path) -> None:
    assert FILE.count(old) == 1
    one, two = (read_text(tmp_path, text).agreement for text in (FILE, FILE.replace(old, new)))
    assert (one == two) is same


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "sede = 3", "there is no field 'sede' (did you mean 'seed'?)"),
        ("round = 5", "rounds = 5", "there is no field deadlines.rounds (did you mean 'round'?)"),
        ("round = 5", "round = -5", "deadlines.round = -5 is not legal"),
        ("round = 5", 'round = "5"', "deadlines.round = '5' is not legal: it must be a number"),
        ('role = "U"', 'role = "X"', "peers.role = 'X' of west is not legal: L, M or U"),
        ('name = "west"', 'name = "north"', "the name 'north' stands twice"),
        ('name = "west"', 'name = "West"', "'West' is not legal as a peer's name"),
        ("10.0.0.1:7443", "10.0.0.1", "peers.address = '10.0.0.1' of north is not legal: host:port"),
        ('["south", "west"]]', '["south", "wset"]]', "edges names 'wset', which is no peer (did you mean 'west'?)"),
        (', ["south", "west"]]', "]", "is not connected"),
        ('["ill", "healthy"]', '["ill"]', "at least two names"),
        ("height = 16\n", "", "images.height is missing"),
        ("channels = 3", "channels = 2", "channels must be 1 or 3"),
        ("0.2, 0.2, 0.3", "0.2, 0.2", "images.std must hold 3 numbers"),
        ("rounds = 7", "runds = 7", "there is no field 'runds'"),
        ("rounds = 7", "seed = 7", "config.seed: give 'seed' at the top of the file instead"),
        ('recipe = "demo"', 'recipe = "dmeo"', "there is no recipe 'dmeo' (did you mean 'demo'?)"),
        ("rounds = 7", '"exchange.dtype" = "int4"', "exchange.dtype = 'int4' is not legal"),
        ("rounds = 7", '"aggregation.weights" = "adatest"', "cannot use adatest"),
        ("rounds = 7", '"classifier.standardise" = true', "classifier.standardise is for resnet18"),
        ("[[peers]]", "[[peers", "is not valid TOML"),
    ],
)
def test_what_is_not_legal_in_a_federation_file(old: str, new: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SemiDFLError) as error:
        read_text(tmp_path, FILE.replace(old, new, 1))
    assert said in str(error.value)
    assert "federation.toml" in str(error.value)


def test_a_federation_needs_two(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="there is only one of"):
        read_text(tmp_path, 'dataset = "digits"\n[[peers]]\nname = "alone"\naddress = "127.0.0.1:7000"\n')


def test_several_clients_at_one_peer(tmp_path: Path) -> None:
    text = 'dataset = "digits"\ntopology = "ring"\n'
    for k, clients in enumerate((2, 1, 3)):
        text += f'[[peers]]\nname = "p{k}"\naddress = "127.0.0.1:{7000 + k}"\nclients = {clients}\n'
    made = read_text(tmp_path, text)
    assert [made.clients_of(f"p{k}") for k in range(3)] == [(0, 1), (2,), (3, 4, 5)]
    assert [peer.clients for peer in made.neighbours_of("p1")] == [(0, 1), (3, 4, 5)]


# --- own data ---------------------------------------------------------------------------------------------------------

SPACE = Space(1, 4, 4, 3, (0.5,), (0.5,))
IMAGES = np.zeros((5, 4, 4), dtype=np.uint8)


def test_a_site_without_labels_knows_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "u.npz", x_train=IMAGES, y_train=[0, 1, 2, 0, 1])
    site = load_site(tmp_path / "u.npz", SPACE, "U")  # labels that it should not have are not looked at
    shards = site.shards(torch.device("cpu"))
    assert shards.labels.tolist() == [-1] * 5
    assert (shards.labelled.held, shards.unlabelled.held) == ((0,), (5,))
    assert site.test_images.shape == (0, 1, 4, 4)


def test_a_site_with_some_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", x_train=IMAGES, y_train=[0, -1, 2, -1, 1], x_test=IMAGES[:2], y_test=[0, 2])
    site = load_site(tmp_path / "m.npz", SPACE, "M")
    shards = site.shards(torch.device("cpu"))
    assert shards.labelled.table.tolist() == [[0, 2, 4]]
    assert shards.unlabelled.table.tolist() == [[1, 3]]
    assert site.test_labels.tolist() == [0, 2]


def test_a_site_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMIDFL_DATA", str(tmp_path / "cache"))
    classes, root = ("fish", "bird", "cat"), tmp_path / "site"
    for k, place in enumerate(["bird", "bird", "cat", "cat", "unlabeled", "test/fish"]):
        save(root / place / f"{k}.png", np.full((9, 7, 3), 40 * k, np.uint8))  # of another size, in colour
    site = load_site(root, SPACE, "M", classes)
    assert site.images.shape == (5, 1, 4, 4)
    assert sorted(zip(site.images[:, 0, 0, 0].tolist(), site.labels.tolist(), strict=True)) == [
        (0, 1), (40, 1), (80, 2), (120, 2), (160, -1),
    ]  # fmt: skip
    assert (site.test_images.max(), site.test_labels.tolist()) == (200, [0])
    assert load_site(root, SPACE, "U", classes).labels.tolist() == [-1] * 5
    with pytest.raises(DataError, match="1 samples have no label, but role L says that all have: make it M"):
        load_site(root, SPACE, "L", classes)
    with pytest.raises(DataError, match="cat"):
        load_site(root, SPACE, "M", ("fish", "bird"))


@pytest.mark.parametrize(
    ("role", "arrays", "said"),
    [
        ("L", {"x_train": IMAGES}, "y_train is missing, and role L says"),
        ("L", {"x_train": IMAGES, "y_train": [0, 1, 2, -1, 0]}, "1 samples have no label, but role L says"),
        ("M", {"x_train": IMAGES, "y_train": [-1] * 5}, "no sample has a label, but role M says"),
        ("L", {"x_train": IMAGES, "y_train": [0, 1, 2, 3, 0]}, "runs from 0 to 3, expected -1 to 2"),
        ("L", {"x_train": IMAGES, "y_train": [0, 1]}, "expected whole numbers of shape (5,)"),
        ("U", {"x_train": np.zeros((5, 8, 8), np.uint8)}, "holds images of 1x8x8, the federation's are 1x4x4"),
        ("U", {"x_train": IMAGES.astype(float)}, "x_train is float64"),
        ("U", {"x": IMAGES}, "x_train is missing"),
        ("U", {"x_train": np.array([{}])}, "cannot be read"),
    ],
)
def test_data_that_do_not_fit_the_federation(role: str, arrays: dict[str, Any], said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError) as error:
        load_site(tmp_path / "x.npz", SPACE, role)
    assert said in str(error.value)


# --- audit ------------------------------------------------------------------------------------------------------------


def test_the_audit_shows_what_left_and_that_nothing_was_taken_out(tmp_path: Path, capsys: Any) -> None:
    audit = Audit(tmp_path)
    for t in (1, 2):
        audit.sends("two", "models", t, ["classifier"], 1000 + t, b"\1" * 32)
        audit.control("two", 40)
        audit.flush(t)
    audit.close()
    audit = Audit(tmp_path)  # the peer was restarted
    audit.sends("three", "counts", 3, ["counts"], 88, b"\2" * 32)
    audit.close()
    found = sum_up(tmp_path)
    assert found.broken == []
    assert found.sizes == {("two", "models"): 2003, ("two", "control"): 80, ("three", "counts"): 88}
    assert main(["audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    last = (tmp_path / "audit.jsonl").read_bytes().splitlines(keepends=True)[-1]
    assert "nothing before the last was taken out or changed" in said
    assert hashlib.sha256(last).hexdigest() in said  # by which whoever has noted it sees a change at the end, too
    assert main(["audit", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(x["peer"], x["topic"]): x["bytes"] for x in told["sent"]} == found.sizes

    lines = (tmp_path / "audit.jsonl").read_text().splitlines(keepends=True)
    for changed in (lines[:1] + lines[2:], [lines[0].replace("1001", "1002"), *lines[1:]]):
        (tmp_path / "audit.jsonl").write_text("".join(changed))
        assert main(["audit", str(tmp_path)]) == 1
        assert "CHANGED OR DAMAGED: lines 2 do not follow" in capsys.readouterr().err


def test_who_asks_without_end_fills_no_disk(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for _ in range(1000):
        audit.sends("two", "models", 1, ["classifier"], 10, b"\1" * 32)
    audit.sends("two", "models", 1, ["classifier"], 10, b"\2" * 32)  # other tensors, though under the same name
    audit.flush(1)
    audit.close()
    found = sum_up(tmp_path)
    assert found.lines < 10
    assert (found.messages["two", "models"], found.sizes["two", "models"]) == (1001, 10_010)
    assert found.broken == []


def test_an_audit_on_a_full_disk_holds_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit, write = Audit(tmp_path), os.write
    audit.sends("two", "models", 1, ["classifier"], 1000, b"\1" * 32)
    left = [40]

    def short(handle: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "full")
        some = data[: left[0]]
        left[0] -= len(some)
        return write(handle, some)

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(RunFolderError, match="the disk is full"):
        audit.sends("two", "models", 2, ["classifier"], 1000, b"\1" * 32)
    monkeypatch.undo()
    audit.sends("two", "models", 2, ["classifier"], 1000, b"\1" * 32)
    audit.close()
    assert sum_up(tmp_path).broken == []
    assert sum_up(tmp_path).lines == 2


def test_an_audit_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.sends("two", "models", 1, ["classifier"], 1000, b"\1" * 32)
    audit.close()
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    audit = Audit(tmp_path)
    audit.sends("two", "models", 2, ["classifier"], 1000, b"\1" * 32)
    audit.close()
    assert sum_up(tmp_path).broken == [2]  # it is seen, and what came after follows from it


# --- the command ------------------------------------------------------------------------------------------------------


def test_insecure_says_so_in_every_line(tmp_path: Path, capfd: Any) -> None:
    words = ["federation", "new", str(tmp_path / "f"), "--peers", "a=L,b=U", "--dataset", "digits", "--rounds", "1"]
    assert main([*words, "--deadlines.hello", "0.5"]) == 0
    capfd.readouterr()
    words = ["node", "--federation", str(tmp_path / "f" / "federation.toml"), "--name", "a", "--insecure"]
    assert main([*words, "--folder", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) > 2
    assert all(" a INSECURE " in line for line in said if not line.startswith("semidfl: "))
    assert "too few neighbours" in said[-1]


def test_a_key_that_others_can_read_is_told_once(tmp_path: Path, capfd: Any) -> None:
    words = ["federation", "new", str(tmp_path / "f"), "--peers", "a=L,b=U", "--dataset", "digits", "--rounds", "1"]
    assert main([*words, "--deadlines.hello", "0.5"]) == 0
    words = ["node", "--federation", str(tmp_path / "f" / "federation.toml"), "--name", "a"]
    told = []
    for mode in (0o600, 0o640):
        (tmp_path / "f" / "identity" / "a.key").chmod(mode)
        assert main([*words, "--folder", str(tmp_path / f"run-{mode}")]) == 2  # b is not there
        told.append(capfd.readouterr().err.count("others on this machine can read"))
    assert told == [0, 1]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    assert main(["node", "--federation", "f", "--name", "a"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("semidfl: msgspec is needed for peers (")
    assert said.endswith("): pip install 'semidfl[net]'\n")


def test_the_bench_measures(capsys: Any) -> None:
    from semidfl.bench.peers import throughput

    assert throughput(1, 2) > 0
    assert main(["bench", "peers", "--speed", "3"]) == 2
    assert "usage: semidfl bench peers" in capsys.readouterr().err


def test_a_summary_is_plain_json(tmp_path: Path) -> None:
    """The audit of a peer is a file that any tool can read."""
    audit = Audit(tmp_path)
    audit.sends("two", "models", 1, ("a", "b"), 7, b"\xff" * 32)
    audit.close()
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    assert list(line) == ["time", "peer", "topic", "round", "tensors", "bytes", "sha256", "previous"]
    assert line["sha256"] == "ff" * 32
