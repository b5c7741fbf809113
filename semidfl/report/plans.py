"""What each table and figure, the paper's and one of our own, is made of: cells, each with a config for every seed.

A plan runs nothing. It names its runs by their configs, so two tables that ask for the same run share it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from semidfl import recipes
from semidfl.config import Config, config_hash, override
from semidfl.data.own import with_sites
from semidfl.data.sources import is_folder, load, outline
from semidfl.errors import ConfigError, nearest
from semidfl.methods import find_method
from semidfl.report.levers import ALL, levers

__all__ = ["KINDS", "METHODS", "NAMES", "Cell", "Kind", "Options", "Plan", "find_kind", "make_plan", "seeded"]

METHODS = ("dfl-ub", "dfl-lb", "mixmatch", "flexmatch", "cbafed", "semidfl")
ALPHAS = (100.0, 10.0, 1.0, 0.1, 0.01)
# digits is our stand-in; what is not named here goes like MNIST, as in recipes.paper.
RATIOS = {"mnist": (0.5, 0.1), "fashion-mnist": (0.5, 0.1), "cifar10": (5.0, 1.0), "digits": (5.0, 2.0)}
MANY_RATIOS = {"mnist": (0.5, 0.4, 0.3, 0.2, 0.1), "cifar10": (5.0, 4.0, 3.0, 2.0, 1.0)}
MANY_RATIOS |= {"fashion-mnist": MANY_RATIOS["mnist"], "digits": MANY_RATIOS["cifar10"]}
# The supplement draws another graph for each data set; a data set that is not the paper's gets all three.
TOPOLOGIES = {"mnist": ("topology1",), "fashion-mnist": ("topology2",), "cifar10": ("topology3",)}

NAMES = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "dfl-ub": "DFL-UB",
    "dfl-lb": "DFL-LB",
    "mixmatch": "MixMatch",
    "flexmatch": "FlexMatch",
    "cbafed": "CBAFed",
    "semidfl": "SemiDFL",
    "vanilla": "Vanilla PL",
    "apl": "APL",
    "npl": "NPL",
    "none": "L-MixUp",
    "gan": "w/ GAN",
    "diffusion": "w/ Diffusion",
    "constant": "Constant",
    "adatest": "AdaTest",
    "adagen": "AdaGen",
}
"""as the paper prints them"""


@dataclass(frozen=True)
class Kind:
    """One table or figure of the paper."""

    title: str
    datasets: tuple[str, ...] = ("mnist", "fashion-mnist", "cifar10")
    alphas: tuple[float, ...] = (100.0, 0.1)
    ratios: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: RATIOS)
    switch: str = ""
    """the field of the config that the columns of an ablation differ in; empty: methods are compared"""
    switches: tuple[str, ...] = ()
    """its values"""
    fixed: str = ""
    """another field that the plan sets and that therefore cannot be overridden"""
    recipe: str = "paper"
    """what its runs are made by, where nothing else is asked for"""
    levers: bool = False
    """whether it takes the levers of the recipe back, one by one"""
    runs: bool = True
    """whether anything is trained for it"""
    pictures: bool = False
    """whether pictures of what its runs generate are kept beside it"""


_FIRST = {dataset: ratios[:1] for dataset, ratios in RATIOS.items()}
_TWO = ("fashion-mnist", "cifar10")

KINDS: dict[str, Kind] = {
    "table-main": Kind("All methods on the graph of Figure 1", pictures=True),
    "table-topology": Kind("All methods on other graphs", fixed="graph.topology"),
    "table-pseudo-labels": Kind(
        "Ablation of pseudo-labelling", ("cifar10",), switch="pseudo.kind", switches=("vanilla", "apl", "npl")
    ),
    "table-mixup": Kind(
        "Ablation of consensus MixUp",
        ("mnist",),
        switch="generator.kind",
        switches=("none", "gan", "diffusion"),
        pictures=True,
    ),
    "table-aggregation": Kind(
        "Ablation of adaptive aggregation",
        ("fashion-mnist",),
        switch="aggregation.weights",
        switches=("constant", "adatest", "adagen"),
    ),
    "table-levers": Kind(
        "The tuned recipe without one of its levers", ("mnist", "fashion-mnist"), (0.1,), recipe="tuned", levers=True
    ),
    "figure-alpha": Kind("Accuracy against the skew of the classes", _TWO, ALPHAS, _FIRST),
    "figure-ratio": Kind("Accuracy against the labelled share", _TWO, (100.0,), MANY_RATIOS),
    "figure-partition": Kind("Which client holds which classes", ("cifar10",), ALPHAS, runs=False),
    "figure-topologies": Kind("The graphs", (), (), runs=False),
}


@dataclass(frozen=True)
class Options:
    """What a user asked for; empty: what the paper has."""

    datasets: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    alphas: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: int = 3
    recipe: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """overrides of every run's config, by dotted path"""
    out: Path = Path("results")
    runs: Path = Path("runs/reproduce")
    kept: Path | None = None
    run: str = "yes"
    """no: only what is done is written down; missing: what `summaries` has from elsewhere is not run again"""

    @property
    def summaries(self) -> Path:
        """Where the summaries of all runs are put together."""
        return self.kept or self.out / "runs.jsonl"


