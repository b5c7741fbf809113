"""All tables and figures of the paper that need training, several commands side by side on one GPU.

    python benchmarks/tables.py [WORD …] [--jobs N] [--minutes M] [--out DIR] [--list] [-- OPTION …]

Each part of the work is a `semidfl reproduce … --run missing`; words choose the parts that have all of them, such as
`tuned fashion-mnist`, and what follows `--` is passed on to all. Small networks leave most of a GPU idle: with CUDA's
MPS server running (`nvidia-cuda-mps-control -d`), three commands at a time take less time than one after the other.
Summaries go to DIR/runs.jsonl as runs end; what was run is then written as tables. When the minutes are over, what runs
is stopped with a checkpoint, and the same command goes on.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

from semidfl.commands.words import flags
from semidfl.report.plans import KINDS, METHODS, RATIOS, make_plan
from semidfl.reproduce import options_of
from semidfl.stop import Stop

_OUT = Path("results")
_GRACE = 60.0
"""seconds a stopped command has to end its round and write its checkpoints"""


def parts() -> Iterator[list[str]]:
    """The work, in pieces of a minute or a few, as options of `reproduce`."""
    for dataset, recipe in product(RATIOS, ("tuned", "paper")):
        if dataset == "digits":
            continue
        dear = dataset == "cifar10"
        where = ["--dataset", dataset, "--recipe", recipe, *(["--compute.test_every", "25"] if dear else [])]
        for method, cell in _pieces(reversed(METHODS), dear):  # the longest first, beside which the others run
            yield ["table-main", *where, "--method", method, *cell, "--seeds", "1" if dear else "3"]
        for method, cell in _pieces(METHODS, dear):
            yield ["table-topology", *where, "--method", method, *cell, "--seeds", "1"]
        for name, of in (("pseudo-labels", "cifar10"), ("mixup", "mnist"), ("aggregation", "fashion-mnist")):
            for cell in _cells(dear) if dataset == of else ():
                yield [f"table-{name}", *where, *cell, "--seeds", "1"]
        if recipe == "tuned" and dataset in KINDS["table-levers"].datasets:
            for ratio in RATIOS[dataset]:
                yield ["table-levers", "--dataset", dataset, "--ratio", f"{ratio:g}", "--seeds", "1"]
        if dataset in KINDS["figure-alpha"].datasets:
            for (name, values), method in product(_FIGURES.items(), METHODS):
                alike = method == "dfl-ub" and values == "ratio"
                points = [[f"--{values}", f"{x:g}"] for x in _points(name, dataset)] if dear and not alike else [[]]
                for point in points:
                    yield [name, *where, "--method", method, *point, "--seeds", "1"]


_FIGURES = {"figure-alpha": "alpha", "figure-ratio": "ratio"}


def _points(name: str, dataset: str) -> tuple[float, ...]:
    kind = KINDS[name]
    return kind.alphas if _FIGURES[name] == "alpha" else kind.ratios[dataset]


def _pieces(methods: Iterable[str], dear: bool) -> Iterator[tuple[str, list[str]]]:
    for method in methods:
        for cell in _cells(dear, every_label=method == "dfl-ub"):
            yield method, cell


def _cells(dear: bool, every_label: bool = False) -> list[list[str]]:
    """A cell at a time where each takes minutes; one for all ratios where the ratio changes nothing."""
    if not dear:
        return [[]]
    ratios = [[]] if every_label else [["--ratio", f"{ratio:g}"] for ratio in RATIOS["cifar10"]]
    return [[*ratio, "--alpha", f"{alpha:g}"] for ratio, alpha in product(ratios, KINDS["table-main"].alphas)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0, help="0: until all is done")
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    given = [*sys.argv[1:], "--"]
    asked, passed = parser.parse_args(given[: given.index("--")]), given[given.index("--") + 1 : -1]
    todo = [part for part in parts() if set(asked.words) <= set(part)]
    if not todo:
        parser.error(f"no part has all of these words: {' '.join(asked.words)}")
    if asked.list:
        print("\n".join(" ".join(part) for part in todo))
        return 0
    over = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    with tempfile.TemporaryDirectory() as scratch:
        whole = run_all(todo, asked.jobs, over, asked.out, Path(scratch), passed)
    where = [] if asked.out == _OUT else ["--out", str(asked.out)]  # the page under a table says how it was asked for
    for table in dict.fromkeys(tuple(_whole(part)) for part in todo):
        # One of which no run has ended yet is not written, and says so itself.
        subprocess.run([*_REPRODUCE, *table, *passed, "--run", "no", *where], check=False)
    return 0 if whole else 1


_REPRODUCE = [sys.executable, "-m", "semidfl", "reproduce"]


def run_all(todo: list[list[str]], jobs: int, over: float, out: Path, scratch: Path, passed: list[str]) -> bool:
    """Whether all came to their end. Ctrl-C is heard here and passed on once: a second one would cut rounds off."""
    waiting, running, whole = list(todo), dict[subprocess.Popen[bytes], list[str]](), True
    started = time.monotonic()
    with Stop() as stop:

        def ending() -> bool:
            return stop.requested or time.monotonic() > over

        try:
            while running or (waiting and not ending()):
                while waiting and len(running) < jobs and not ending():
                    busy = frozenset().union(*map(_runs, running.values()))
                    part = next((part for part in waiting if not busy & _runs(part)), None)
                    if part is None:  # all of the rest share a run with one that is at it
                        break
                    waiting.remove(part)
                    running[_started(part, passed, out, scratch)] = part
                time.sleep(0.2)
                if ending():
                    _stop(list(running))
                for process in [p for p in running if p.poll() is not None]:
                    part = running.pop(process)
                    whole &= process.returncode == 0
                    print(
                        f"{time.monotonic() - started:6.0f} s  exit {process.returncode}  {' '.join(part)}", flush=True
                    )
        finally:
            for process in running:  # asked twice
                process.kill()
    return whole and not waiting


def _started(part: list[str], passed: list[str], out: Path, scratch: Path) -> subprocess.Popen[bytes]:
    """Each writes its part of the table to a place of its own, where nobody looks."""
    own = scratch / "-".join(word.strip("-") for word in part)
    where = ["--run", "missing", "--out", str(own), "--kept", str(out / "runs.jsonl")]
    return subprocess.Popen([*_REPRODUCE, *part, *passed, *where], stdout=subprocess.DEVNULL, start_new_session=True)


def _runs(part: list[str]) -> frozenset[str]:
    """The runs that a part is made of: two at the same time must have none in common."""
    return _planned(tuple(part))


@cache
def _planned(part: tuple[str, ...]) -> frozenset[str]:
    return frozenset(make_plan(part[0], options_of(flags(list(part[1:])))).runs())


def _whole(part: list[str]) -> list[str]:
    """The options of the table that a part is of."""
    pairs = [(k, v) for k, v in zip(part[1::2], part[2::2], strict=True) if k not in ("--method", "--ratio", "--alpha")]
    return [part[0], *(word for pair in pairs for word in pair)]


def _stop(running: list[subprocess.Popen[bytes]]) -> None:
    """All at once; who has not written its checkpoints in time is ended."""
    for process in running:
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + _GRACE
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
