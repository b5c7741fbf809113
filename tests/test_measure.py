"""The script behind docs/robust.md and docs/bandwidth.md: its runs can be made, its tables have a place."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import script

from semidfl.config import config_hash

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("docs/measure.py")
    monkeypatch.setattr(module, "RUNS", tmp_path)
    return module


@pytest.mark.parametrize("page", ["robust", "bandwidth"])
def test_every_table_has_its_place_and_all_its_rows(page: str, measure: ModuleType) -> None:
    text = (DOCS / f"{page}.md").read_text()
    for name, (plan, _) in getattr(measure, page)(2).items():
        assert text.count(f"<!-- table {name} -->\n") == 1
        table = text.partition(f"<!-- table {name} -->\n")[2].partition("<!-- end -->")[0]
        for row in {c.row for c in plan.cells}:
            assert f"| {' | '.join(row)} |" in table
        assert len(plan.runs()) > len(plan.cells)  # another run for another seed


def test_a_table_is_made_of_what_is_done(measure: ModuleType, tmp_path: Path) -> None:
    plan, measures = measure.robust(2)["sparse"]
    found = dict.fromkeys(map(config_hash, plan.cells[0].configs), 0.5) | {
        config_hash(c): 0.75 for x in plan.cells[1:] for c in x.configs[:1]
    }
    for key, accuracy in found.items():
        (tmp_path / key).mkdir()
        summary: dict[str, Any] = {"config": key, "accuracy": 0.1, "honest_accuracy": accuracy}
        (tmp_path / key / "summary.json").write_text(json.dumps(summary))
    lines = measure.table(plan, measures).splitlines()
    assert lines[0] == "| rule | nobody | one (client 0) | two (0 and 8) |"
    assert lines[2] == "| none | 50.0 | 75.0 | 75.0 |"
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table x -->\nold\n<!-- end -->\nb\n<!-- table y -->\n<!-- end -->\n")
    measure.write(page, "x", "new")
    assert page.read_text() == "a\n<!-- table x -->\nnew\n<!-- end -->\nb\n<!-- table y -->\n<!-- end -->\n"


def test_spread_over_seeds(measure: ModuleType) -> None:
    assert measure.text_of([50.0, 52.0]) == "51.0 ± 1.4"
    assert measure.text_of([0.25]) == "0.250"
    assert measure.text_of([1960.3, 1960.3]) == "1960"