@dataclass(frozen=True)
class Cell:
    """One number of a table: where it stands, and the runs behind it, one a seed."""

    row: tuple[str, ...]
    """the labels in front of the row"""
    column: str
    what: str
    """the method, or in an ablation the value of the switch"""
    dataset: str
    ratio: float
    alpha: float
    topology: str
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Plan:
    """A table or figure, ready to be run."""

    name: str
    title: str
    heads: tuple[str, ...]
    """of the columns with the labels"""
    cells: tuple[Cell, ...]
    base: str = ""
    """what the others of a column are compared with, where the paper has no numbers"""

    def runs(self) -> dict[str, Config]:
        """Every run once, by its hash: the first seed of all cells first, so that a plan cut short is whole."""
        order = [c.configs[k] for k in range(max(map(seeded, self.cells), default=0)) for c in self.cells]
        return {config_hash(config): config for config in order}


def seeded(cell: Cell) -> int:
    """How many seeds a cell has."""
    return len(cell.configs)


def find_kind(name: str) -> Kind:
    """The table or figure of this name."""
    if name not in KINDS:
        raise ConfigError(f"there is no table or figure {name!r}{nearest(name, KINDS)}: legal are {', '.join(KINDS)}")
    return KINDS[name]


def make_plan(name: str, options: Options) -> Plan:
    """The cells of a table, all settings checked before anything runs."""
    kind = find_kind(name)
    _refuse_idle(name, kind, options)
    build = _recipe(options.recipe or kind.recipe)
    if kind.levers:
        return Plan(name, kind.title, ("without",), tuple(_lever_by_lever(kind, options, build)), ALL)
    if kind.switch:
        return Plan(name, kind.title, ("data set", "α", "r"), tuple(_ablation(kind, options, build)))
    return Plan(name, kind.title, ("method", "α"), tuple(_comparison(name, kind, options, build)))


def _refuse_idle(name: str, kind: Kind, options: Options) -> None:
    """Options that could have no effect, or would undo what the table compares."""
    own = [path for path in (kind.switch, kind.fixed) if path]
    if kind.levers:
        own += [path for dataset in options.datasets or kind.datasets for _, back in levers(dataset) for path in back]
    for path in own:
        if path in options.values:
            raise ConfigError(f"{name} sets {path} itself: it cannot be overridden")
    if kind.levers and options.recipe not in ("", kind.recipe):
        raise ConfigError(f"{name} takes no --recipe: it is about the levers of {kind.recipe}")
    if options.methods and (kind.switch or kind.levers or not kind.runs):
        compared = f"values of {kind.switch}" if kind.switch else "levers"
        why = f"it compares {compared} in semidfl" if kind.runs else "nothing is trained for it"
        raise ConfigError(f"{name} takes no --method: {why}")


