"""Live federations of real processes: forked from one that has torch loaded, so that each starts at once."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small import TINY

from semidfl.node import identity
from semidfl.node.federation import Federation, read
from semidfl.node.local import free_ports, new_federation
from semidfl.record.checkpoint import load_model
from semidfl.record.folder import read_records

# The process that forks the others imports by name, before anybody tells it where the tests are.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["federations", "faults"])

QUICK: dict[str, object] = {
    path: value for path, value in TINY.items() if not path.startswith(("graph.", "name", "data.dataset", "compute."))
} | {"method": "dfl-lb", "rounds": 5, "classifier.iterations": 3, "evaluation.every": 1, "compute.report": False}
"""labels only: rounds of a few hundredths of a second"""
SHORT = {"hello": 20.0, "round": 3.0, "transfer": 3.0, "linger": 3.0, "alone": 20.0}
"""deadlines"""


def digits(folder: Path) -> Path:
    """Some of the digits in a file: scikit-learn takes two seconds to load."""
    from semidfl.data.sources import load

    data, file = load("digits"), folder / "some.npz"
    images, labels = data.train_images[:, 0], data.train_labels
    np.savez(file, x_train=images[:600], y_train=labels[:600], x_test=images[600:700], y_test=labels[600:700])
    return file


@dataclass
class Live:
    """A federation whose peers are started one by one, as the test likes."""

    folder: Path
    federation: Federation
    running: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        folder: Path,
        data: Path | str,
        roles: Mapping[str, str],
        config: Mapping[str, object],
        topology: str = "full",
        deadlines: Mapping[str, object] = SHORT,
        faults: Mapping[str, object] | None = None,
        addresses: Mapping[str, str] | None = None,
        **top: object,
    ) -> "Live":
        ports = free_ports(len(roles))
        places = addresses or {name: f"127.0.0.1:{port}" for name, port in zip(roles, ports, strict=True)}
        peers = {name: (role, places[name]) for name, role in roles.items()}
        values = {"name": "test", "recipe": "paper", "dataset": str(data), "topology": topology, **top}
        sections = {"config": config, "deadlines": deadlines, "faults": faults or {}}
        return cls(folder, new_federation(folder, peers, values, sections))

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def words(self, name: str, *more: str) -> list[str]:
        path = self.folder / "federation.toml"
        return ["node", "--federation", str(path), "--name", name, "--folder", str(self.run_folder(name)), *more]

    def start(self, name: str, *more: str, fault: str = "", namespace: str = "") -> Any:
        """A peer's process; `fault` names a function of faults.py that is called in it first."""
        words = self.words(name, "--compute.threads", "1", *more)
        process = PROCESSES.Process(target=_peer, args=(words, str(self.log_file(name)), fault, namespace))
        process.start()
        self.running[name] = process
        return process

    def start_all(self, *more: str) -> None:
        for peer in self.federation.peers:
            self.start(peer.name, *more)

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        path = self.log_file(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, name: str) -> list[dict[str, Any]]:
        return read_records(self.run_folder(name))

    def wait_for_round(self, name: str, t: int, limit: float = 40.0) -> None:
        until = time.monotonic() + limit
        while not any(record["round"] >= t for record in self.records(name)):
            assert self.running[name].is_alive(), self.log(name)
            assert time.monotonic() < until, self.log(name)
            time.sleep(0.01)

    def ends(self, *names: str, limit: float = 40.0) -> None:
        """These peers end well, and in time."""
        until = time.monotonic() + limit
        for name in names:
            self.running[name].join(max(0.0, until - time.monotonic()))
            assert self.running[name].exitcode == 0, f"{name}: {self.running[name].exitcode}\n{self.log(name)}"

    def kill(self, name: str) -> None:
        os.kill(self.running[name].pid, signal.SIGKILL)
        self.running[name].join(5.0)

    def summary(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_folder(name) / "summary.json").read_text())

    def model(self, name: str, part: str = "classifier") -> dict[str, torch.Tensor]:
        client = self.federation.clients_of(name)[0]
        return load_model(self.run_folder(name) / "models" / f"{part}-{client:04d}.safetensors")[0]

    def end(self) -> None:
        for process in self.running.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(5.0)


@contextlib.contextmanager
def live(*args: Any, **kwargs: Any) -> Iterator[Live]:
    made = Live.make(*args, **kwargs)
    try:
        yield made
    finally:
        made.end()


def _peer(words: Sequence[str], log: str, fault: str, namespace: str) -> None:
    """What a peer's process does."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if namespace:
        enter_namespace(namespace)
    if fault:
        import faults

        getattr(faults, fault)()
    from semidfl.cli import main

    torch.set_num_threads(1)
    code = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def enter_namespace(name: str) -> None:
    with open(f"/var/run/netns/{name}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")


def reissue(live: Live, name: str, **how: Any) -> None:
    """Another certificate of the same name."""
    keys = live.folder / "identity"
    for end in ("key", "crt"):
        (keys / f"{name}.{end}").unlink()
    identity.issue(keys, name, **how)


def reread(live: Live, change: Callable[[str], str]) -> None:
    """The federation file, changed."""
    path = live.folder / "federation.toml"
    path.write_text(change(path.read_text()))
    live.federation = read(path)
