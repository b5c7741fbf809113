"""Readers of a run folder: what they see while it is written, cut, written anew; and what runs record for them."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import config_of, make_run, record_of
from sklearn.metrics import confusion_matrix
from small import tiny

from semidfl import experiment, topology
from semidfl.config import to_toml
from semidfl.data.partition import class_counts, partition
from semidfl.data.sources import load
from semidfl.errors import RunFolderError
from semidfl.learn.classifier import probabilities
from semidfl.methods.baseline import report
from semidfl.record.clients import confusion, sample_grid
from semidfl.record.folder import RunFolder, read_records
from semidfl.record.history import Clients, History, find_runs
from semidfl.record.log import RoundLog

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A true run, of the tiny config."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    experiment.run(tiny(), folder)
    return folder


def plain(history: History) -> list[dict[str, object]]:
    """The records as JSON had them, but for the weights."""
    return [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in r.items()} for r in history.records]


# --- following -------------------------------------------------------------------------------------------------------


def test_byte_by_byte_the_same_is_read_as_at_once(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", rounds=4)
    text = (whole / "metrics.jsonl").read_bytes()
    growing = tmp_path / "growing"
    growing.mkdir()
    (growing / "config.toml").write_bytes((whole / "config.toml").read_bytes())
    history, steps = History(growing), 0
    with open(growing / "metrics.jsonl", "ab", buffering=0) as file:
        for start in range(0, len(text), 97):  # lines are cut anywhere
            file.write(text[start : start + 97])
            history.refresh()
            done = text[: start + 97].count(b"\n")
            assert len(history.records) == done
            steps += 1
    assert steps > 50
    expected = read_records(whole)
    for record in expected:
        record.pop("weights")
    got = plain(history)
    for ours, theirs in zip(got, expected, strict=True):
        assert np.allclose(ours.pop("thresholds"), theirs.pop("thresholds"))
        assert ours == theirs


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=6)
    history = History(folder)
    assert history.refresh()
    assert not history.refresh()
    kept = history.records[:]
    with RunFolder.open(folder) as writer:
        writer.append({"round": 7, "seconds": {"round": 1.0}})
    assert history.refresh()
    assert history.rounds == 7
    assert all(a is b for a, b in zip(kept, history.records, strict=False))  # not parsed again


@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_resume_that_cuts_the_file_is_noticed(tmp_path: Path, after: int) -> None:
    """Also where the file is as long as before, or longer, when the reader looks again."""
    folder = make_run(tmp_path / "run", rounds=20, done=10)
    history = History(folder)
    history.refresh()
    with RunFolder.open(folder) as writer:
        writer.truncate(5)
        config = config_of(10, 20)
        random = np.random.default_rng(9)
        for t in range(6, 6 + after):
            writer.append(record_of(t, config, topology.build(config.graph, 0), random))
    history.refresh()
    expected = read_records(folder)
    assert [r["round"] for r in history.records] == [r["round"] for r in expected] == list(range(1, 6 + after))
    assert [r["loss"] for r in history.records] == [r["loss"] for r in expected]


def test_a_run_that_is_overwritten_begins_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=20)
    history = History(folder)
    history.refresh()
    with RunFolder.create(folder, to_toml(config_of(10, 77)), overwrite=True) as writer:
        history.refresh()
        assert (history.rounds, history.config.rounds, history.status) == (0, 77, "running")
        writer.append({"round": 1, "seconds": {"round": 1.0}})
        history.refresh()
        assert history.rounds == 1


def test_two_tabs_may_read_at_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=300, done=100)
    history = History(folder)
    threads = [threading.Thread(target=history.refresh) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r["round"] for r in history.records] == list(range(1, 101))
    assert not history.refresh()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("{oh\n")
    with pytest.raises(RunFolderError, match=r"line 4 of .*metrics.jsonl is damaged"):
        History(folder).refresh()


def test_the_reader_takes_no_lock(tmp_path: Path) -> None:
    """A run may begin, go on and be resumed while it is watched."""
    folder = make_run(tmp_path / "run", rounds=20, done=3)
    history = History(folder)
    history.refresh()
    with RunFolder.open(folder) as writer:
        assert history.status == "running"
        history.refresh()
        writer.append({"round": 4, "seconds": {"round": 1.0}})


def test_status(tmp_path: Path) -> None:
    assert History(make_run(tmp_path / "done", rounds=3)).status == "finished"
    stopped = make_run(tmp_path / "stopped", rounds=3, done=2)
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (stopped / ".lock").write_text(child.stdout.strip())  # a process that is no more
    assert History(stopped).status == "stopped"
    (stopped / ".lock").write_text(str(os.getpid()))
    assert History(stopped).status == "running"


# --- figures ---------------------------------------------------------------------------------------------------------


def test_mixing_weights_belong_to_pairs(finished: Path) -> None:
    history = History(finished)
    history.refresh()
    graph = topology.build(history.config.graph, history.config.seed)
    rows = read_records(finished)[-1]["weights"]
    expected = {}
    for i, row in enumerate(rows):
        for j, weight in zip(sorted((i, *graph.neighbours[i])), row, strict=True):
            expected[i, j] = weight
    assert history.mixing() == expected


def test_mixing_weights_of_a_peer_whose_neighbour_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    with RunFolder.create(folder, to_toml(config_of(10, 5))) as kept:
        kept.write_text("clients.json", json.dumps({"own": [2], "roles": "MMMM", "edges": [[0, 2], [1, 2], [2, 3]]}))
        kept.append({"round": 1, "weights": [[0.1, 0.2, 0.3, 0.4]], "seconds": {}})
        kept.append({"round": 2, "weights": [[0.5, 0.4, 0.1]], "absent": [1], "seconds": {}})
    history = History(folder)
    history.refresh()
    assert history.mixing() == {(2, 0): 0.5, (2, 2): 0.4, (2, 3): 0.1}


def test_absence_is_counted_in_rounds_in_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    with RunFolder.create(folder, to_toml(config_of(10, 9))) as kept:
        for t, missing in enumerate([[3], [], [3, 5], [3], [3, 7]], start=1):
            kept.append({"round": t, "seconds": {}, **({"absent": missing} if missing else {})})
    history = History(folder)
    assert history.absent() == {}
    history.refresh()
    assert history.absent() == {3: 3, 7: 1}


def test_a_folder_of_an_older_version_has_its_graph_from_the_config(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "old", rounds=3)
    for name in ("clients.json", "confusion.json"):
        (folder / name).unlink()
    history = History(folder)
    graph = topology.build(history.config.graph, history.config.seed)
    assert (history.clients.roles, history.clients.edges) == (graph.roles, graph.edges())
    assert (history.confusion, history.clients.labelled) == (None, [])
    (folder / "config.toml").write_text(to_toml(config_of(10, 3)).replace('"fig1"', '"nowhere:graph"'))
    assert Clients(folder, History(folder).config).edges == []  # a plug-in that is not here


def test_runs_are_found_under_folders(tmp_path: Path) -> None:
    for name in ("a", "deep/er/b", ".hidden/c"):
        make_run(tmp_path / name, rounds=1)
    assert find_runs([tmp_path]) == [tmp_path / "a", tmp_path / "deep/er/b"]
    assert find_runs([tmp_path / "a", tmp_path]) == [tmp_path / "a", tmp_path / "deep/er/b"]
    (tmp_path / "file").touch()
    for place, words in (("nowhere", "there is no run folder"), ("file", "is a file, not a run folder")):
        with pytest.raises(RunFolderError, match=words):
            find_runs([tmp_path / place])


# --- what runs record ------------------------------------------------------------------------------------------------


def test_clients_are_recorded(finished: Path) -> None:
    config, data = tiny(), load("digits")
    graph = topology.build(config.graph, config.seed)
    split = partition(data.train_labels, graph.roles, config.data.ratio, config.data.alpha, config.seed)
    known = json.loads((finished / "clients.json").read_text())
    assert known["labelled"] == class_counts(split.labelled, data.train_labels, 10).tolist()
    assert known["unlabelled"] == class_counts(split.unlabelled, data.train_labels, 10).tolist()
    assert (known["roles"], known["unknown"], known["own"]) == ("LMUU", [0] * 4, [0, 1, 2, 3])
    assert [tuple(edge) for edge in known["edges"]] == graph.edges()
    assert known["samples"]["classes"] == [str(k % 10) for k in range(20)]


def test_confusion_is_that_of_the_models(finished: Path) -> None:
    config, data = tiny(), load("digits")
    method, cohort = experiment.prepare(config, data)
    for _ in experiment.train(config, method, cohort, experiment.MemoryExchange(cohort.ids)):
        pass
    setup, params = method.setup, cohort.classifier.params
    answers = probabilities(setup.classifier, setup.space, params, setup.test_images, 10**6).argmax(2).numpy()
    found = json.loads((finished / "confusion.json").read_text())
    for ours, theirs in zip(found["clients"], answers, strict=True):
        assert ours == confusion_matrix(data.test_labels, theirs, labels=range(10)).tolist()
    mean = probabilities(setup.classifier, setup.space, params.mean(0)[None], setup.test_images, 10**6).argmax(2)[0]
    assert found["mean"] == confusion_matrix(data.test_labels, mean.numpy(), labels=range(10)).tolist()
    summary = json.loads((finished / "summary.json").read_text())
    shares = np.trace(np.array(found["clients"]), axis1=1, axis2=2) / len(data.test_labels)
    assert shares == pytest.approx(summary["last_test"], abs=1e-6)
    assert confusion(setup, params).sum() == 4 * len(data.test_labels)


def test_pseudo_labels_are_recorded_by_class(finished: Path) -> None:
    for record in read_records(finished):
        given, right, wrong = (np.array(record[f"pseudo_{part}"]) for part in ("given", "right", "wrong"))
        assert given.sum() == sum(record["pseudo_labels"])
        assert (given == right + wrong).all()  # of digits the truth is known
        expected = sum((p or 0) * n for p, n in zip(record["pseudo_precision"], record["pseudo_labels"], strict=True))
        assert right.sum() == pytest.approx(expected, abs=0.01)


def test_labels_of_unknown_truth_are_neither_right_nor_wrong() -> None:
    _, cohort = experiment.prepare(tiny(), load("digits"))
    held = cohort.shards.unlabelled
    cohort.shards.labels[held.table[2, :5]] = -1
    truth = cohort.shards.labels[held.table]
    kept = torch.zeros_like(held.valid())
    kept[2, :8] = True  # five unknown, of the other three the first is wrong
    label = truth.clamp(min=0)
    label[2, 5] = (label[2, 5] + 1) % 10
    log = RoundLog(1, CPU)
    report(log, cohort, 10, label, kept)
    record = log.record()
    assert record["pseudo_labels"] == [0, 0, 8, 0]
    assert record["pseudo_precision"] == [None, None, pytest.approx(2 / 3, abs=1e-5), None]
    assert [np.sum(record[f"pseudo_{part}"]) for part in ("given", "right", "wrong")] == [8, 2, 1]


@pytest.mark.parametrize(
    ("clients", "images", "classes", "expected"),
    [
        (10, 100, 10, (10, 20)),
        (100, 1000, 10, (20, 20)),
        (4, 100, 12, (4, 12)),
        (4, 100, 30, (4, 30)),
        (1, 3, 5, (1, 3)),
        (2, 99, 500, (2, 40)),
    ],
)
def test_pictures_show_whole_runs_through_the_classes(
    clients: int, images: int, classes: int, expected: tuple[int, int]
) -> None:
    assert sample_grid(clients, images, classes) == expected


def test_what_could_be_labelled_is_what_was_looked_at(tmp_path: Path) -> None:
    for pool, name in ((0, "all"), (30, "some")):
        experiment.run(tiny(rounds=1, generator__kind="none", pseudo__pool=pool), tmp_path / name)
    known = History(tmp_path / "all")
    held = [sum(row) for row in known.clients.unlabelled]
    assert known.looked_at() == sum(held) > 30 * len(held)
    assert History(tmp_path / "some").looked_at() == sum(min(n, 30) for n in held)
