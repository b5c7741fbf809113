"""`semidfl bench peers`: how fast tensors go from peer to peer, and what a round of ten peers costs beside its compute.

- throughput: one peer fetches 20 MB from another over mutual TLS on loopback, with all checks, again and again;
- overhead: ten peers on loopback, seconds a round, against the same config in memory client by client on one thread,
  which is the sum of their compute, shared out over the cores.
"""

import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from semidfl.commands.words import as_json, parsed, whole_number
from semidfl.config import override
from semidfl.data.sources import load
from semidfl.exchange.client import Neighbour
from semidfl.exchange.grpc import GrpcExchange
from semidfl.exchange.memory import MemoryExchange
from semidfl.exchange.plan import Plan
from semidfl.experiment import prepare, train
from semidfl.node import identity
from semidfl.node.audit import Audit
from semidfl.node.local import Local, free_ports, new_federation

__all__ = ["main", "overhead", "throughput"]

USAGE = "semidfl bench peers [--megabytes 20] [--times 20] [--peers 10] [--rounds 8] [--format text|json]"


def main(words: list[str]) -> int:
    """Both measurements; what they are held against stands beside them."""
    if words and words[-1] in ("-h", "--help"):
        print(f"usage: {USAGE}")
        return 0
    asked = {"megabytes": 20, "times": 20, "peers": 10, "rounds": 8}
    _, given = parsed(words, USAGE, 0, asked, ("text", "json"))
    asked = {name: whole_number(given, name, default, least=1) for name, default in asked.items()}
    speed = throughput(asked["megabytes"], asked["times"])
    cost = overhead(asked["peers"], asked["rounds"])
    if given["format"] == "json":
        print(as_json({"asked": asked, "megabytes_per_second": speed, **cost}))
        return 0
    print(f"exchange over mutual TLS, {asked['megabytes']} MB a message: {speed:.0f} MB/s (wanted: 150 or more)")
    print(
        f"a round of {asked['peers']} peers: {cost['round']:.3f} s; its compute, shared out over "
        f"{cost['cores']:.0f} cores: {cost['compute']:.3f} s; ratio {cost['ratio']:.2f} (wanted: 2 or less)"
    )
    return 0


def throughput(megabytes: int, times: int) -> float:
    """MB a second of one stream, from process to process; the best of three runs of `times` messages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        identity.init(folder)
        for peer in ("one", "two"):
            identity.issue(folder, peer)
        ports = free_ports(2)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        server = context.Process(target=_serve, args=(folder, ports, megabytes, there))
        server.start()
        try:
            if not here.poll(60):
                raise RuntimeError("the serving process did not start")
            here.recv()
            return _fetch(folder, ports, megabytes, times)
        finally:
            here.send("end")
            server.join(10)
            if server.is_alive():
                server.kill()


def _peer(folder: Path, ports: list[int], me: int) -> GrpcExchange:
    names = ("one", "two")
    other = Neighbour(names[1 - me], f"127.0.0.1:{ports[1 - me]}", (1 - me,))
    plan = Plan(names[me], f"127.0.0.1:{ports[me]}", (me,), (other,), "bench", {}, rounds=1)
    log = logging.Logger("bench", logging.ERROR)
    return GrpcExchange(plan, identity.Identity.load(folder, names[me]), Audit(_own(folder, names[me])), log)


def _own(folder: Path, name: str) -> Path:
    (folder / f"run-{name}").mkdir(exist_ok=True)
    return folder / f"run-{name}"


def _payload(megabytes: int) -> dict[str, torch.Tensor]:
    return {"generator": torch.randn(1, megabytes * 250_000, generator=torch.Generator().manual_seed(0))}


def _serve(folder: Path, ports: list[int], megabytes: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with _peer(folder, ports, 0) as exchange:
        exchange.publish(1, "state", _payload(megabytes))
        pipe.send("ready")
        pipe.recv()


def _fetch(folder: Path, ports: list[int], megabytes: int, times: int) -> float:
    torch.set_num_threads(1)
    wanted, best = _payload(megabytes), 0.0
    with _peer(folder, ports, 1) as exchange:
        exchange.collect("state", wanted, 0)  # connects, and lets the other side encode
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(times):
                found = exchange.collect("state", wanted, 0)["one"].tensors
                assert found is not None
            best = max(best, megabytes * times / (time.perf_counter() - started))
        assert found is not None
        assert torch.equal(found["generator"], wanted["generator"])
    return best


def overhead(peers: int, rounds: int) -> dict[str, float]:
    """Seconds of a round of real peers and of its compute alone, medians after the first two rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "federation"
        ports = free_ports(peers)
        roles = "LLMM" + "U" * (peers - 4) if peers >= 5 else "L" * peers
        members = {f"p{k}": (roles[k], f"127.0.0.1:{port}") for k, port in enumerate(ports)}
        values = {"name": "bench", "recipe": "paper", "dataset": "digits"}
        values["topology"] = "fig1" if peers == 10 else "ring"
        config = {"rounds": rounds, "compute.deterministic": True, "compute.report": False}
        made = new_federation(folder, members, values, {"config": config})
        alone = _alone(override(made.config, {"compute.threads": 1, "compute.device": "cpu"}))
        with Local(folder, made, ("--compute.threads", "1", "--compute.device", "cpu")) as local:
            local.start_all()
            codes = local.wait(600)
            if any(codes.values()):
                raise RuntimeError(local.log_file(next(n for n, code in codes.items() if code)).read_text())
            together = [_rounds(local.run_folder(peer)) for peer in members]
    cores = min(os.cpu_count() or 1, peers)
    seconds = statistics.median(second for run in together for second in run)
    return {"round": seconds, "compute": alone / cores, "ratio": seconds / (alone / cores), "cores": float(cores)}


def _alone(config: Any) -> float:
    method, cohort = prepare(config, load(config.data.dataset))
    records = list(train(config, method, cohort, MemoryExchange(cohort.ids)))
    return float(statistics.median(record["seconds"]["round"] for record in records[2:]))


def _rounds(folder: Path) -> list[float]:
    from semidfl.record.folder import read_records

    return [record["seconds"]["round"] for record in read_records(folder)[2:]]
