"""A run from config to result: prepare the clients, do the rounds, test, record; stop and resume at any moment."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semidfl import topology
from semidfl.cohort import Cohort, Learner, each
from semidfl.config import Config, config_hash, from_toml, override, to_toml
from semidfl.data.dataset import Dataset
from semidfl.data.own import with_sites
from semidfl.data.partition import Split, by_owner, partition
from semidfl.data.shards import Shards
from semidfl.data.sources import load
from semidfl.draws import Draws
from semidfl.errors import ConfigError, DataError, Stopped
from semidfl.exchange.attack import Hostile, hostile, mislabelled
from semidfl.exchange.base import Counted, Exchange
from semidfl.exchange.compressed import Compressed
from semidfl.exchange.memory import MemoryExchange
from semidfl.learn.classifier import accuracy
from semidfl.learn.generator import Generator
from semidfl.methods import Method, find_method
from semidfl.models.stacked import Network
from semidfl.record import checkpoint, parts
from semidfl.record.card import model_card
from semidfl.record.clients import sample_grid, write_clients, write_confusion
from semidfl.record.folder import RunFolder
from semidfl.record.images import save_png
from semidfl.record.log import RoundLog
from semidfl.record.pace import Pace
from semidfl.record.tensorboard import check_sink, opened
from semidfl.record.version import stamp
from semidfl.rounds import one_round
from semidfl.setup import Setup
from semidfl.stop import Stop
from semidfl.terminal import Progress

__all__ = [
    "Result",
    "finish",
    "first_test",
    "gather",
    "has_test",
    "keep",
    "prepare",
    "resume",
    "run",
    "save_checkpoint",
    "save_models",
    "shards_of",
    "take_up",
    "test",
    "train",
]


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Mean over clients and the last tests, in 0..1."""
        return float(self.summary["accuracy"])


def run(config: Config, folder: str | Path = "", overwrite: bool = False, progress: Progress | None = None) -> Result:
    """Runs an experiment; `folder` defaults to runs/NAME."""
    check_sink(config.compute.log)
    if config.compute.engine == "ray":
        from semidfl.cluster import driver

        return _reported(config, driver.run(config, folder, overwrite, progress))
    data = load(config.data.dataset, config.data, config.seed)
    config = with_sites(config, data)
    method, cohort = prepare(config, data)
    path = Path(folder or Path("runs") / config.name)
    with RunFolder.create(path, to_toml(config), overwrite) as kept, progress or Progress() as shown:
        write_clients(kept, data.classes, method.setup, cohort)
        result = _rounds(config, method, cohort, kept, shown, first=1)
    return _reported(config, result)


def resume(folder: str | Path, progress: Progress | None = None, values: Mapping[str, object] | None = None) -> Result:
    """Goes on where a run was stopped; ends with what it would have ended with.

    `values` may change how it is computed (fields of compute), the engine too, but not what.
    """
    with RunFolder.open(Path(folder)) as kept, progress or Progress() as shown:
        config = _as_computed_now(kept, values or {})
        check_sink(config.compute.log)
        if config.compute.engine == "ray":
            from semidfl.cluster import driver

            result = driver.go_on(config, kept, shown)
        else:
            data = load(config.data.dataset, config.data, config.seed)
            method, cohort = prepare(config, data)
            done = take_up(kept, config, cohort)
            write_clients(kept, data.classes, method.setup, cohort)
            result = _rounds(config, method, cohort, kept, shown, first=done + 1)
    return _reported(config, result)


def _reported(config: Config, result: Result) -> Result:
    """The report comes last, when the result is safe: whatever goes wrong with it, the run has ended well."""
    if config.compute.report:
        from semidfl.report.html import at_the_end

        at_the_end(result.folder)
    return result


def _as_computed_now(kept: RunFolder, values: Mapping[str, object]) -> Config:
    begun = from_toml(kept.config_toml)
    config = override(begun, values)
    if config_hash(config) != config_hash(begun) or config.name != begun.name:
        raise ConfigError(f"{', '.join(values)}: a run that has begun goes on as it is; only compute.* can change")
    if config != begun:
        kept.write_text("config.toml", to_toml(config))
    return config


def take_up(kept: RunFolder, config: Config, cohort: Cohort) -> int:
    """Brings a fresh cohort to where the run was at its last checkpoint; returns the rounds done."""
    done = 0
    if parts.begun(kept.checkpoints):
        done, tensors = parts.load_latest(kept.checkpoints, cohort.ids, config_hash(config))
        cohort.restore(tensors)
    kept.truncate(done)
    return done


def prepare(
    config: Config, data: Dataset, clients: Sequence[int] | None = None, graph: topology.Topology | None = None
) -> tuple[Method, Cohort]:
    """The method and a cohort of some clients (all by default) before the first round."""
    kind = find_method(config.method)
    graph = graph or topology.build(config.graph, config.seed)
    method = kind(Setup.of(config, data, graph))
    ids = tuple(range(graph.clients)) if clients is None else tuple(clients)
    return method, gather(method, ids, shards_of(method, data, ids))


