"""federation.toml: who takes part, what they train, and what a peer without labels cannot know by itself.

The same file lies at every peer. What must be the same everywhere (config, classes, images, peers, graph) goes into
one hash, the agreement, which every message carries; addresses, deadlines and tolerances may differ.
"""

import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from semidfl import topology
from semidfl.config import Config, config_hash, full_path, override, to_toml
from semidfl.data.shards import Space
from semidfl.data.sources import outline
from semidfl.errors import FederationError, SemiDFLError, nearest
from semidfl.exchange.client import Neighbour
from semidfl.exchange.codec import PROTOCOL
from semidfl.exchange.plan import Deadlines, Plan
from semidfl.node.identity import legal_name
from semidfl.recipes import find_recipe
from semidfl.setup import build_classifier
from semidfl.topology import Topology

__all__ = ["Faults", "Federation", "Images", "Member", "parse", "read"]


@dataclass(frozen=True)
class Member:
    """A peer: [[peers]]."""

    name: str
    """as in its certificate"""
    address: str
    """host:port at which the others reach it"""
    role: str = "M"
    """L: all its samples have labels, M: some, U: none"""
    clients: int = 1
    """clients that it hosts; more than one only with a data set that all peers share out"""
    listen: str = ""
    """address to listen at, where that is another than the one the others use"""


@dataclass(frozen=True)
class Images:
    """What images and classes are: [images]."""

    classes: tuple[str, ...]
    """the name of each label, in order"""
    channels: int
    """1 or 3"""
    height: int
    """pixels"""
    width: int
    """pixels"""
    mean: tuple[float, ...] = ()
    """of each channel, with pixels in [0, 1]; 0.5 each if left out"""
    std: tuple[float, ...] = ()
    """of each channel, with pixels in [0, 1]; 0.5 each if left out"""

    @property
    def space(self) -> Space:
        shape, half = (self.channels, self.height, self.width), (0.5,) * self.channels
        return Space(*shape, len(self.classes), self.mean or half, self.std or half, self.classes)


@dataclass(frozen=True)
class Faults:
    """What is borne: [faults]."""

    staleness: int = 2
    """rounds that a neighbour's models may be behind"""
    discount: float = 0.5
    """weight of a model one round behind, of what a fresh one has"""
    quorum: int = 1
    """neighbours without which a peer does not start, and stops after deadlines.alone; 0: it goes on alone"""
    witnesses: int = 1
    """neighbours that must be far ahead before a peer leaves out rounds to catch up"""


@dataclass(frozen=True)
class Federation:
    """A federation file, read and checked."""

    name: str
    config: Config
    images: Images
    peers: tuple[Member, ...]
    graph: Topology
    dataset: str = ""
    """a named data set that the peers share out by the seed; empty: each has its own"""
    deadlines: Deadlines = field(default_factory=Deadlines)
    faults: Faults = field(default_factory=Faults)

    def member(self, name: str) -> Member:
        found = next((peer for peer in self.peers if peer.name == name), None)
        if found is None:
            names = [peer.name for peer in self.peers]
            raise FederationError(f"there is no peer {name!r}{nearest(name, names)}: the file has {', '.join(names)}")
        return found

    def clients_of(self, name: str) -> tuple[int, ...]:
        """Ids are counted through in the order of the file."""
        first = 0
        for peer in self.peers:
            if peer.name == name:
                return tuple(range(first, first + peer.clients))
            first += peer.clients
        raise KeyError(name)

    def neighbours_of(self, name: str) -> tuple[Neighbour, ...]:
        """The peers whose clients are neighbours of this one's."""
        near = {j for i in self.clients_of(name) for j in self.graph.neighbours[i]}
        others = ((peer, self.clients_of(peer.name)) for peer in self.peers if peer.name != name)
        return tuple(Neighbour(peer.name, peer.address, ids) for peer, ids in others if near & set(ids))

    @property
    def terms(self) -> dict[str, str]:
        """All that the peers must agree on, in words."""
        space = self.images.space
        return {
            "config": to_toml(_comparable(self.config)),
            "classes": "\n".join(self.images.classes),
            "images": "\n".join(f"{name} = {value}" for name, value in vars(space).items()),
            "peers": "\n".join(f"{peer.name} {peer.role} {peer.clients}" for peer in self.peers),
            "graph": "\n".join(f"{i} - {j}" for i, j in self.graph.edges()),
        }

    @property
    def agreement(self) -> str:
        """Their hash."""
        text = "\0".join(f"{name}\0{value}" for name, value in self.terms.items())
        return hashlib.sha256(f"{PROTOCOL}\0{config_hash(self.config)}\0{text}".encode()).hexdigest()[:32]

    def apart(self, other: "Federation") -> list[str]:
        """What differs, addresses aside."""
        parts = ("name", "config", "images", "graph", "dataset", "deadlines", "faults")
        mine, theirs = ([replace(peer, address="", listen="") for peer in made.peers] for made in (self, other))
        return [part for part in parts if getattr(self, part) != getattr(other, part)] + ["peers"] * (mine != theirs)

    def plan(self, name: str) -> Plan:
        me = self.member(name)
        # Long lists are cut in what is sent; the hash is over all of them.
        terms = {key: text[:12_000] for key, text in self.terms.items()}
        return Plan(
            name,
            me.listen or me.address,
            self.clients_of(name),
            self.neighbours_of(name),
            self.agreement,
            terms,
            self.config.rounds,
            self.deadlines,
            self.faults.staleness,
            self.faults.discount,
        )


