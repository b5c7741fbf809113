"""What runs in an actor: the rounds of a block of clients, and the mail that comes in meanwhile.

`Host` is a plain class; the driver makes a Ray actor of it. Rounds and all that touches the cohort run one after the
other in one thread of the actor; `deliver`, `call_off` and `facts` run beside them, in the group "mail".
"""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semidfl import __version__
from semidfl.cluster.partition import Blocks
from semidfl.cluster.start import Place, need_ray
from semidfl.cohort import Cohort, Learner
from semidfl.config import Config, config_hash
from semidfl.data.dataset import Dataset
from semidfl.data.sources import load
from semidfl.exchange.ray import Key, Mailbox, Parcel, RayExchange
from semidfl.experiment import Rounds, prepare, save_models, shards_of, test, train
from semidfl.methods.base import Method
from semidfl.record import parts
from semidfl.record.card import model_card
from semidfl.record.clients import CELLS, confusion, sample_grid, write_clients
from semidfl.record.folder import RunFolder

__all__ = ["MAIL", "Host"]

MAIL = "mail"
"""the group of methods that answer while a round goes on"""


class Host:
    """A block of the clients."""

    def __init__(self, config: Config, folder: Path, place: Place) -> None:
        self.config, self.folder = place.config(config), folder
        self.mail = Mailbox()
        self.method: Method
        self.cohort: Cohort
        self.rounds: Rounds
        self.exchange: RayExchange
        self.block, self.blocks = 0, 1

    # --- beside the rounds ------------------------------------------------------------------------------------------

    def facts(self, mark: str) -> dict[str, Any]:
        """Who this is, and whether it sees the driver's run folder, in which a file of that name lies."""
        cuda = self.config.compute.device == "cuda"
        name = torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine()
        return {
            "pid": os.getpid(),
            "device": f"{self.config.compute.device}: {name}",
            "sees": (self.folder / mark).exists(),
            "versions": {"semidfl": __version__, "torch": str(torch.__version__).partition("+")[0]},
        }

    def deliver(self, epoch: int, key: Key, sender: int, parcel: Parcel) -> None:
        """A parcel from another actor."""
        self.mail.put(epoch, key, sender, parcel)

    def call_off(self) -> None:
        """The round cannot end: wait no longer."""
        self.mail.call_off()

    # --- one after the other ----------------------------------------------------------------------------------------

    def host(self, epoch: int, blocks: Blocks, block: int, peers: list[Any], done: int) -> float:
        """Take a block of clients as they were after round `done`, from a checkpoint unless that is 0."""
        started = time.perf_counter()
        self.block, self.blocks = block, len(blocks.members)
        ids = blocks.members[block]
        self.method, self.cohort = prepare(self.config, self._data(), ids)
        if done:
            self.cohort.restore(parts.load(self.folder / "checkpoints", done, ids, config_hash(self.config)))
        sends, receives = blocks.crossing(self.method.setup.graph, block)
        self.exchange = RayExchange(ids, sends, receives, _poster(epoch, block, peers), self.mail)
        self.rounds = train(self.config, self.method, self.cohort, self.exchange, first=done + 1)
        self.mail.begin(epoch)
        return time.perf_counter() - started

    def step(self) -> dict[str, Any]:
        """One round of the block, as its record."""
        record = next(self.rounds)
        told = self.exchange.reset()
        # Both lie within phases of the round: beside these they would count twice.
        record["ray"] = {"exchange": round(told["seconds"], 6), "waiting": round(told["waited"], 6)}
        record["ray"]["bytes"] = told["bytes"]
        return record

    def save(self, done: int) -> None:
        """Write the part of a checkpoint that is this block's."""
        folder, config = self.folder / "checkpoints", config_hash(self.config)
        parts.save(folder, self.block, self.blocks, done, self.cohort.ids, self.cohort.state(), config)

    def pictures(self, clients: int) -> dict[int, np.ndarray]:
        """Generated images of those among the first clients that are here."""
        if self.cohort.synthetic is None:
            return {}
        images = self.cohort.synthetic.images
        first, many = sample_grid(clients, images.shape[1], self.method.setup.space.classes)
        return {i: images[row, :many].cpu().numpy() for row, i in enumerate(self.cohort.ids) if i < first}

    def introduce(self) -> None:
        """Write who is there and who holds what, of all clients: without a model that is little."""
        write_clients(self._kept(), self._data().classes, self.method.setup, self._everyone())

    def finish(self, clients: int) -> list[Any]:
        """Write the trained networks; how each answers on the test set, unless that is too much of all clients."""
        save_models(self._kept(), self.method, self.cohort)
        few = clients * self.method.setup.space.classes**2 <= CELLS
        return confusion(self.method.setup, self.cohort.classifier.params).tolist() if few else []

    def add(self, total: np.ndarray | None) -> np.ndarray:
        """The sum of all classifiers here, and of those before."""
        own: np.ndarray = self.cohort.classifier.params.sum(0, dtype=torch.float64).cpu().numpy()
        return own if total is None else own + total

    def conclude(self, total: np.ndarray, cells: list[Any] | None, summary: dict[str, Any]) -> None:
        """Write what readers want besides the figures: answers on the test set, the model card."""
        setup, everyone = self.method.setup, self._everyone()
        mean = torch.from_numpy(total / setup.clients).float().to(setup.device)[None]
        found = {"mean": confusion(setup, mean)[0].tolist()} | ({"clients": cells} if cells else {})
        self._kept().write_text("confusion.json", json.dumps(found) + "\n")
        self._kept().write_text("model_card.md", model_card(setup, everyone, summary, float(test(setup, mean))))

    def _kept(self) -> RunFolder:
        return RunFolder(self.folder, -1)  # the driver holds the lock

    def _data(self) -> Dataset:
        return load(self.config.data.dataset, self.config.data, self.config.seed)

    def _everyone(self) -> Cohort:
        """All clients with their data, and no network."""
        ids = tuple(range(self.method.setup.clients))
        none = Learner(torch.empty(0), {})
        return Cohort(ids, self.cohort.draws, shards_of(self.method, self._data(), ids), none)


def _poster(epoch: int, block: int, peers: list[Any]) -> Any:
    ray = need_ray()

    def post(peer: int, key: Key, parcel: Parcel) -> None:
        # Put by hand, so that it goes through the store whatever its size.
        to = peers[peer]
        sent = to.deliver.options(concurrency_group=MAIL).remote(epoch, key, block, ray.put(parcel))
        sent.future().add_done_callback(lambda done: _woken(to) if done.exception() else None)

    return post


def _woken(receiver: Any) -> None:
    """It would wait for ever for what was lost on the way, say for want of room; a dead one the driver notices."""
    receiver.call_off.options(concurrency_group=MAIL).remote()
