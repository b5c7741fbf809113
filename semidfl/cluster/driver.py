"""A run on a Ray cluster, as the driver sees it: rounds in lock-step, figures gathered, models never.

The driver holds the run folder, the graph and the figures of one round, whatever the number of clients. The actors
write their own parts of checkpoints, and their clients' models, into the run folder. When an actor is lost, the round
is called off; what is lost is started anew, all go back to the last checkpoint, and the rounds since are done again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semidfl import topology
from semidfl.cluster.fleet import Fleet, Lost, merged
from semidfl.cluster.start import check_ray, cluster, place_of
from semidfl.config import Config, to_toml
from semidfl.data.own import with_sites
from semidfl.data.sources import load
from semidfl.errors import CheckpointError, SemiDFLError, Stopped
from semidfl.exchange.attack import hostile
from semidfl.experiment import Result, summarise
from semidfl.methods import find_method
from semidfl.record import parts
from semidfl.record.folder import RunFolder
from semidfl.record.images import save_png
from semidfl.record.pace import Pace
from semidfl.record.tensorboard import TensorBoard, opened
from semidfl.stop import Stop
from semidfl.terminal import Progress

__all__ = ["go_on", "run"]

_FAULTS = 3
"""that a run recovers from without getting any further"""


def run(config: Config, folder: str | Path = "", overwrite: bool = False, progress: Progress | None = None) -> Result:
    """Runs an experiment on Ray; `folder` defaults to runs/NAME and must be one that all nodes see."""
    # All that can be refused is refused before a folder is made, or an old run replaced.
    check_ray(config.compute.ray_address)
    find_method(config.method)
    config = with_sites(config, load(config.data.dataset, config.data, config.seed))
    topology.build(config.graph, config.seed)
    path = Path(folder or Path("runs") / config.name)
    with cluster(config) as ray:  # stays up for `go_on`
        place_of(ray, config)
        with RunFolder.create(path, to_toml(config), overwrite) as kept, progress or Progress() as shown:
            return go_on(config, kept, shown)


def go_on(config: Config, kept: RunFolder, shown: Progress) -> Result:
    """From the last checkpoint, or from the start where there is none, to the end."""
    started = time.perf_counter()
    graph = topology.build(config.graph, config.seed)
    with cluster(config) as ray, Stop() as stop:
        place = place_of(ray, config)
        with _closing(Fleet(ray, config, graph, kept.path, place)) as fleet:
            fleet.start(config.compute.actors or place.room)
            drive = _Drive(config, kept, shown, fleet)
            drive.begin()
            drive.startup = time.perf_counter() - started
            shown.note(f"{fleet.blocks.words()}; up after {drive.startup:.1f} s")
            shown.start(config.rounds, drive.done + 1, list(graph.roles))
            with opened(config.compute.log, kept.path, drive.done + 1) as sink:
                drive.sink = sink
                drive.to_the_end(stop)
    if drive.summary is None:
        raise Stopped(f"stopped after round {drive.done}; go on with: semidfl resume {kept.path}")
    return Result(kept.path, drive.summary)


@contextmanager
def _closing(fleet: Fleet) -> Iterator[Fleet]:
    try:
        yield fleet
    finally:
        fleet.close()


class _Drive:
    """Where a run stands."""

    def __init__(self, config: Config, kept: RunFolder, shown: Progress, fleet: Fleet) -> None:
        self.config, self.kept, self.shown, self.fleet = config, kept, shown, fleet
        self.done = self.faults = self._in_a_row = self._furthest = 0
        self.startup = 0.0
        self.pace = Pace(config.compute.checkpoint_every)
        self.summary: dict[str, Any] | None = None
        self.sink: TensorBoard | None = None

    def begin(self) -> None:
        """All actors up, with their clients' data, where the run stands; the first writes down who holds what."""
        try:
            self.take_up()
            self.fleet.ask([self.fleet.actors[0].introduce.remote()])
        except Lost as lost:  # out of memory, say
            self._recover(lost)
            self.begin()

    def to_the_end(self, stop: Stop) -> None:
        """Round after round; a loss throws it back to the last checkpoint."""
        stopping = False
        while self.summary is None and not stopping:
            try:
                if self.done < self.config.rounds:
                    stopping = self._round(stop)
                if self.done == self.config.rounds:
                    self.summary = self._end()
            except Lost as lost:
                self._recover(lost)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return self.fleet.blocks.members

    def _end(self) -> dict[str, Any]:
        """What a run leaves behind when it has ended. The models' mean goes from actor to actor, one at a time."""
        fleet, config = self.fleet, self.config
        told = fleet.everyone("finish", fleet.graph.clients)
        liars = hostile(config, fleet.graph, find_method(config.method).all_labelled)
        summary = summarise(config, self.kept.records(), torch.device("cpu"), liars)
        summary |= {"device": f"{len(self.members)} actors on {fleet.device}", "faults": self.faults}
        total = None
        for actor in fleet.actors:
            total = actor.add.remote(total)
        cells = merged(told, self.members) if all(told) else None
        fleet.ask([fleet.actors[0].conclude.remote(total, cells, summary)])
        self.kept.write_summary(summary)
        return summary

    def _round(self, stop: Stop) -> bool:
        """One round, and whether it is the last for now."""
        started = time.perf_counter()
        records = self.fleet.everyone("step")
        told = [record.pop("ray") for record in records]
        record = merged(records, self.members)
        record["ray"] = self._figures(told)
        record["seconds"]["round"] = round(time.perf_counter() - started, 6)
        self.done = record["round"]
        if self.done > self._furthest:
            self._furthest, self._in_a_row = self.done, 0
        stopping = stop.requested  # asked once: what is not kept is not the last
        self._keep(record, stopping)
        if self.sink is not None:
            self.sink.write(record)
        self.shown.update(self.done, record)
        return stopping

    def _figures(self, told: list[dict[str, Any]]) -> dict[str, Any]:
        """What only a run on Ray has to tell of a round; times are those of the slowest actor."""
        blocks, sent = self.fleet.blocks, [one["bytes"] for one in told]
        topics = dict.fromkeys(topic for one in sent for topic in one)
        figures: dict[str, Any] = {
            "actors": len(blocks.members),
            "cut_edges": blocks.cut,
            "bytes": {topic: sum(one.get(topic, 0) for one in sent) for topic in topics},
            "exchange": max(one["exchange"] for one in told),
            "waiting": max(one["waiting"] for one in told),
        }
        if self.startup:  # in the first round after a start
            figures["startup"], self.startup = round(self.startup, 3), 0.0
        return figures

    def _keep(self, record: dict[str, Any], stopping: bool) -> None:
        """What a round leaves behind, as in memory."""
        self.kept.append(record)
        if "generated_kept" in record:
            self._pictures()
        if stopping or self.done == self.config.rounds or self.pace.due(self.done):
            with self.pace.writing():
                self.kept.sync()
                self.fleet.everyone("save", self.done)
                parts.forget_others(self.kept.checkpoints, len(self.members))

    def _pictures(self) -> None:
        found: dict[int, np.ndarray] = {}
        for some in self.fleet.everyone("pictures", self.fleet.graph.clients):
            found |= some
        images = np.stack([found[i] for i in sorted(found)])
        path = self.kept.samples / f"round-{self.done:06d}.png"
        save_png(path, images, scale=max(1, 64 // images.shape[-1]))

    # --- faults -----------------------------------------------------------------------------------------------------

    def _recover(self, lost: Lost) -> None:
        self.faults, self._in_a_row = self.faults + 1, self._in_a_row + 1
        at = self.done + 1
        if self._in_a_row > _FAULTS:
            raise SemiDFLError(f"gave up after {self._in_a_row} faults at round {at}: {lost}") from lost
        started = time.perf_counter()
        gone = self.fleet.mend()
        try:
            self.take_up()
        except Lost as again:
            return self._recover(again)
        self.startup = time.perf_counter() - started
        what = f"{gone} actors were lost in round {at}" if gone else f"round {at} was not finished"
        self.shown.note(f"{what} ({lost}); from round {self.done + 1} on with {self.fleet.blocks.words()}")

    def take_up(self) -> None:
        """Bring all actors to the newest checkpoint that all can read; to the start where there was none yet."""
        there = parts.rounds(self.kept.checkpoints)
        for done in there:
            try:
                self.fleet.settle(done)
                break
            except CheckpointError as error:
                if not parts.damaged(error):
                    raise
                self.shown.note(f"{error}; trying the checkpoint before it")
        else:
            self._from_the_start(parts.begun(self.kept.checkpoints))
            done = 0
        self.kept.truncate(done)
        self.done = done

    def _from_the_start(self, unreadable: bool) -> None:
        """A new run begins here. One that has lost an actor may, if no more is lost than a checkpoint would save."""
        every = self.config.compute.checkpoint_every
        if unreadable or self.done > every:
            lost = f"an actor is lost after round {self.done} and " if self.done else ""
            what = "no checkpoint can be read" if unreadable else "there is no checkpoint"
            raise CheckpointError(
                f"{lost}{what} in {self.kept.checkpoints}: the run has to start anew (--overwrite; "
                f"compute.checkpoint_every = {every})"
            )
        self.fleet.settle(0)
