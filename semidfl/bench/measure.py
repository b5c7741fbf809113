"""Measures a workload: seconds by phase, what the device reaches of its peak, memory, and the reference beside it."""

import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semidfl.bench.device import Device, Memory
from semidfl.bench.reference import Reference
from semidfl.bench.work import Work, work_of
from semidfl.bench.workloads import Workload, shortened
from semidfl.cohort import Cohort
from semidfl.config import Config
from semidfl.data.sources import load
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import has_test, prepare, train
from semidfl.methods.base import Method
from semidfl.record.folder import read_records
from semidfl.setup import choose_device
from semidfl.terminal import Progress
from semidfl.together import joined, run_together

__all__ = ["Asked", "measure"]

BEFORE = 4
"""rounds of a shortened cell before the first generation"""
WARM = 2
"""rounds of a `rounds` workload that are not counted"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """What the user asked for."""

    rounds: int
    whole: bool = False
    reference: bool = True
    reference_rounds: int = 1


def measure(name: str, workload: Workload, configs: Sequence[Config], asked: Asked) -> dict[str, Any]:
    """The whole result, as JSON can hold it."""
    device = Device.probe(choose_device(configs[0]))
    head = {
        "workload": name,
        "what": workload.what,
        "device": device.name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        "peak_tflops": device.tflops,
        "peak_gigabytes_per_s": device.gigabytes,
    }
    if asked.whole and workload.kind != "rounds":
        return head | {"results": [_whole(configs, device)]}
    if workload.kind == "rounds":
        return head | {"results": [_rounds(config, device, asked) for config in configs]}
    return head | {"results": [_cell(configs, device, asked)]}


def _rounds(config: Config, device: Device, asked: Asked) -> dict[str, Any]:
    """Rounds by themselves; ours and the reference's take turns, so that neither has the quieter machine."""
    memory, started = Memory(device.device), time.perf_counter()
    method, cohort = prepare(config, load(config.data.dataset))
    rounds = train(config, method, cohort, MemoryExchange(cohort.ids))
    warm = [next(rounds) for _ in range(WARM)]
    begun = time.perf_counter() - started
    ours, reference = [next(rounds)], None
    theirs: list[dict[str, float]] = []
    peak = memory.gigabytes()
    if asked.reference:
        reference = Reference.of(method, cohort)
        reference.warm_up(generate=cohort.synthetic is not None)
    for _ in range(asked.rounds):
        ours.append(next(rounds))
        if reference is not None and len(theirs) < asked.reference_rounds:
            theirs.append(reference.round())
    work = work_of(method, cohort, cohort.synthetic is not None)
    seconds = {name: statistics.median(r["seconds"].get(name, 0.0) for r in ours) for name in _names(ours)}
    typical = seconds.pop("round")
    if not any("generated_kept" in r for r in ours):
        seconds.pop("generate")
    result = {
        "clients": len(cohort.ids),
        "rounds_measured": len(ours),
        "seconds_per_round": typical,
        "fastest_and_slowest": [pick(r["seconds"]["round"] for r in ours) for pick in (min, max)],
        "milliseconds_per_client": 1e3 * typical / len(cohort.ids),
        "startup_seconds": max(0.0, begun - WARM * typical),
        "first_round_seconds": warm[0]["seconds"]["round"],
        "phases": _phases(seconds, work, device),
        "peak_memory_gib": peak,
    }
    return result | _compared(theirs, typical, reference)


def _compared(theirs: Sequence[Mapping[str, float]], ours: float, reference: Reference | None) -> dict[str, Any]:
    if reference is None:
        return {}
    seconds = {name: statistics.median(r.get(name, 0.0) for r in theirs) for name in theirs[0]}
    typical = seconds.pop("round")
    found = {"seconds_per_round": typical, "phases": seconds, "threads": reference.threads}
    return {"reference": found, "ratio": typical / ours}


def _cell(configs: Sequence[Config], device: Device, asked: Asked) -> dict[str, Any]:
    """A cell, or a stack of cells, from some rounds of every kind."""
    memory, started = Memory(device.device), time.perf_counter()
    short = [shortened(config, asked.rounds, BEFORE) for config in configs]
    data = load(short[0].data.dataset)
    parts = [prepare(config, data) for config in short]
    method, cohort = parts[0] if len(parts) == 1 else joined(short, parts)[:2]
    prepared = time.perf_counter() - started
    records = list(train(method.setup.config, method, cohort, MemoryExchange(cohort.ids)))
    result = _typical(configs[0], records, prepared) | {"clients": len(cohort.ids), "rounds_measured": len(records)}
    seconds = result.pop("phase_seconds")
    result["phases"] = _phases(seconds, work_of(method, cohort, cohort.synthetic is not None), device)
    result["peak_memory_gib"] = memory.gigabytes()
    if asked.reference:
        del parts, records
        gc.collect()
        result |= _reference_cell(configs[0], method, cohort, result["cell_seconds"])
    return result


