"""`semidfl bench ray`: the same rounds in memory and on Ray, each in a process of its own: time, memory, bytes.

Digits are drawn with replacement, so that any number of clients has samples, all labelled; DFL-LB, the CNN at 8x8, a
random regular graph. Memory is the sum over the whole family of processes, shared pages counted once (PSS).
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from semidfl.commands.words import as_json, parsed, whole_number
from semidfl.config import Config, override, to_toml
from semidfl.data.sources import load
from semidfl.errors import ConfigError

__all__ = ["Figures", "main", "measure"]

HELP = """usage: semidfl bench ray [--clients N,…] [--rounds N] [--actors N] [--format text|json]

  --clients N,…   numbers of clients to measure (1000)
  --rounds N      of each run; the first is left out of the time, where there are more (3)
  --actors N      of Ray, one core each (2)
  --format json   all figures, for another program"""

_SAMPLES = 10
"""labelled samples a client"""


@dataclass(frozen=True)
class Figures:
    """What one run took."""

    clients: int
    engine: str
    seconds: float  # a round
    startup: float  # of the engine
    exchange: float  # seconds a round, of the actor that took longest, waiting left out
    sent: float  # bytes a round between actors
    memory: int  # bytes at the peak, of all processes
    accuracy: float

    @property
    def per_client(self) -> float:
        """Milliseconds a client and round."""
        return 1e3 * self.seconds / self.clients


def main(words: list[str]) -> int:
    """The command."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return 0
    clients, rounds, actors, form = _options(words)
    found = []
    if form == "text":
        print(f"{'clients':>7} {'engine':>7} {'s/round':>8} {'ms/client':>9} {'start s':>8} {'exch. s':>8} ", end="")
        print(f"{'MB/round':>8} {'peak MiB':>8} {'ratio':>6}", flush=True)
    with tempfile.TemporaryDirectory(prefix="semidfl-bench-") as folder:
        for count in clients:
            data = _digits(Path(folder), count)
            pair = [measure(config_of(count, rounds, data, engine, actors)) for engine in ("memory", "ray")]
            for one in pair if form == "text" else []:
                print(_row(one, one.seconds / pair[0].seconds), flush=True)
            found += pair
    if form == "json":
        print(as_json([vars(one) | {"ms_per_client": one.per_client} for one in found]))
    return 0


def _options(words: Sequence[str]) -> tuple[list[int], int, int, str]:
    usage = HELP.splitlines()[0].removeprefix("usage: ")
    _, given = parsed(words, usage, 0, ("clients", "rounds", "actors"), ("text", "json"))
    counts = given.get("clients", "1000").split(",")
    clients = [whole_number({"clients": count}, "clients", 0, least=6) for count in counts]
    rounds, actors = (whole_number(given, *pair, least=1) for pair in (("rounds", 3), ("actors", 2)))
    return clients, rounds, actors, given["format"]


def config_of(clients: int, rounds: int, data: Path, engine: str, actors: int) -> Config:
    """DFL-LB on a random regular graph of degree 4, every client labelled."""
    values = {
        "name": engine,
        "method": "dfl-lb",
        "rounds": rounds,
        "data.dataset": str(data),
        "data.ratio": 100,
        "graph.topology": "random-regular",
        "graph.clients": clients,
        "graph.roles": "L" * clients,
        "classifier.iterations": 10,
        "evaluation.every": rounds,
        "compute.engine": engine,
        "compute.actors": actors,
        "compute.device": "cpu",
        "compute.checkpoint_every": 0,
    }
    return override(Config(), values)


def _digits(folder: Path, clients: int) -> Path:
    """Ten samples a client, drawn with replacement."""
    digits = load("digits")
    rows = np.random.default_rng(0).integers(len(digits.train_labels), size=_SAMPLES * clients)
    path = folder / f"digits-{clients}.npz"
    train, test = (x.transpose(0, 2, 3, 1) for x in (digits.train_images[rows], digits.test_images))  # (n, H, W, ch)
    np.savez(path, x_train=train, y_train=digits.train_labels[rows], x_test=test, y_test=digits.test_labels)
    return path


def measure(config: Config) -> Figures:
    """Runs a config in a process of its own and reads its figures."""
    with tempfile.TemporaryDirectory(prefix="semidfl-bench-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "semidfl", "run", str(file)]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with _watched(run.pid) as peak:
            text, _ = run.communicate()
        if run.returncode:
            raise ConfigError(f"semidfl run failed: {text.strip().splitlines()[-1]}")
        records = [json.loads(x) for x in (Path(folder) / "runs" / config.name / "metrics.jsonl").open()]
    return _figures(config, records, peak[0])


def _figures(config: Config, records: list[dict[str, Any]], peak: int) -> Figures:
    # The first round makes tables and warms caches; the last one tests. Neither is a usual round's time.
    usual = records[1:] or records
    seconds = fmean(r["seconds"]["round"] - r["seconds"].get("test", 0.0) for r in usual)
    exchange = fmean(r["ray"]["exchange"] - r["ray"]["waiting"] if "ray" in r else 0.0 for r in usual)
    sent = fmean(sum(r.get("ray", {}).get("bytes", {}).values()) for r in usual)
    startup = records[0].get("ray", {}).get("startup", 0.0)
    accuracy = fmean(records[-1]["accuracy"])
    return Figures(config.graph.clients, config.compute.engine, seconds, startup, exchange, sent, peak, accuracy)


@contextmanager
def _watched(pid: int, every: float = 0.5) -> Iterator[list[int]]:
    """The peak of the memory of a process and all that come from it."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], sum(map(_pss, _family(pid))))
            time.sleep(every)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _family(pid: int) -> list[int]:
    try:
        text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return [pid, *(one for child in text.split() for one in _family(int(child)))]


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _row(one: Figures, ratio: float) -> str:
    left = f"{one.clients:7} {one.engine:>7} {one.seconds:8.2f} {one.per_client:9.2f} {one.startup:8.1f}"
    right = f"{one.exchange:8.3f} {one.sent / 1e6:8.2f} {one.memory / 2**20:8.0f} {ratio:6.2f}"
    return f"{left} {right}"
