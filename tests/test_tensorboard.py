"""`--log tensorboard`: TensorBoard's own reader finds the figures of metrics.jsonl."""

from pathlib import Path

import pytest
from small import flags, tiny

from semidfl import experiment
from semidfl.cli import main
from semidfl.record import tensorboard
from semidfl.record.folder import read_records

pytest.importorskip("tensorboard", reason="tensorboard is not installed")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By tag, by round."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_it_holds_what_the_records_hold(tmp_path: Path) -> None:
    experiment.run(tiny(compute__log="tensorboard"), tmp_path / "run")
    found, records = scalars(tmp_path / "run"), read_records(tmp_path / "run")
    tested = [r for r in records if "accuracy" in r]
    for i in range(4):
        assert found[f"accuracy/client-{i:02d}"] == {r["round"]: pytest.approx(r["accuracy"][i]) for r in tested}
    assert found["accuracy/mean"] == {r["round"]: pytest.approx(sum(r["accuracy"]) / 4) for r in tested}
    assert found["loss/mean"] == {r["round"]: pytest.approx(sum(r["loss"]) / 4) for r in records}
    assert found["seconds/round"] == {r["round"]: pytest.approx(r["seconds"]["round"]) for r in records}
    assert found["megabytes_sent/models"][5] == pytest.approx(sum(records[-1]["bytes_sent"]["models"]) / 1e6)
    assert "pseudo_precision/client-00" not in found  # an L-client gives no label


def test_many_clients_are_shown_by_their_mean() -> None:
    record = {"round": 1, "accuracy": [0.5] * 21, "seconds": {}}
    assert dict(tensorboard._scalars(record)) == {"accuracy/mean": 0.5}


def test_a_resume_strikes_out_what_it_does_anew(tmp_path: Path) -> None:
    for first, last, loss in ((1, 5, 1.0), (3, 4, 2.0)):
        with tensorboard.opened("tensorboard", tmp_path, first) as sink:
            assert sink is not None
            for t in range(first, last + 1):
                sink.write({"round": t, "loss": [loss], "seconds": {}})
    assert scalars(tmp_path)["loss/mean"] == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


def test_overwriting_a_run_removes_its_events(tmp_path: Path) -> None:
    config = tiny(compute__log="tensorboard", method="dfl-lb", rounds=3)
    experiment.run(config, tmp_path / "run")
    experiment.run(tiny(method="dfl-lb", rounds=1), tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_without_tensorboard_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "paper", *flags(), "--log", "tensorboard"]) == 2
    assert "pip install 'semidfl[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
