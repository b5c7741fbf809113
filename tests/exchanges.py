"""Exchanges over gRPC in one process, as several tests need them."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from semidfl.exchange.client import Neighbour
from semidfl.exchange.grpc import GrpcExchange
from semidfl.exchange.plan import Deadlines, Plan
from semidfl.node import identity
from semidfl.node.local import free_ports

LOG = logging.Logger("test", logging.CRITICAL)
SOON = Deadlines(hello=5.0, round=0.5, transfer=1.0, linger=0.5, alone=5.0)


class Pages:
    """A ledger that only remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def sends(self, *line: Any) -> None:
        self.lines.append(line)

    def control(self, peer: str, size: int) -> None:
        pass


def peers_of(keys: Path | None, clients: list[tuple[int, ...]], **plan: Any) -> list[GrpcExchange]:
    """Exchanges of one, two, three, …: all neighbours of all, in this process."""
    names = ["one", "two", "three"][: len(clients)]
    ports = free_ports(len(clients))
    made = []
    for k, name in enumerate(names):
        others = [Neighbour(names[j], f"127.0.0.1:{ports[j]}", clients[j]) for j in range(len(names)) if j != k]
        own = Plan(
            name,
            f"127.0.0.1:{ports[k]}",
            clients[k],
            tuple(others),
            "agreed",
            {"x": "1"},
            9,
            **{"deadlines": SOON, **plan},
        )
        made.append(GrpcExchange(own, identity.Identity.load(keys, name) if keys else None, Pages(), LOG))
    return made


def at_once(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(20.0) for future in [pool.submit(call) for call in calls]]


def rows_of(exchange: GrpcExchange, scale: float = 1.0) -> dict[str, torch.Tensor]:
    ids = torch.tensor(exchange.plan.clients)
    return {"classifier": scale * ids[:, None].float().repeat(1, 4), "counts": ids[:, None].repeat(1, 3)}
