"""The examples of docs/extend.md: things of one's own, with no edit inside the package."""

import re
import sys
from pathlib import Path

import pytest
import torch

from semidfl.cli import main
from semidfl.config import GraphConfig
from semidfl.data.sources import load
from semidfl.errors import ConfigError, TopologyError
from semidfl.exchange.base import Neighbourhood
from semidfl.experiment import prepare, run
from semidfl.learn.aggregate import find_rule
from semidfl.plugins import find_plugin
from semidfl.record.checkpoint import load_latest
from semidfl.record.folder import read_records
from semidfl.topology import build
from tests.small import flags, tiny

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)


def test_the_examples_are_short() -> None:
    found = sorted((ROOT / "examples").glob("*.py"))
    assert [p.name for p in found] == ["my_dataset.py", "my_method.py", "my_topology.py", "my_weights.py"]
    assert all(len(p.read_text().splitlines()) <= 30 for p in found)


def test_a_method_of_ones_own_runs_and_keeps_its_memory(tmp_path: Path) -> None:
    whole = run(tiny(method="my_method:Stubborn", rounds=6, pseudo__threshold=0.11), tmp_path / "whole")
    kept = [sum(r["pseudo_labels"]) for r in read_records(whole.folder)]
    assert kept[0] == 0  # nobody was sure before the first round
    assert sum(kept) > 0
    assert "memory.last choice" in load_latest(whole.folder / "checkpoints")[1]


def test_a_rule_of_ones_own_hears_the_best_half() -> None:
    near = Neighbourhood.of(build(GraphConfig("fig1"), 0), range(10), range(10), torch.device("cpu"))
    weights = find_rule("my_weights:best_half")(torch.arange(10) / 10, near)
    # Client 0 sees 0, 2, 6, 7, 8: the best three are 6, 7 and 8.
    assert weights[0].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])
    assert main(["run", "paper", *flags(rounds=3, aggregation__weights="my_weights:best_half")]) == 0


def test_a_data_set_and_a_topology_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = flags(rounds=2, data__dataset="my_dataset:bars", graph__topology="my_topology:barbell")
    assert main(["run", "paper", *words]) == 0
    assert load("my_dataset:bars").shape == (1, 16, 16)
    graph = build(GraphConfig("my_topology:barbell", clients=6), 0)
    assert graph.neighbours[2] == (0, 1, 3)
    assert main(["run", "paper", *words, "--dry-run"]) == 0
    assert "my_dataset:bars" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method=nowhere:Mine"], "cannot be loaded"),
        (["--method=my_method:Missing"], "cannot be loaded"),
        (["--method=my_topology:barbell"], "not a subclass"),
        (["--aggregation.weights=adagne"], "did you mean 'adagen'"),
        (["--graph.topology=my_topology:missing"], "cannot be loaded"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "paper", *flags(rounds=1), *words]) == 2
    assert message in capsys.readouterr().err


def test_edges_to_nowhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wild.py").write_text("def far(n, seed):\n    return [(i, i + 1) for i in range(n)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TopologyError, match="gave the edge 3 4"):
        build(GraphConfig("wild:far", clients=4), 0)


def test_entry_points_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[semidfl.methods]\nstubborn = my_method:Stubborn\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_plugin("methods", "method", "stubborn").__name__ == "Stubborn"
    assert find_plugin("methods", "method", "gentle") is None
    method, _ = prepare(tiny(method="stubborn"), load("digits"))
    assert type(method).__name__ == "Stubborn"
    with pytest.raises(ConfigError, match="is not legal"):
        prepare(tiny(method="gentle"), load("digits"))


def test_the_pages_point_at_the_right_lines() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import lines
    finally:
        sys.path.pop(0)
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        assert lines.renewed(text) == text, f"{page.name}: run python docs/lines.py"
        for target in re.findall(r"\]\((\.\./[^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} points at {target}"
