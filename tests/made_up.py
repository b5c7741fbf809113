"""Run folders made up in a moment, by the true writer: of any size, as long runs would leave them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semidfl import topology
from semidfl.config import Config, config_hash, override, to_toml
from semidfl.record.folder import RunFolder
from semidfl.record.images import save_png

__all__ = ["make_run", "record_of"]

CLASSES = 10
PHASES = ("pseudo-label", "generator", "generate", "classifier", "mix", "test")


def config_of(clients: int, rounds: int, **more: object) -> Config:
    graph = {"graph.topology": "fig1"} if clients == 10 else {"graph.topology": "random-regular"}
    return override(Config(), {"data.dataset": "digits", "graph.clients": clients, "rounds": rounds, **graph, **more})


def record_of(t: int, config: Config, graph: topology.Topology, random: np.random.Generator) -> dict[str, Any]:
    """One round's figures; accuracy grows."""
    n = graph.clients
    grown = 0.95 - 0.85 * np.exp(-t / (0.15 * config.rounds))
    given = random.integers(0, 100, (n, CLASSES))
    record = {
        "round": t,
        "pseudo_labels": random.integers(50, 100, n),
        "pseudo_precision": random.uniform(0.8, 1.0, n),
        "thresholds": random.uniform(0.2, 0.95, (n, CLASSES)).round(6),
        "pseudo_given": given,
        "pseudo_right": given * 9 // 10,
        "pseudo_wrong": given - given * 9 // 10,
        "loss": random.uniform(0.1, 2.0, n).round(6),
        "generator_loss": random.uniform(0.1, 2.0, n).round(6),
        "weights": [random.dirichlet(np.full(1 + len(near), 4.0)).round(6) for near in graph.neighbours],
        "seconds": {name: float(random.uniform(0.01, 0.2)) for name in PHASES} | {"round": 1.2},
        "bytes_sent": {"models": [4_000_000] * n, "classifiers": [400_000] * n, "counts": [400] * n},
    }
    if t % config.evaluation.every == 0 or t == config.rounds:
        record["accuracy"] = (grown + random.normal(0, 0.02, n)).clip(0, 1).round(6)
    return record


def make_run(
    path: Path,
    clients: int = 10,
    rounds: int = 20,
    done: int | None = None,
    missing: Sequence[int] = (),
    **more: object,
) -> Path:
    """A run of `done` rounds (all by default, with a summary), each with a picture every tenth round."""
    config = config_of(clients, rounds, **({"name": path.name} | more))
    graph, random = topology.build(config.graph, config.seed), np.random.default_rng(0)
    done = rounds if done is None else done
    with RunFolder.create(path, to_toml(config)) as kept:
        rows, columns = min(20, clients), 2 * CLASSES
        known = {
            "own": list(range(clients)),
            "roles": graph.roles,
            "edges": graph.edges(),
            "classes": [str(k) for k in range(CLASSES)],
            "labelled": [random.integers(0, 9, CLASSES).tolist() if r in "LM" else [0] * CLASSES for r in graph.roles],
            "unlabelled": [
                random.integers(0, 99, CLASSES).tolist() if r in "MU" else [0] * CLASSES for r in graph.roles
            ],
            "unknown": [0] * clients,
            "samples": {"clients": list(range(rows)), "classes": [str(k % CLASSES) for k in range(columns)]},
        }
        kept.write_text("clients.json", json.dumps(known))
        for t in range(1, done + 1):
            record = record_of(t, config, graph, random)
            kept.append(record | ({"absent": list(missing)} if missing else {}))
            if t % max(1, rounds // 20) == 0:
                images = random.integers(0, 256, (rows, columns, 1, 8, 8), dtype=np.uint8)
                save_png(kept.samples / f"round-{t:06d}.png", images, scale=8)
        if done == rounds:
            _end(kept, config, clients)
    return path


def _end(kept: RunFolder, config: Config, clients: int) -> None:
    tests = np.array([r["accuracy"] for r in kept.records() if "accuracy" in r])[-config.evaluation.last :]
    matrix = np.full((CLASSES, CLASSES), 1) + 30 * np.eye(CLASSES, dtype=int)
    kept.write_text("confusion.json", json.dumps({"mean": matrix.tolist(), "clients": [matrix.tolist()] * clients}))
    kept.write_summary(
        {
            "name": config.name,
            "method": config.method,
            "config": config_hash(config),
            "accuracy": tests.mean(),
            "std_over_clients": tests.mean(0).std(),
            "per_client": tests.mean(0),
            "last_test": tests[-1],
            "rounds": config.rounds,
            "seconds": 1.2 * config.rounds,
            "bytes_per_client": 4_400_400.0 * config.rounds,
            "device": "cpu: made up",
            "versions": {"python": "3.11", "torch": "2.13.0", "numpy": "2.4"},
        }
    )
