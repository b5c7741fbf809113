"""Ray itself: joining a cluster or starting one on this machine, what it offers, and what its errors mean.

A cluster that is started here ends here. Ray listens on all interfaces of a machine whatever it is asked, so a cluster
started here lets in only who has its token, drawn anew each time; see docs/scale.md for one of many machines.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from semidfl.config import Config
from semidfl.errors import SemiDFLError

__all__ = ["Place", "check_ray", "cluster", "need_ray", "place_of"]

_STORE = 512 * 2**20
"""bytes of the object store of a cluster started here, taken as they are used; what is more goes to disk"""


def check_ray(address: str = "") -> None:
    """Says how to install Ray where it is missing, and that nobody is there where its own tries would take minutes."""
    if find_spec("ray") is None:
        raise SemiDFLError("Ray is needed for this and is not installed: pip install 'semidfl[ray]'")
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host:  # auto, local or ray://…: Ray knows what to do
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SemiDFLError(f"compute.ray_address = {address!r}: nobody answers there ({error})") from None


def need_ray(address: str = "") -> Any:
    """The module. What it reads from the environment when it is imported is set before."""
    check_ray(address)
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of rounds that were called off: nobody asks
        if not address:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return import_module("ray")


@contextmanager
def cluster(config: Config) -> Iterator[Any]:
    """Ray, connected: to the cluster of compute.ray_address, else to one that lives as long as the block."""
    address = config.compute.ray_address
    ray = need_ray(address)
    if ray.is_initialized():  # whoever connected this process also ends it
        yield ray
        return
    try:
        _connect(ray, config)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        what = f"joining the Ray cluster at {address!r}" if address else "starting Ray"
        raise SemiDFLError(f"{what} failed: {str(error).strip().splitlines()[0]}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, config: Config) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.compute.ray_address:
        ray.init(address=config.compute.ray_address, **quiet)
        return
    # Ray only counts cores: a small machine has room for as many actors as are asked for.
    cores = max(os.cpu_count() or 1, config.compute.actors * config.compute.cores)
    local = {"num_cpus": cores, "object_store_memory": _STORE, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init("local", include_dashboard=False, **local, **quiet)
    except (ConnectionError, RuntimeError, TimeoutError):  # it gives its parts 30 s: on a very busy machine too few
        ray.shutdown()
        ray.init("local", include_dashboard=False, **local, **quiet)


@dataclass(frozen=True)
class Place:
    """What each actor or task takes, and how many the cluster has room for."""

    cores: int
    gpu: bool
    room: int

    @property
    def needs(self) -> dict[str, Any]:
        """As Ray's options."""
        return {"num_cpus": self.cores, "num_gpus": int(self.gpu), "scheduling_strategy": "SPREAD"}

    def config(self, config: Config) -> Config:
        """As it is computed at such a place: Ray shows a process only its own GPU, but all the cores."""
        device, threads = "cuda" if self.gpu else "cpu", config.compute.threads or self.cores
        return replace(config, compute=replace(config.compute, device=device, threads=threads))

    def words(self) -> str:
        return f"{self.cores} core{'s' * (self.cores > 1)}{' and a GPU' * self.gpu} each"


def place_of(ray: Any, config: Config) -> Place:
    """One place a GPU, unless the config asks for CPUs or there is none; else as many as the cores allow."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, device = config.compute.cores, config.compute.device
    gpu = device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
    if device.startswith("cuda") and not gpu:
        raise SemiDFLError(f"compute.device = {device!r}: no node of the Ray cluster has a GPU")
    room = sum(int(min(node.get("CPU", 0) // cores, node.get("GPU", 0) if gpu else 10**6)) for node in nodes)
    if room == 0:
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        raise SemiDFLError(f"compute.cores = {cores}: no node of the Ray cluster has so many, the largest has {most}")
    return Place(cores, gpu, room)