def _recipe(name: str) -> Callable[..., Config]:
    if name not in ("paper", "tuned"):
        raise ConfigError(f"--recipe = {name!r} is not legal: one of paper, tuned")
    return recipes.RECIPES[name]


def _grid(kind: Kind, options: Options) -> Iterator[tuple[str, float]]:
    """The data sets and, of each, the ratios."""
    for dataset in options.datasets or kind.datasets:
        outline(dataset)  # an unknown name is refused now, not after hours
        for ratio in options.ratios or kind.ratios.get(dataset, kind.ratios["mnist"]):
            yield dataset, ratio


def _comparison(name: str, kind: Kind, options: Options, build: Callable[..., Config]) -> Iterator[Cell]:
    """A row a method and alpha, a column a data set and ratio."""
    if not kind.runs:
        return
    for method in options.methods or METHODS:
        everything = find_method(method).all_labelled
        for alpha in options.alphas or kind.alphas:
            for dataset, ratio in _grid(kind, options):
                # One run for all ratios: where everything is labelled, the ratio changes nothing.
                used = RATIOS.get(dataset, RATIOS["mnist"])[0] if everything else ratio
                for topology in _topologies(name, dataset):
                    make = _seeds(options, build, {}, dataset, used, alpha, topology, method)
                    where = f" / {topology}" if name == "table-topology" else ""
                    column = f"{_name(dataset)}{where}, r = {ratio:g} %"
                    row = (_name(method), f"{alpha:g}")
                    yield Cell(row, column, method, dataset, ratio, alpha, topology, make)


def _ablation(kind: Kind, options: Options, build: Callable[..., Config]) -> Iterator[Cell]:
    """A row a setting, a column a value of the switch, all with SemiDFL."""
    for alpha in options.alphas or kind.alphas:
        for dataset, ratio in _grid(kind, options):
            for value in kind.switches:
                make = _seeds(options, build, {kind.switch: value}, dataset, ratio, alpha, "fig1", "semidfl", value)
                row = (_name(dataset), f"{alpha:g}", f"{ratio:g} %")
                yield Cell(row, _name(value), value, dataset, ratio, alpha, "fig1", make)


def _lever_by_lever(kind: Kind, options: Options, build: Callable[..., Config]) -> Iterator[Cell]:
    """A row a lever that is taken back, a column a setting, all with SemiDFL."""
    for dataset, ratio in _grid(kind, options):
        for alpha in options.alphas or kind.alphas:
            for lever, back in levers(dataset):
                end = "" if lever == ALL else f"without-{re.sub('[^a-z]+', '-', lever.lower()).strip('-')}"
                make = _seeds(options, build, back, dataset, ratio, alpha, "fig1", "semidfl", end)
                column = f"{_name(dataset)}, r = {ratio:g} %, α = {alpha:g}"
                yield Cell(("–" if lever == ALL else lever,), column, lever, dataset, ratio, alpha, "fig1", make)


def _topologies(name: str, dataset: str) -> tuple[str, ...]:
    if name != "table-topology":
        return ("fig1",)
    return TOPOLOGIES.get(dataset, ("topology1", "topology2", "topology3"))


def _seeds(
    options: Options,
    build: Callable[..., Config],
    switch: Mapping[str, Any],
    dataset: str,
    ratio: float,
    alpha: float,
    topology: str,
    method: str,
    end: str = "",
) -> tuple[Config, ...]:
    """The configs of a cell."""
    made = []
    for seed in range(options.seeds):
        config = build(dataset=dataset, ratio=ratio, alpha=alpha, topology=topology, method=method, seed=seed)
        config = replace(config, name=f"{config.name}-{end}" if end else config.name)
        config = override(config, {**switch, **options.values})
        if is_folder(dataset):  # its sites, if it has any, say how many clients there are and of which role
            config = with_sites(config, load(dataset, config.data, seed))
        made.append(config)
    return tuple(made)


def _name(word: str) -> str:
    return NAMES.get(word, word)