def shards_of(method: Method, data: Dataset, ids: tuple[int, ...]) -> Shards:
    """What some clients hold."""
    setup, config, kind = method.setup, method.setup.config, type(method)
    split = _split(config, data, setup.graph, kind)
    if config.attack.kind == "label-flip":
        data, split = mislabelled(data, split, hostile(config, setup.graph, kind.all_labelled))
    return Shards.of(data, split, ids, setup.device)


def gather(method: Method, ids: tuple[int, ...], shards: Shards) -> Cohort:
    """A cohort of clients that hold these data, before the first round."""
    setup = method.setup
    draws = Draws.of([setup.config.seed] * len(ids), ids, setup.device)
    cohort = Cohort(ids, draws, shards, _learner(setup, len(ids), "classifier"))
    if method.generates:
        cohort.generator = _learner(setup, len(ids), "generator")
    return cohort


def _split(config: Config, data: Dataset, graph: topology.Topology, kind: type[Method]) -> Split:
    if kind.all_labelled and (unknown := int((data.train_labels < 0).sum())):
        raise DataError(f"method = {config.method!r} needs every label, and {unknown} images of {data.name} have none")
    if data.owners is not None:
        return by_owner(data.train_labels, data.owners, graph.clients)
    if kind.all_labelled:
        return partition(data.train_labels, "L" * graph.clients, 100.0, config.data.alpha, config.seed)
    return partition(data.train_labels, graph.roles, config.data.ratio, config.data.alpha, config.seed)


def _learner(setup: Setup, clients: int, part: str) -> Learner:
    """All clients start from the same weights: averaging needs it."""
    network = setup.classifier if part == "classifier" else setup.generator
    start = setup.optimiser.start if part == "classifier" else setup.generator.start
    decay = setup.config.classifier.ema if part == "classifier" else setup.config.generator.ema
    params = network.initial(setup.config.seed).to(setup.device).expand(clients, -1).clone()
    return Learner(params, start(params), params.clone() if decay else None)


def _rounds(config: Config, method: Method, cohort: Cohort, kept: RunFolder, shown: Progress, first: int) -> Result:
    shown.start(config.rounds, first, list(method.setup.graph.roles))
    done, pace = first - 1, Pace(config.compute.checkpoint_every)
    with Stop() as stop, opened(config.compute.log, kept.path, first) as sink:
        for record in train(config, method, cohort, MemoryExchange(cohort.ids), first):
            done = record["round"]
            stopping = stop.requested  # asked once: whoever stops has written a checkpoint
            keep(method, kept, record, lambda: cohort)
            if stopping or done == config.rounds or pace.due(done):
                with pace.writing():
                    save_checkpoint(config, kept, done, cohort)
            if sink is not None:
                sink.write(record)
            shown.update(done, record)
            if stopping:
                break
    if done < config.rounds:
        raise Stopped(f"stopped after round {done}; go on with: semidfl resume {kept.path}")
    return finish(config, method, cohort, kept)


def keep(method: Method, kept: RunFolder, record: Mapping[str, Any], cohort: Callable[[], Cohort]) -> None:
    """What every round leaves behind: its record, and pictures of what was generated."""
    kept.append(record)
    if "generated_kept" in record:
        _save_samples(kept, record["round"], cohort(), method.setup.space.classes)


def finish(config: Config, method: Method, cohort: Cohort, kept: RunFolder) -> Result:
    """What a run leaves behind when it has ended."""
    save_models(kept, method, cohort)
    write_confusion(kept, method.setup, cohort)
    liars = hostile(config, method.setup.graph, method.all_labelled)
    summary = summarise(config, kept.records(), method.setup.device, liars)
    kept.write_summary(summary)
    mean_model = float(test(method.setup, cohort.classifier.params.mean(0, keepdim=True)))
    kept.write_text("model_card.md", model_card(method.setup, cohort, summary, mean_model))
    return Result(kept.path, summary)


def train(config: Config, method: Method, cohort: Cohort, exchange: Exchange, first: int = 1) -> "Rounds":
    """The rounds one by one, each as its record."""
    return Rounds(config, method, cohort, exchange, first)


