"""Writes docs/results.md from the tables that `semidfl reproduce` has left in results/.

python docs/results.py           # rewrite
python docs/results.py --check   # exit code 1 if it is old
"""

import csv
import re
import sys
from pathlib import Path

from semidfl.commands.words import flags
from semidfl.report.plans import KINDS, make_plan
from semidfl.reproduce import options_of

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "results.md", HERE.parent / "results"
HEAD = """# Results

Made by `python docs/results.py` from the tables in [results/](../results), which `semidfl reproduce` writes; the tests
keep it current. Each table has its command, hardware and time below it, and a CSV and a LaTeX file beside it in
results/, whose runs.jsonl has every run's summary. What is missing has not been run yet; where settings have changed
since, it says so below the table. Single runs, and what did not work, are in [log.md](log.md).

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
    return "\n".join(parts)


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
    with path.with_suffix(".csv").open(encoding="utf-8", newline="") as rows:
        made = {run for row in csv.DictReader(rows) for run in row["runs"].split()}
    return len(made - set(now))


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
