"""The named workloads: what is run, and what is to be known of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from semidfl.config import Config, override
from semidfl.errors import ConfigError, nearest
from semidfl.recipes import paper

__all__ = ["WORKLOADS", "Workload", "find_workload", "like_authors"]

NEVER = 10**6
"""a round that no run comes to"""


@dataclass(frozen=True)
class Workload:
    """`cell`: one run of a table, over its phases and to its end. `sweep`: several such runs as one stack.

    `rounds`: rounds by themselves, for every config, without tests and without generating, once all is warm.
    """

    kind: Literal["cell", "sweep", "rounds"]
    what: str
    make: Callable[[], list[Config]]
    rounds: int = 10
    """measured by default"""


def _cell(dataset: str) -> list[Config]:
    return [paper(dataset)]


def _sweep(method: str) -> list[Config]:
    """The four cells of the main table for a data set, three seeds each."""
    cells = product((0.5, 0.1), (100.0, 0.1), range(3))
    return [paper("mnist", ratio, alpha, method=method, seed=seed) for ratio, alpha, seed in cells]


def _labelled(*sizes: int) -> list[Config]:
    """DFL-LB where every client has labels, and so trains: E = 25 steps of 10 samples on MNIST."""
    return [_alone(paper("mnist", ratio=100.0, topology="random-regular", method="dfl-lb"), n) for n in sizes]


def _alone(config: Config, clients: int) -> Config:
    values = {"graph.clients": clients, "graph.roles": "L" * clients, "evaluation.every": NEVER, "rounds": NEVER}
    return override(config, values)


def _late() -> list[Config]:
    """Generates in its first round, which is not measured, and never again."""
    config = paper("mnist")
    values = {"generator.start": 1, "generator.every": NEVER, "evaluation.every": NEVER, "rounds": NEVER}
    return [override(config, values)]


WORKLOADS: dict[str, Workload] = {
    "mnist": Workload("cell", "SemiDFL, MNIST, the paper's settings", lambda: _cell("mnist"), 56),
    "fashion-mnist": Workload("cell", "SemiDFL, Fashion-MNIST, likewise", lambda: _cell("fashion-mnist"), 56),
    "cifar10": Workload("cell", "SemiDFL, CIFAR-10 with ResNet-18, likewise", lambda: _cell("cifar10"), 56),
    "digits": Workload("cell", "SemiDFL, digits, the same made small", lambda: _cell("digits"), 31),
    "sweep-dfl-lb": Workload("sweep", "DFL-LB, four MNIST cells x 3 seeds as one stack", lambda: _sweep("dfl-lb"), 31),
    "sweep-flexmatch": Workload("sweep", "FlexMatch, likewise", lambda: _sweep("flexmatch"), 31),
    "clients": Workload(
        "rounds", "DFL-LB round, CNN, all labelled, 10 to 1000 clients", lambda: _labelled(10, 100, 1000), 5
    ),
    "dfl-lb-10": Workload("rounds", "DFL-LB round, 10 clients, MNIST, 25 steps of batch 10", lambda: _labelled(10), 15),
    "dfl-lb-100": Workload("rounds", "the same with 100 clients", lambda: _labelled(100), 5),
    "semidfl-round": Workload("rounds", "SemiDFL round on MNIST after generation has begun", _late, 10),
}


def find_workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}{nearest(name, WORKLOADS)}: `semidfl bench` lists them")
    return WORKLOADS[name]


def like_authors(config: Config) -> Config:
    """With the counts of the authors' code: 200 diffusion steps a round, a UNet of 1.4 GMAC at 28x28 (theirs 1.37)."""
    return replace(config, generator=replace(config.generator, iterations=200, width=120, patch=1, levels=3))


def shortened(config: Config, rounds: int, before: int) -> Config:
    """A cell that first generates after `before` rounds, so that few rounds show every kind there is."""
    values: Mapping[str, Any] = {"rounds": max(rounds, before + 1)}
    return override(config, {**values, "generator.start": before + 1})
