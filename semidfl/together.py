"""Runs that differ only in seed, split, labelled share, skew or graph, trained as one stack of clients.

A GPU that waits for ten small networks does not wait longer for a hundred. The runs' clients stand side by side on
the client axis, their graphs are one graph of as many islands, and each draws the random numbers that it would draw
alone: so each run ends with what it would have ended with by itself, up to rounding, and bit for bit with
`deterministic`. Every run keeps its own folder, checkpoints included; stopped, each can also be resumed alone.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semidfl.cohort import Cohort, Learner, Synthetic
from semidfl.config import Config, DataConfig, GraphConfig, config_hash, to_toml
from semidfl.data.shards import Index, Shards
from semidfl.data.sources import is_folder, load
from semidfl.draws import Draws
from semidfl.errors import CheckpointError, ConfigError, Stopped
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import Result, finish, keep, prepare, save_checkpoint, take_up, train
from semidfl.methods.base import Method
from semidfl.record import checkpoint
from semidfl.record.clients import write_clients
from semidfl.record.folder import RunFolder
from semidfl.record.pace import Pace
from semidfl.setup import choose_device
from semidfl.stop import Stop
from semidfl.terminal import Progress
from semidfl.topology import Topology

__all__ = ["at_once", "joined", "likeness", "open_folder", "resumable", "run_together"]


_CLIENTS = 120
"""of all runs in a stack"""


def likeness(config: Config) -> str:
    """The same for runs that may train together."""
    graph = replace(GraphConfig(), clients=config.graph.clients)
    split = DataConfig()
    alike = replace(config, seed=0, data=replace(config.data, ratio=split.ratio, alpha=split.alpha), graph=graph)
    return f"{config_hash(alike)} {config.compute}"  # the hash leaves out how a run is computed


def at_once(config: Config, device: str = "") -> int:
    """How many runs like this one to train together: the one place where that is chosen.

    A GPU takes a hundred small clients in little more time than ten; one run of ResNets fills it, and two CPU cores are
    full with any. `device`, cpu or cuda, is given where it is not this process that trains.
    """
    device = device or choose_device(config).type
    alone = config.attack.kind != "none" or is_folder(config.data.dataset)
    if alone or device != "cuda" or config.classifier.model != "cnn":
        return 1
    return max(1, _CLIENTS // config.graph.clients)


@dataclass(frozen=True)
class _Run:
    """One run among those that train together."""

    config: Config
    method: Method  # as it would be alone: its own graph
    ids: tuple[int, ...]  # of its clients, by themselves
    rows: slice  # of its clients, among all

    def part(self, cohort: Cohort) -> Cohort:
        """Its own clients, as a cohort."""
        learners = [None if x is None else x.rows(self.rows) for x in (cohort.classifier, cohort.generator)]
        assert learners[0] is not None
        synthetic = None if cohort.synthetic is None else cohort.synthetic.rows(self.rows)
        memory = {name: x[self.rows].clone() for name, x in cohort.memory.items()}
        draws, shards = cohort.draws.rows(self.rows), cohort.shards.rows(self.rows)
        return Cohort(self.ids, draws, shards, learners[0], learners[1], synthetic, memory)

    def record(self, record: Mapping[str, Any], runs: int) -> dict[str, Any]:
        """Its own clients' figures of a round, and its share of the time."""
        own = {name: self._own(x) for name, x in record.items() if name != "seconds"}
        widest = 1 + max(map(len, self.method.setup.graph.neighbours))
        own["weights"] = [row[:widest] for row in own["weights"]]  # padded to the widest neighbourhood of all runs
        seconds = {name: round(x / runs, 6) for name, x in record["seconds"].items()}
        return own | {"seconds": seconds} | ({"together": runs} if runs > 1 else {})

    def _own(self, x: Any) -> Any:
        if isinstance(x, list):  # all figures carry the client axis first
            return x[self.rows]
        return {name: self._own(v) for name, v in x.items()} if isinstance(x, dict) else x


def run_together(configs: Sequence[Config], folders: Sequence[Path], progress: Progress | None = None) -> list[Result]:
    """Runs experiments that are alike as one, each into its own folder; those that were begun go on.

    They must have come equally far. What a folder holds of another run is removed.
    """
    if len({likeness(config) for config in configs}) != 1:
        raise ConfigError("runs train together only if they differ in nothing but seed, ratio, alpha and graph")
    if len(configs) > 1 and configs[0].attack.kind != "none":  # who lies is drawn from a run's own clients
        raise ConfigError(f"attack.kind = {configs[0].attack.kind!r}: runs with attackers train one by one")
    if len(configs) > 1 and is_folder(configs[0].data.dataset):  # what is kept for testing is drawn by the seed
        raise ConfigError(f"data.dataset = {configs[0].data.dataset!r}: runs on a folder train one by one")
    with ExitStack() as stack:
        # First of all, before what takes time: another process may want the same run.
        kept = [stack.enter_context(open_folder(*pair)) for pair in zip(configs, folders, strict=True)]
        data = load(configs[0].data.dataset, configs[0].data, configs[0].seed)
        parts = [prepare(config, data) for config in configs]
        done = {take_up(k, config, cohort) for k, config, (_, cohort) in zip(kept, configs, parts, strict=True)}
        if len(done) > 1:
            raise ConfigError(f"runs train together only if they have come equally far, not rounds {sorted(done)}")
        for k, (own, cohort) in zip(kept, parts, strict=True):
            write_clients(k, data.classes, own.setup, cohort)
        method, cohort, runs = joined(configs, parts)
        shown = stack.enter_context(progress or Progress())
        last = _train(method, cohort, runs, kept, shown, done.pop() + 1)
        if last < method.setup.config.rounds:
            raise Stopped(f"stopped after round {last}; each run can be resumed: semidfl resume {kept[0].path}")
        return [finish(run.config, run.method, run.part(cohort), k) for run, k in zip(runs, kept, strict=True)]


