"""benchmarks/explore.py: variants are compared on samples put aside, alone or as a stack, with the same outcome."""

import json
from pathlib import Path

import numpy as np
import pytest
from scripts import script
from small import TINY

from semidfl import together
from semidfl.data.sources import load
from semidfl.record.folder import read_records

explore = script("benchmarks/explore.py")

# As flags would give them: all text, and not what the script decides by itself.
FIELDS = {
    path: str(value).lower() if isinstance(value, bool) else str(value)
    for path, value in TINY.items()
    if path not in ("data.dataset", "data.ratio", "compute.checkpoint_every", "compute.report")
} | {"rounds": "3", "pseudo.start": "1"}


def test_the_test_images_have_no_say_and_labels_are_as_many() -> None:
    config = explore.variant_config("digits", 50.0, 100.0, 0, FIELDS)
    kept, whole = load("digits", config.data, 0), load("digits")
    assert len(kept.train_labels) == len(whole.train_labels) - round(len(whole.train_labels) / 6)
    assert len(kept.test_labels) == len(whole.train_labels) - len(kept.train_labels)
    seen = {image.tobytes() for image in whole.train_images}
    assert all(image.tobytes() in seen for image in kept.test_images)
    assert config.data.ratio * len(kept.train_labels) == pytest.approx(50 * len(whole.train_labels), rel=1e-3)
    assert explore.variant_config("digits", 90.0, 100.0, 0, FIELDS).data.ratio == 100.0  # all that is left


def test_a_stack_gives_what_runs_give_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [explore.variant_config("digits", 50.0, 100.0, seed, FIELDS) for seed in (0, 1)]
    found = {}
    for size in (1, 2):
        monkeypatch.setattr(explore, "at_once", lambda _, size=size: size)
        found[size] = [explore.outcome(config, records) for config, records, _ in explore.trained(configs)]
    for alone, stacked in zip(found[1], found[2], strict=True):
        assert alone["tests"] == pytest.approx(stacked["tests"], abs=2.0)
        assert alone["pseudo_labels"] == pytest.approx(stacked["pseudo_labels"], rel=0.05)


def test_it_writes_a_line_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ",".join(f"{path}:{value}" for path, value in FIELDS.items())
    names = [f"one={given}", f"labels={given},method:dfl-lb"]
    out = tmp_path / "found.jsonl"
    monkeypatch.setattr(
        "sys.argv", ["explore.py", "digits", "--cells", "50:100,50:0.1", "--seeds", "3", "--out", str(out), *names]
    )
    explore.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    cells = [(x["variant"], x["ratio"], x["alpha"], x["seed"]) for x in lines]
    assert cells == [(name, 50, a, 3) for name in ("one", "labels") for a in (100, 0.1)]
    assert ["right" in x for x in lines] == [True, True, False, False]
    config = explore.variant_config("digits", 50.0, 100.0, 3, FIELDS)
    together.run_together([config], [tmp_path / "run"])
    (record,) = (r for r in read_records(tmp_path / "run") if r["round"] == 3)
    assert lines[0]["pseudo_labels"] == np.sum(record["pseudo_given"])
    assert lines[0]["right"] == pytest.approx(100 * np.sum(record["pseudo_right"]) / np.sum(record["pseudo_given"]))
    assert lines[0]["accuracy"] == pytest.approx(np.mean(list(lines[0]["tests"].values())), abs=0.01)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith(("one ", "labels "))]) == 4
