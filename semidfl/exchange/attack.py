"""Simulated attackers: clients that lie to their neighbours, to see what a rule of mixing withstands.

- sign-flip: sends its models times -strength
- noise: sends its models with noise added, of `strength` times the size of the weights
- nan: sends NaN to be mixed; a network exchange refuses that at the door, the simulator lets it in
- label-flip: trains on its labelled samples with class c called K - 1 - c, and sends what it learns so

All but the last are lies in what is sent: models (classifier, generator, momentum, wherever they are shared) and
the most that a client can say of itself, as an accuracy of 1. There is one row a client in an exchange, so an attacker
hears its own lie, too; a rule that withstands it does so at the attacker as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from semidfl.config import Config
from semidfl.data.dataset import Dataset
from semidfl.data.partition import Split
from semidfl.draws import Draws
from semidfl.errors import ConfigError
from semidfl.exchange.base import Exchange, Shared, mixing
from semidfl.topology import Topology

__all__ = ["Hostile", "hostile", "mislabelled"]

MODELS = ("classifier", "generator", "velocity")
_HIGHEST = {"accuracy": 1.0, "taught": 2.0}
"""what an attacker claims of itself"""


def hostile(config: Config, graph: Topology, all_labelled: bool = False) -> tuple[int, ...]:
    """The ids of the attackers, ascending: those named, else as many as asked for, drawn from the seed."""
    attack, everyone = config.attack, range(graph.clients)
    if attack.kind == "none":
        return ()
    able = [i for i in everyone if attack.kind != "label-flip" or all_labelled or graph.roles[i] in "LM"]
    if attack.who:
        found = _named(attack.who, graph.clients)
        if unable := [i for i in found if i not in able]:
            raise ConfigError(f"attack.who = {attack.who!r} is not legal: client {unable[0]} has no labels to flip")
    else:
        lots = Draws.of([config.seed] * len(able), able, torch.device("cpu")).words(0, "attackers", 1)[:, 0]
        found = {able[k] for k in lots.argsort(stable=True)[: attack.count].tolist()}
        if len(found) < attack.count:
            raise ConfigError(f"attack.count = {attack.count} is not legal: only {len(able)} clients could attack so")
    if len(found) == graph.clients:
        raise ConfigError("the attack leaves no client honest: lower attack.count, or name fewer in attack.who")
    return tuple(sorted(found))


def _named(text: str, clients: int) -> set[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word[:7]) < clients for word in words):
        raise ConfigError(f"attack.who = {text!r} is not legal: ids from 0 to {clients - 1}, parted by commas")
    return {int(word) for word in words}


def mislabelled(data: Dataset, split: Split, liars: Sequence[int]) -> tuple[Dataset, Split]:
    """The attackers' labelled samples with the classes in reverse.

    They are copies at the end of the data, wherever the attackers are hosted: others may hold the same sample, with
    its true label, and what clients remember of the data must be as long everywhere.
    """
    samples = np.concatenate([split.labelled[i] for i in liars])
    ends = np.cumsum([len(data.train_labels), *(len(split.labelled[i]) for i in liars)])
    labelled = list(split.labelled)
    for i, first, end in zip(liars, ends, ends[1:], strict=False):
        labelled[i] = np.arange(first, end)
    images = np.concatenate([data.train_images, data.train_images[samples]])
    labels = np.concatenate([data.train_labels, len(data.classes) - 1 - data.train_labels[samples]])
    owners = None if data.owners is None else np.concatenate([data.owners, data.owners[samples]])
    grown = replace(data, train_images=images, train_labels=labels, owners=owners)
    return grown, replace(split, labelled=tuple(labelled))


class Hostile:
    """An exchange in which some of the own clients publish lies."""

    def __init__(self, inner: Exchange, config: Config, own: Sequence[int], liars: Sequence[int]) -> None:
        self.inner, self.attack = inner, config.attack
        self.rows = [row for row, client in enumerate(own) if client in liars]
        self.draws = Draws.of([config.seed] * len(self.rows), [own[r] for r in self.rows], torch.device("cpu"))

    @classmethod
    def around(cls, inner: Exchange, config: Config, own: Sequence[int], liars: Sequence[int]) -> Exchange:
        """The exchange with its liars, or as it is where there are none."""
        lies = config.attack.kind not in ("none", "label-flip") and set(own) & set(liars)
        return cls(inner, config, own, liars) if lies else inner

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        return self.inner.share(t, topic, {name: self._told(t, topic, name, x) for name, x in tensors.items()})

    def _told(self, t: int, topic: str, name: str, x: Tensor) -> Tensor:
        if name in _HIGHEST:
            lie: Tensor | float = _HIGHEST[name]
        elif name in MODELS and (mixing(topic) or self.attack.kind != "nan"):
            lie = self._lie(t, f"{topic} {name}", x[self.rows])
        else:
            return x
        told = x.clone()
        told[self.rows] = lie
        return told

    def _lie(self, t: int, purpose: str, truth: Tensor) -> Tensor:
        """truth (attackers, D)."""
        if self.attack.kind == "sign-flip":
            return -self.attack.strength * truth
        if self.attack.kind == "nan":
            return torch.full_like(truth, torch.nan)
        # One by one: so the last bits do not depend on which attackers share the process.
        size = torch.stack([row.clone().norm() for row in truth]) / truth.shape[1] ** 0.5
        noise = self.draws.normal(t, f"attack {purpose}", truth.shape[1]).to(truth.device)
        lie: Tensor = truth + self.attack.strength * size[:, None] * noise
        return lie