def open_folder(config: Config, path: Path) -> RunFolder:
    """Open where it was stopped, else new."""
    if not resumable(path):
        return RunFolder.create(path, to_toml(config), overwrite=True)
    kept = RunFolder.open(path)
    kept.write_text("config.toml", to_toml(config))  # where and how a run is computed is as asked for now
    return kept


def resumable(folder: Path) -> int:
    """After how many rounds a run that was begun there can go on; 0: not at all."""
    if not (folder / "config.toml").is_file():
        return 0
    try:
        return checkpoint.load_latest(folder / "checkpoints")[0]
    except CheckpointError:
        return 0


def _train(
    method: Method, cohort: Cohort, runs: Sequence[_Run], kept: Sequence[RunFolder], shown: Progress, first: int
) -> int:
    config, done, stop = method.setup.config, first - 1, Stop()
    pace = Pace(config.compute.checkpoint_every)
    shown.start(config.rounds, first, list(method.setup.graph.roles))
    with stop:
        for record in train(config, method, cohort, MemoryExchange(cohort.ids), first):
            done = record["round"]
            shown.update(done, record)
            stopping = stop.requested  # asked once: all stop after the same round, with a checkpoint
            for run, folder in zip(runs, kept, strict=True):
                keep(run.method, folder, run.record(record, len(runs)), partial(run.part, cohort))
            if stopping or done == config.rounds or pace.due(done):
                with pace.writing():
                    for run, folder in zip(runs, kept, strict=True):
                        save_checkpoint(run.config, folder, done, run.part(cohort))
            if stopping:
                break
    return done


def joined(configs: Sequence[Config], parts: Sequence[tuple[Method, Cohort]]) -> tuple[Method, Cohort, list[_Run]]:
    """All clients of all runs as one cohort on one graph of islands."""
    runs, at = [], 0
    for config, (method, cohort) in zip(configs, parts, strict=True):
        runs.append(_Run(config, method, cohort.ids, slice(at, at + len(cohort.ids))))
        at += len(cohort.ids)
    first, cohorts = parts[0][0], [cohort for _, cohort in parts]
    method = type(first)(replace(first.setup, graph=_islands([m.setup.graph for m, _ in parts])))
    generators = [c.generator for c in cohorts if c.generator is not None]
    made = [c.synthetic for c in cohorts if c.synthetic is not None]
    cohort = Cohort(
        tuple(range(at)),
        Draws(torch.cat([c.draws.keys for c in cohorts])),
        _shards([c.shards for c in cohorts]),
        _learner([c.classifier for c in cohorts]),
        _learner(generators) if generators else None,
        Synthetic(*(torch.cat(x) for x in zip(*(vars(m).values() for m in made), strict=True))) if made else None,
        {name: torch.cat([c.memory[name] for c in cohorts]) for name in cohorts[0].memory},
    )
    return method, cohort, runs


def _islands(graphs: Sequence[Topology]) -> Topology:
    """Graphs side by side, with no edge between them."""
    neighbours: list[tuple[int, ...]] = []
    for graph in graphs:
        at = len(neighbours)
        neighbours += [tuple(at + j for j in row) for row in graph.neighbours]
    return Topology("islands", tuple(neighbours), "".join(graph.roles for graph in graphs))


def _shards(parts: Sequence[Shards]) -> Shards:
    """The pool of images is the same for all."""
    indices = [_index([getattr(part, name) for part in parts]) for name in ("labelled", "unlabelled")]
    prints = torch.cat([part.prints for part in parts if part.prints is not None])
    return replace(parts[0], labelled=indices[0], unlabelled=indices[1], prints=prints)


def _index(parts: Sequence[Index]) -> Index:
    longest = max(part.table.shape[1] for part in parts)
    tables = [torch.nn.functional.pad(part.table, (0, longest - part.table.shape[1])) for part in parts]
    held = tuple(n for part in parts for n in part.held)
    return Index(torch.cat(tables), torch.cat([part.count for part in parts]), held)


def _learner(parts: Sequence[Learner]) -> Learner:
    optimiser = {name: torch.cat([part.optimiser[name] for part in parts]) for name in parts[0].optimiser}
    averages: list[Tensor] = [part.average for part in parts if part.average is not None]
    return Learner(torch.cat([part.params for part in parts]), optimiser, torch.cat(averages) if averages else None)
