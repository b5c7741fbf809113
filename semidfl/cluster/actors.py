"""What runs in an actor: the rounds of a block of clients, and the mail that comes in meanwhile.

`Host` is a plain class; the driver makes a Ray actor of it. Rounds and all that touches the cohort run one after the
other in one thread of the actor; `deliver`, `call_off` and `facts` run beside them, in the group "mail".
"""

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
from semidfl.cohort import Cohort
from semidfl.config import Config, config_hash
from semidfl.data.sources import load
from semidfl.exchange.ray import Key, Mailbox, Parcel, RayExchange
from semidfl.experiment import Rounds, prepare, save_models, train
from semidfl.methods.base import Method
from semidfl.record import parts
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
        self.method, self.cohort = prepare(self.config, load(self.config.data.dataset), ids)
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
        record["seconds"]["exchange"] = round(told["seconds"], 6)
        record["seconds"]["waiting"] = round(told["waited"], 6)
        record["ray"] = {"bytes": told["bytes"]}
        return record

    def save(self, done: int) -> None:
        """Write the part of a checkpoint that is this block's."""
        folder, config = self.folder / "checkpoints", config_hash(self.config)
        parts.save(folder, self.block, self.blocks, done, self.cohort.ids, self.cohort.state(), config)

    def pictures(self, first: int, many: int) -> dict[int, np.ndarray]:
        """Some generated images of those among the first clients that are here."""
        if self.cohort.synthetic is None:
            return {}
        images = self.cohort.synthetic.images
        return {i: images[row, :many].cpu().numpy() for row, i in enumerate(self.cohort.ids) if i < first}

    def finish(self) -> None:
        """Write the trained networks."""
        save_models(RunFolder(self.folder, -1), self.method, self.cohort)  # the driver holds the lock


def _poster(epoch: int, block: int, peers: list[Any]) -> Any:
    ray = need_ray()

    def post(peer: int, key: Key, parcel: Parcel) -> None:
        # Put by hand, so that it goes through the store whatever its size; if the receiver is lost, the driver knows.
        peers[peer].deliver.options(concurrency_group=MAIL).remote(epoch, key, block, ray.put(parcel))

    return post
