"""Writes docs/results.md from the tables that `semidfl reproduce` has left in results/.

python docs/results.py           # rewrite
python docs/results.py --check   # exit code 1 if it is old
"""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from semidfl.commands.words import flags
from semidfl.report.generated import picture_of
from semidfl.report.plans import KINDS, NAMES, make_plan
from semidfl.reproduce import options_of

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "results.md", HERE.parent / "results"
HEAD = """# Results

Made by `python docs/results.py` from the tables in [results/](../results), which `semidfl reproduce` writes; the tests
keep it current. Each table has its command, hardware and time below it (what every run took, added up; runs that
shared a GPU waited for each other), and a CSV and a LaTeX file beside it in results/, whose runs.jsonl has every run's
summary. What is missing has not been run yet; where settings have changed since, it says so below the table. Single
runs, and what did not work, are in [log.md](log.md).

`digits` is not in the paper: it is a stand-in of 8x8 images that two CPU cores train in minutes. Its `paper` recipe
is the paper's, scaled down to 60 rounds of 10 steps, which is too short for pseudo-labels that start in the first
round: there labels alone do better ([why](log.md#2026-11-15-the-table-on-digits)). The `demo` recipe shows what the
method can do on the same data.
"""


def page() -> str:
    found = [path for kind in KINDS for path in sorted(RESULTS.glob(f"{kind}*.md"))]
    parts = [HEAD]
    for path in found:
        parts.append(path.read_text(encoding="utf-8").replace("# ", f"## {_of(path)}", 1))
        if changed := _changed(path):
            parts.append(f"**{changed} of these runs would have another name today: the recipe has changed since.**\n")
        if (figure := path.with_suffix(".png")).is_file():
            parts.append(f"![{path.stem}](../results/{figure.name})\n")
        parts += _pictures(path)
    return "\n".join(parts)


def _pictures(path: Path) -> Iterator[str]:
    """What the runs of a table generated last, where pictures were kept."""
    for row in _rows(path):
        picture = picture_of(row["runs"].split()[0], RESULTS)
        if picture.is_file():
            words = (
                NAMES.get(row["row"], row["row"]),
                f"r = {float(row['ratio']):g} %",
                f"α = {float(row['alpha']):g}",
            )
            title = f"{', '.join(words)}: drawn by the clients in the last round that generates"
            yield f"![{title}](../results/{picture.name})\n\n*{title}; a row a client, columns by class.*\n"


def _of(path: Path) -> str:
    """The data set and recipe in a file's name, which the title in it does not have."""
    kind = max((kind for kind in KINDS if path.stem.startswith(kind)), key=len)
    rest = path.stem.removeprefix(kind).strip("-")
    return f"{rest}: " if rest else ""


def _changed(path: Path) -> int:
    """How many runs of a table its command would not make today."""
    command = re.search(r"`semidfl reproduce (\S+)(.*)`", path.read_text(encoding="utf-8"))
    assert command is not None, path
    now = make_plan(command[1], options_of(flags(command[2].split()))).runs()
    made = {run for row in _rows(path) for run in row["runs"].split()}
    return len(made - set(now))


def _rows(path: Path) -> list[dict[str, str]]:
    """The table as numbers."""
    with path.with_suffix(".csv").open(encoding="utf-8", newline="") as rows:
        return list(csv.DictReader(rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
