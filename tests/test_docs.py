"""Docs that are true: links lead somewhere, the reference is current, and every command shown exists as shown."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from semidfl.cli import COMMANDS, USAGE
from semidfl.commands.completion import words_of
from semidfl.config import Config, full_path, leaves
from semidfl.report.plans import NAMES, RATIOS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHECKED = ("run", "data", "predict", "export", "generate", "doctor", "completion")


def commands(page: Path) -> list[list[str]]:
    """Every line of a block of code that calls semidfl, as words."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line.removeprefix("$ ").removeprefix("PYTHONPATH=. ") for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"semidfl [a-z]", line)]


@pytest.mark.parametrize("script", ["reference.py", "results.py", "wrap.py"])
def test_what_a_script_keeps_is_current(script: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_reference_has_every_field() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    for path, _ in leaves(Config()):
        section, _, name = path.rpartition(".")
        part = text.partition(f"`[{section}]`" if section else "## The run")[2].partition("\n## ")[0]
        assert f"| `{name}` |" in part, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_as_shown(page: Path) -> None:
    known = words_of(USAGE.format(recipes=""), COMMANDS)
    for name, *words in commands(page):
        assert name in known, f"{page.name}: semidfl {name}"
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        for flag in flags if name in CHECKED else []:
            assert flag in known[name] or full_path(flag[2:].replace("-", "_")), f"{page.name}: semidfl {name} {flag}"


def test_the_pages_show_enough_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 25


def test_the_numbers_in_the_readme_are_those_of_the_tables() -> None:
    """SemiDFL, the best of the others, and all labels, in the four settings of each data set."""
    shown = re.findall(
        r"^\| ([^|]*(?:SemiDFL here|best other|all labels, here)[^|]*) \|(.*)\|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    rows = [(label, [float(x) for x in cells.replace("*", "").split("|")]) for label, cells in shown]
    expected = []
    for dataset in ("mnist", "fashion-mnist", "cifar10"):
        with (ROOT / f"results/table-main-{dataset}-tuned.csv").open() as file:
            found = [row for row in csv.DictReader(file) if row["mean"]]
        settings = [(r, a) for a in (100.0, 0.1) for r in RATIOS[dataset]]
        means = [
            {x["row"]: float(x["mean"]) for x in found if (float(x["ratio"]), float(x["alpha"])) == s} for s in settings
        ]
        others = [max((v for k, v in m.items() if k not in ("semidfl", "dfl-ub")), default=None) for m in means]
        expected.append((f"{NAMES[dataset]}, SemiDFL here", [m["semidfl"] for m in means]))
        if None not in others:  # of a data set whose table is not complete yet
            expected.append(("best other method here with as many labels", others))
        expected.append(("all labels, here", [m["dfl-ub"] for m in means]))
    assert rows == [(label, pytest.approx(row, abs=0.00501)) for label, row in expected]