def _comparable(config: Config) -> Config:
    """Without what each peer may choose by itself."""
    plain = {f"compute.{f.name}": f.default for f in fields(config.compute) if f.name != "deterministic"}
    return override(config, {**plain, "name": "run"})


# --- reading ----------------------------------------------------------------------------------------------------------

_TOP = ("name", "recipe", "seed", "dataset", "topology", "edges", "config", "images", "deadlines", "faults")
_GIVEN = {"seed": "seed", "graph.topology": "topology", "data.dataset": "dataset", "graph.clients": "peers"}


def read(path: Path) -> Federation:
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise FederationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FederationError(f"{path} is not valid TOML: {error}") from None


def parse(text: str, path: Path) -> Federation:
    """What a federation file says; `path` is what complaints call it."""
    try:
        return _federation(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FederationError(f"{path} is not valid TOML: {error}") from None
    except FederationError as error:
        raise FederationError(f"{path}: {error}") from None
    except SemiDFLError as error:
        raise type(error)(f"{path}: {error}") from None


def _federation(table: dict[str, Any]) -> Federation:
    if unknown := [key for key in table if key not in (*_TOP, "peers")]:
        raise FederationError(f"there is no field {unknown[0]!r}{nearest(unknown[0], (*_TOP, 'peers'))}")
    peers = _peers(table.get("peers", []))
    dataset = _text(table, "dataset", "")
    config = _config(table, peers, dataset)
    images = _images(table, dataset)
    build_classifier(config, images.space, torch.device("cpu"))  # what no peer could train is refused here
    graph = _graph(table, config, peers)
    deadlines = _section(Deadlines, table.get("deadlines", {}), "deadlines")
    faults = _section(Faults, table.get("faults", {}), "faults")
    _check_numbers(deadlines, faults)
    if not dataset and (config.aggregation.weights == "adatest" or any(peer.clients > 1 for peer in peers)):
        raise FederationError("peers with data of their own cannot use adatest, nor host more than one client each")
    return Federation(_text(table, "name", "federation"), config, images, peers, graph, dataset, deadlines, faults)


def _peers(tables: Any) -> tuple[Member, ...]:
    if not isinstance(tables, list) or not tables:
        raise FederationError("there are no [[peers]]")
    if len(tables) == 1:
        raise FederationError("there is only one of [[peers]]: a federation needs two; `semidfl run` trains alone")
    peers = tuple(_section(Member, table, "peers") for table in tables)
    for peer in peers:
        legal_name(peer.name)
        if peer.role not in ("L", "M", "U"):
            raise FederationError(f"peers.role = {peer.role!r} of {peer.name} is not legal: L, M or U")
        if not 1 <= peer.clients <= 10_000:
            raise FederationError(f"peers.clients = {peer.clients} of {peer.name} is not legal: 1 to 10000")
        for address in filter(None, (peer.address, peer.listen)):
            host, colon, port = address.rpartition(":")
            if not (host and colon and port.isdigit() and int(port) < 65536):
                raise FederationError(f"peers.address = {address!r} of {peer.name} is not legal: host:port")
    names = [peer.name for peer in peers]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise FederationError(f"the name {sorted(doubled)[0]!r} stands twice in [[peers]]")
    return peers


def _config(table: Mapping[str, Any], peers: Sequence[Member], dataset: str) -> Config:
    make, arguments = find_recipe(_text(table, "recipe", "tuned"))
    given = {"dataset": dataset} if dataset and "dataset" in arguments else {}
    values = _flat(table.get("config", {}))
    for path in values:
        if path in _GIVEN:
            raise FederationError(f"config.{path}: give {_GIVEN[path]!r} at the top of the file instead")
    roles = "".join(peer.role * peer.clients for peer in peers)
    fixed: dict[str, object] = {
        "name": "run",
        "seed": table.get("seed", 0),
        "graph.clients": len(roles),
        "graph.roles": roles,
        "graph.topology": "edges" if "edges" in table else _text(table, "topology", "ring"),
        # Each has its own: the path of any one of them must not make the configs differ.
        "data.dataset": dataset or "own",
    }
    return override(make(**given), {**values, **fixed})


def _flat(table: Any) -> dict[str, object]:
    if not isinstance(table, dict):
        raise FederationError("[config] must be a table")
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat |= (
            {full_path(f"{key}.{k}"): v for k, v in value.items()}
            if isinstance(value, dict)
            else {full_path(key): value}
        )
    return flat


def _images(table: Mapping[str, Any], dataset: str) -> Images:
    if dataset:
        if "images" in table:
            raise FederationError("[images] and dataset exclude each other: the data set knows its images")
        data = outline(dataset)
        return Images(data.classes, *data.shape, data.mean, data.std)
    if "images" not in table:
        raise FederationError("[images] is missing: classes, channels, height and width must be given, or a dataset")
    images: Images = _section(Images, table["images"], "images")
    sides = images.height, images.width
    if len(images.classes) < 2 or len(set(images.classes)) != len(images.classes):
        raise FederationError("images.classes must hold at least two names, each once")
    if images.channels not in (1, 3) or not 4 <= min(sides) <= max(sides) <= 4096:
        raise FederationError("images: channels must be 1 or 3, height and width from 4 to 4096")
    for name in ("mean", "std"):
        numbers = getattr(images, name)
        if numbers and (len(numbers) != images.channels or not all(0 <= x <= 1 for x in numbers)):
            raise FederationError(f"images.{name} must hold {images.channels} numbers from 0 to 1, one a channel")
    if images.std and min(images.std) <= 0:
        raise FederationError("images.std must be above 0")
    return images


def _graph(table: Mapping[str, Any], config: Config, peers: Sequence[Member]) -> Topology:
    if "edges" not in table:
        return topology.build(config.graph, config.seed)
    if "topology" in table:
        raise FederationError("topology and edges exclude each other")
    place = {peer.name: k for k, peer in enumerate(peers)}
    if any(peer.clients > 1 for peer in peers):
        raise FederationError("edges join peers of one client each: name a topology instead")
    near: list[set[int]] = [set() for _ in peers]
    for edge in table["edges"]:
        if not isinstance(edge, list) or len(edge) != 2 or edge[0] == edge[1]:
            raise FederationError(f"edges holds {edge!r}: legal are pairs of two names")
        for name in edge:
            if name not in place:
                raise FederationError(f"edges names {name!r}, which is no peer{nearest(str(name), place)}")
        a, b = (place[name] for name in edge)
        near[a].add(b)
        near[b].add(a)
    graph = Topology("edges", tuple(tuple(sorted(row)) for row in near), config.graph.roles)
    topology.refuse_unconnected("edges", graph.neighbours)
    return graph


def _check_numbers(deadlines: Deadlines, faults: Faults) -> None:
    for name, value in vars(deadlines).items():
        if not 0 < value <= 86400:
            raise FederationError(f"deadlines.{name} = {value:g} is not legal: above 0, at most 86400 seconds")
    limits = {"staleness": (0, 1000), "discount": (0, 1), "quorum": (0, 10**6), "witnesses": (1, 10**6)}
    for name, (low, high) in limits.items():
        if not low <= getattr(faults, name) <= high:
            raise FederationError(f"faults.{name} = {getattr(faults, name)} is not legal: from {low} to {high}")


def _text(table: Mapping[str, Any], name: str, default: str) -> str:
    value = table.get(name, default)
    if not isinstance(value, str):
        raise FederationError(f"{name} = {value!r} is not legal: it must be text")
    return value


def _section(cls: type[Any], table: Any, where: str) -> Any:
    """A table as its dataclass."""
    if not isinstance(table, dict):
        raise FederationError(f"[{where}] must be a table")
    hints, known = get_type_hints(cls), {f.name: f for f in fields(cls)}
    if unknown := [key for key in table if key not in known]:
        raise FederationError(f"there is no field {where}.{unknown[0]}{nearest(unknown[0], known)}")
    for name, f in known.items():
        if name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise FederationError(f"{where}.{name} is missing")
    return cls(**{name: _value(f"{where}.{name}", hints[name], value) for name, value in table.items()})


def _value(path: str, kind: Any, value: Any) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    if kind in (tuple[str, ...], tuple[float, ...]) and isinstance(value, list):
        inner = str if kind == tuple[str, ...] else float
        return tuple(_value(path, inner, x) for x in value)
    words = {int: "a whole number", float: "a number", str: "text", tuple[str, ...]: "a list of names"}
    raise FederationError(f"{path} = {value!r} is not legal: it must be {words.get(kind, 'a list of numbers')}")