class Rounds:
    """Iterator over rounds; the cohort is whole whenever it yields."""

    def __init__(self, config: Config, method: Method, cohort: Cohort, exchange: Exchange, first: int) -> None:
        self.config, self.method, self.cohort, self.t = config, method, cohort, first
        self.counted = Counted(exchange, method.setup.graph, cohort.ids)
        # Lies are rounded like all else, and what is counted is what then goes out.
        liars = hostile(config, method.setup.graph, method.all_labelled)
        rounded = Compressed.around(self.counted, config.exchange, cohort)
        self.exchange = Hostile.around(rounded, config, cohort.ids, liars)

    def __iter__(self) -> "Rounds":
        return self

    def __next__(self) -> dict[str, Any]:
        if self.t > self.config.rounds:
            raise StopIteration
        started = time.perf_counter()
        log = RoundLog(self.t, self.method.setup.device)
        one_round(self.t, self.cohort, self.method, self.exchange, log)
        # A real peer may have nothing to test with.
        if has_test(self.config, self.t) and self.method.setup.test_labels.numel():
            with log.phase("test"):
                log["accuracy"] = test(self.method.setup, self.cohort.classifier.params)
        log["bytes_sent"] = self.counted.reset()
        record = log.record()
        record["seconds"]["round"] = round(time.perf_counter() - started, 6)
        self.t += 1
        return record


def has_test(config: Config, t: int) -> bool:
    """Whether round t ends with a test: those at the end make the result, the others show how it goes."""
    every, rounds = config.evaluation.every, config.rounds
    to_come = rounds // every - t // every + (rounds % every > 0)
    counts = to_come < config.evaluation.last
    return t == rounds or t % (every if counts else config.compute.test_every or every) == 0


def first_test(config: Config) -> int:
    """The first round with a test: of those that show how it goes, of those that count, or the last round."""
    every, rounds = config.evaluation.every, config.rounds
    uncounted = max(0, rounds // every + (rounds % every > 0) - config.evaluation.last)
    possible = config.compute.test_every or every, every * (uncounted + 1), rounds
    return min(t for t in possible if t <= rounds and has_test(config, t))


def test(setup: Setup, params: Tensor) -> Tensor:
    """Accuracy of every client's model on the whole test set (C,)."""
    images, labels = setup.test_images, setup.test_labels
    size, limit = setup.passes(len(params), images.shape[1])
    return each(lambda p: accuracy(setup.classifier, setup.space, p, images, labels, limit), size, params)


def summarise(
    config: Config, records: Sequence[Mapping[str, Any]], device: torch.device, liars: Sequence[int] = ()
) -> dict[str, Any]:
    """The result: each client's mean over the last tests, then mean and standard deviation over the clients."""
    tests = np.array([r["accuracy"] for r in records if "accuracy" in r][-config.evaluation.last :])
    clients = tests.mean(0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    honest = np.delete(clients, list(liars))
    attacked = {"attackers": list(liars), "honest_accuracy": float(honest.mean())} if liars else {}
    return {
        "name": config.name,
        "method": config.method,
        "config": config_hash(config),
        "accuracy": float(clients.mean()),
        "std_over_clients": float(clients.std()),
        **attacked,
        "per_client": clients.tolist(),
        "last_test": tests[-1].tolist(),
        "rounds": len(records),
        "seconds": sum(r["seconds"]["round"] for r in records),
        "bytes_per_client": sum(sum(map(sum, r["bytes_sent"].values())) for r in records) / tests.shape[1],
        "device": f"{device.type}: {name}",
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
    }


def save_checkpoint(
    config: Config, kept: RunFolder, done: int, cohort: Cohort, more: Mapping[str, str] | None = None
) -> None:
    """`more` goes into its text."""
    kept.sync()
    text = {**(more or {}), "config": config_hash(config)} | stamp()
    checkpoint.save(kept.checkpoints, done, cohort.state(), text)
    parts.forget_others(kept.checkpoints, 0)


def save_models(kept: RunFolder, method: Method, cohort: Cohort) -> None:
    """One file a client and part, with plain names and shapes: any safetensors reader can use them."""
    parts: dict[str, tuple[Network | Generator, Learner]] = {"classifier": (method.setup.classifier, cohort.classifier)}
    if cohort.generator is not None:
        parts["generator"] = (method.setup.generator, cohort.generator)
    for part, (network, learner) in parts.items():
        tensors = network.named(learner.params)
        for row, client in enumerate(cohort.ids):
            meta = {"client": str(client), "part": part, "config": config_hash(method.setup.config)}
            meta |= stamp(method.setup.space)
            one = {name: x[row].contiguous() for name, x in tensors.items()}
            checkpoint.save_model(kept.models / f"{part}-{client:04d}.safetensors", one, meta)


def _save_samples(kept: RunFolder, t: int, cohort: Cohort, classes: int) -> None:
    """The first generated images of the first clients, a row each; columns run through the classes."""
    assert cohort.synthetic is not None
    rows, columns = sample_grid(len(cohort.ids), cohort.synthetic.images.shape[1], classes)
    images = cohort.synthetic.images[:rows, :columns].cpu().numpy()
    save_png(kept.samples / f"round-{t:06d}.png", images, scale=max(1, 64 // images.shape[-1]))