def _typical(config: Config, records: Sequence[Record], prepared: float) -> dict[str, Any]:
    """Seconds of a round of each kind, and from them the whole cell's.

    They are medians: kernels are compiled when they are first needed, in the first round of a kind or a later one.
    """
    first = next((k for k, r in enumerate(records) if "generated_kept" in r), len(records))
    made = [r["seconds"]["generate"] for r in records if "generated_kept" in r]
    tested = [r["seconds"]["test"] for r in records if "accuracy" in r]
    base = [_base(r) for r in records]
    spent = {"before": base[:first], "after": base[first:], "generate": made, "test": tested}
    usual = {name: statistics.median(x[1:] or x) if x else 0.0 for name, x in spent.items()}
    count = _counts(config, generates=bool(made))
    surplus = sum(x[0] - usual[name] for name, x in spent.items() if len(x) > 1)
    typical = records[first + 1 :] or records[1:first] or records  # of a late round, where there is one
    phases = {n: statistics.median(r["seconds"].get(n, 0.0) for r in typical) for n in _names(typical)}
    phases |= {name: usual[name] for name in ("generate", "test") if spent[name]}
    phases.pop("round")
    return {
        "cell_seconds": sum(usual[name] * count[name] for name in count),
        "cell": {name: {"count": count[name], "seconds_each": usual[name]} for name in count},
        "startup_seconds": prepared + max(0.0, surplus),
        "seconds_per_round": usual["after"] or usual["before"],
        "phase_seconds": phases,
    }


def _base(record: Record) -> float:
    """Seconds of a round without what happens only in some."""
    seconds: Mapping[str, float] = record["seconds"]
    rare = (seconds["generate"] if "generated_kept" in record else 0.0) + seconds.get("test", 0.0)
    return seconds["round"] - rare


def _counts(config: Config, generates: bool) -> dict[str, int]:
    """How often each kind of round, generation and test occurs in a whole cell."""
    rounds, g = config.rounds, config.generator
    before = min(rounds, g.start - 1) if generates else rounds
    made = len(range(g.start, rounds + 1, g.every)) if generates else 0
    tests = sum(has_test(config, t) for t in range(1, rounds + 1))
    return {"before": before, "after": rounds - before, "generate": made, "test": tests}


def _reference_cell(config: Config, method: Method, cohort: Cohort, ours: float) -> dict[str, Any]:
    """The reference's cell from one round of each kind, after one that is not counted."""
    reference = Reference.of(method, cohort)
    reference.warm_up(generate=False)
    made = cohort.synthetic is not None
    before = reference.round(test=True)
    after = reference.round(generate=True) if made else before
    if made:
        after = after | {k: v for k, v in reference.round(test=True).items() if k not in ("test", "round")}
    base = [sum(v for k, v in x.items() if k not in ("generate", "test", "round")) for x in (before, after)]
    count = _counts(config, made)
    total = count["before"] * base[0] + count["after"] * base[1]
    total += count["generate"] * after.get("generate", 0.0) + count["test"] * before["test"]
    phases = {**after, "test": before["test"]}
    phases.pop("round", None)
    return {"reference": {"cell_seconds": total, "phases": phases, "threads": reference.threads}, "ratio": total / ours}


def _whole(configs: Sequence[Config], device: Device) -> dict[str, Any]:
    """To the end, with all that a run writes."""
    memory, started = Memory(device.device), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / f"{i}" for i in range(len(configs))]
        results = run_together(configs, folders, Progress(plain=True, stream=sys.stderr))
        spent = time.perf_counter() - started
        records = read_records(folders[0])
    share = {"rounds_measured": len(records), "wall_seconds": spent, "accuracy": [r.accuracy for r in results]}
    grown = [{**r, "seconds": {k: v * len(configs) for k, v in r["seconds"].items()}} for r in records]
    typical = _typical(configs[0], grown, 0.0)
    rounds = sum(r["seconds"]["round"] for r in grown)
    return share | {
        "clients": sum(config.graph.clients for config in configs),
        "cell_seconds": rounds - typical["startup_seconds"],
        "startup_seconds": typical["startup_seconds"],
        "outside_rounds_seconds": spent - rounds,
        "seconds_per_round": typical["seconds_per_round"],
        "phases": [{"phase": n, "seconds": s} for n, s in typical["phase_seconds"].items()],
        "peak_memory_gib": memory.gigabytes(),
    }


# --- what the seconds mean -----------------------------------------------------------------------------------


def _names(records: Sequence[Record]) -> Iterator[str]:
    """Of the phases, in the order of a round."""
    return iter(dict.fromkeys(name for r in records for name in r["seconds"]))


def _phases(seconds: Mapping[str, float], work: Mapping[str, Work], device: Device) -> list[dict[str, Any]]:
    """Without those that the method does not have."""
    return [{"phase": n, "seconds": s} | _rates(s, work[n], device) for n, s in seconds.items() if n in work]


def _rates(seconds: float, work: Work, device: Device) -> dict[str, Any]:
    """What was reached, and the roofline: no device is faster than its arithmetic or its memory."""
    peak = device.tflops.get(work.precision) or device.tflops["float32"]
    least = max(work.flop / peak / 1e12, work.bytes / device.gigabytes / 1e9)
    if not seconds:
        return {}
    reached = work.flop / seconds / 1e12
    return asdict(work) | {
        "samples_per_s": work.samples / seconds,
        "tflops": reached,
        "share_of_peak": reached / peak,
        "roofline_seconds": least,
        "share_of_roofline": least / seconds,
    }
