"""The settings of a run: frozen dataclasses, in TOML and on the command line alike.

The line under each field is its help text and its documentation. Defaults are the `paper` recipe
for MNIST; `recipes.py` names the experiments. Every value, from wherever it comes, passes through
`_coerce` and `_check`, so that an error always names the field, the value and what is legal.
"""

import ast
import hashlib
import inspect
import math
import tomllib
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from semidfl.errors import ConfigError, nearest

__all__ = [
    "AggregationConfig",
    "AugmentConfig",
    "ClassifierConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "GraphConfig",
    "MixupConfig",
    "PseudoLabelConfig",
    "config_hash",
    "from_toml",
    "full_path",
    "help_of",
    "leaves",
    "override",
    "to_toml",
]


@dataclass(frozen=True)
class DataConfig:
    dataset: str = "mnist"
    """digits, mnist, fashion-mnist, cifar10, or the path of an .npz with x_train, y_train, x_test, y_test"""
    ratio: float = 0.5
    """labelled share of all training samples, in percent"""
    alpha: float = 100.0
    """Dirichlet concentration of the classes over the clients: 100 is near IID, 0.1 very skewed"""


@dataclass(frozen=True)
class GraphConfig:
    topology: str = "fig1"
    """fig1, topology1, topology2, topology3, ring, line, star, full, grid, torus, random-regular,
    erdos-renyi, small-world, or the path of a file with one edge "i j" a line"""
    clients: int = 10
    """number of clients; the paper's graphs have 10"""
    roles: str = ""
    """one letter a client, L (labelled), M (mixed) or U (unlabelled); empty: the graph's own, else 20/20/60 %"""
    degree: int = 4
    """neighbours of a client in random-regular and small-world graphs"""
    probability: float = 0.3
    """of an edge in erdos-renyi, of rewiring in small-world"""


@dataclass(frozen=True)
class AugmentConfig:
    pad: int = 4
    """random crop after padding by this many pixels: shifts of up to pad in each direction"""
    flip: bool = True
    """horizontal flip with probability one half"""
    strong: float = 0.0
    """how strongly pseudo-labelled samples are changed for training: rotated, scaled, sheared, cut out; 0 is off"""


@dataclass(frozen=True)
class ClassifierConfig:
    model: Literal["cnn", "resnet18"] = "cnn"
    """network of the classifier"""
    iterations: int = 25
    """E, training steps of a client in a round"""
    batch: int = 10
    """B, samples of each source (labelled, pseudo-labelled, generated) in a batch"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """the published runs used SGD with momentum; the paper's text names Adam"""
    lr: float = 0.05
    """learning rate"""
    momentum: float = 0.9
    """of SGD"""
    nesterov: bool = False
    """look-ahead momentum of SGD"""
    weight_decay: float = 0.0
    """L2 penalty added to the gradient"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate over the rounds"""
    logit_adjustment: float = 0.0
    """train on logits shifted by this times the log of the client's own class shares: skewed classes bias it less"""
    ema: float = 0.0
    """decay a round of the moving average of the mixed classifier, which then gives the pseudo-labels; 0 is off"""


@dataclass(frozen=True)
class PseudoLabelConfig:
    start: int = 1
    """first round with pseudo-labels; before it, only labels teach"""
    kind: Literal["vanilla", "apl", "npl"] = "npl"
    """vanilla: own model, no filter; apl: own model, own counts; npl: models and counts of the neighbourhood"""
    views: int = 2
    """K, augmented views of an unlabelled sample"""
    sharpen: float = 2.0
    """Z, exponent that sharpens the mean prediction"""
    threshold: float = 0.95
    """tau, confidence that qualifies a sample"""
    npl_draw: Literal["round", "sample"] = "round"
    """draw the neighbour that labels a view once a round for a client, or for every sample"""
    threshold_warmup: bool = True
    """count the samples under tau as one more class in the threshold's maximum (FlexMatch's warm-up)"""
    adaptive: bool = True
    """scale tau by the class counts (Eq. 9); off: one fixed threshold"""
    labels: Literal["soft", "hard"] = "soft"
    """train on the sharpened distribution or on its largest class"""
    align: bool = False
    """raise classes that the whole network predicts more seldom than it has labels of them, by gossip"""
    masked: bool = False
    """weigh the pseudo-labelled samples by the share that qualified, as a masked mean over all would"""


@dataclass(frozen=True)
class GeneratorConfig:
    kind: Literal["none", "gan", "diffusion"] = "diffusion"
    """model of the consensus data space; none: local MixUp; gan: an AC-GAN"""
    iterations: int = 0
    """training steps of a client in a round; 0: as many as the classifier's E"""
    batch: int = 10
    """samples of each source in a batch"""
    lr: float = 1e-3
    """learning rate of the diffusion model's Adam"""
    gan_lr: float = 2e-4
    """learning rate of the GAN's Adam"""
    width: int = 64
    """channels of the generator's network at full resolution"""
    levels: int = 3
    """resolutions of the generator's network, each half of the one before"""
    steps: int = 1000
    """T, noise levels, linear beta from 1e-4 to 0.02"""
    all_images: bool = False
    """train also on unlabelled images without a qualified pseudo-label, as images of any class"""
    label_dropout: float = 0.15
    """share of training samples whose label is hidden, for classifier-free guidance"""
    ema: float = 0.0
    """decay a round of the moving average of the mixed weights, from which samples are then drawn; 0 is off"""
    start: int = 50
    """R, first round that generates"""
    every: int = 10
    """rounds between two generations"""
    samples: int = 1000
    """generated for training, per client"""
    validation: int = 100
    """generated besides for judging the classifier, per client"""
    sampler_steps: int = 20
    """steps of DPM-Solver++ (2M)"""
    guidance: float = 5.0
    """scale of classifier-free guidance"""
    keep_agreed: bool = False
    """train only on generated samples that the classifier puts into the asked-for class"""


@dataclass(frozen=True)
class MixupConfig:
    beta: float = 0.5
    """lambda is drawn from Beta(beta, beta) and folded to at least one half; 0: no MixUp"""


@dataclass(frozen=True)
class AggregationConfig:
    weights: str = "adagen"
    """constant; adatest: by accuracy on 512 shared test images (ablation only); adagen: on generated data;
    or module:function"""
    momentum: bool = False
    """mix the momentum of SGD with the classifier; off, as in the paper, it stays with the client"""


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = 5
    """rounds between two tests of every client's model on the whole test set"""
    last: int = 10
    """tests at the end whose mean is the result"""


@dataclass(frozen=True)
class ComputeConfig:
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """arithmetic of UNet and ResNet; auto: bf16 on a GPU; weights stay fp32"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the training steps; auto: on a GPU"""
    chunk: int = 0
    """clients trained together as one stacked network; 1 is a loop; 0: what is fastest"""
    threads: int = 0
    """CPU threads; 0: one a core, or 1 with deterministic"""
    deterministic: bool = False
    """client by client, with a fixed order of summation: the same bits however clients are placed (CPU)"""
    checkpoint_every: int = 10
    """rounds between two checkpoints; 0: only at the end and on Ctrl-C"""


@dataclass(frozen=True)
class Config:
    name: str = "run"
    """of the run and its folder"""
    method: str = "semidfl"
    """semidfl, dfl-lb, dfl-ub, mixmatch, flexmatch, cbafed, or module:Class"""
    variant: Literal["paper", "tuned"] = "paper"
    """of a baseline: as the paper adapted it, or faithful to the method's own publication"""
    seed: int = 0
    """of every draw in the run"""
    rounds: int = 500
    """T, global rounds"""
    data: DataConfig = field(default_factory=DataConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)
    pseudo: PseudoLabelConfig = field(default_factory=PseudoLabelConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    mixup: MixupConfig = field(default_factory=MixupConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        for path, value in leaves(self):
            kind = _kinds()[path]
            if isinstance(value, str) and kind in (int, float, bool):  # text is read only from files and flags
                raise ConfigError(f"{path} = {value!r} is not legal: it must be {_WORDS[kind]}")
            _coerce(path, kind, value)
            _check(path, value)
        if self.generator.sampler_steps >= self.generator.steps:
            raise ConfigError(
                f"generator.sampler_steps = {self.generator.sampler_steps} is not legal: "
                f"it must be below generator.steps = {self.generator.steps}"
            )


def _at_least(low: float) -> "_Rule":
    return lambda x: x >= low, f"at least {low}"


def _between(low: float, high: float) -> "_Rule":
    return lambda x: low <= x <= high, f"from {low} to {high}"


_Rule = tuple[Callable[[float], bool], str]
_POSITIVE: _Rule = (lambda x: x > 0, "above 0")
_DECAY: _Rule = (lambda x: 0 <= x < 1, "from 0 to below 1")

# What a number may be, and how to say it. Types and choices are checked by `_coerce`.
_RULES: dict[str, _Rule] = {
    "seed": (lambda x: 0 <= x < 2**63, "a whole number from 0 to below 2^63"),
    "rounds": _at_least(1),
    "data.ratio": (lambda x: 0 < x <= 100, "a percentage above 0 and at most 100"),
    "data.alpha": (lambda x: x >= 1e-9, "above 0 (1e-9 at least)"),
    "graph.clients": _between(1, 10**6),
    "graph.degree": _at_least(1),
    "graph.probability": _between(0, 1),
    "augment.pad": _between(0, 64),
    "augment.strong": _between(0, 2),
    "classifier.iterations": _at_least(1),
    "classifier.batch": _at_least(1),
    "classifier.lr": _at_least(0),
    "classifier.momentum": _DECAY,
    "classifier.weight_decay": _at_least(0),
    "classifier.logit_adjustment": _between(0, 10),
    "classifier.ema": _DECAY,
    "pseudo.start": _at_least(1),
    "pseudo.views": _between(1, 64),
    "pseudo.sharpen": _POSITIVE,
    "pseudo.threshold": _between(0, 1),
    "generator.iterations": _at_least(0),
    "generator.batch": _at_least(1),
    "generator.lr": _at_least(0),
    "generator.gan_lr": _at_least(0),
    "generator.width": (lambda x: 8 <= x <= 4096 and x % 8 == 0, "a multiple of 8 from 8 to 4096"),
    "generator.levels": _between(1, 6),
    "generator.steps": _between(3, 10**4),
    "generator.label_dropout": _between(0, 1),
    "generator.ema": _DECAY,
    "generator.start": _at_least(1),
    "generator.every": _at_least(1),
    "generator.samples": _at_least(1),
    "generator.validation": _at_least(1),
    "generator.sampler_steps": _between(2, 1000),
    "generator.guidance": _at_least(0),
    "mixup.beta": (lambda x: x == 0 or 0.01 <= x <= 1000, "0, or from 0.01 to 1000"),
    "evaluation.every": _at_least(1),
    "evaluation.last": _at_least(1),
    "compute.chunk": _at_least(0),
    "compute.threads": _between(0, 4096),
    "compute.checkpoint_every": _at_least(0),
}


def _check(path: str, value: object) -> None:
    if path in _RULES and isinstance(value, int | float):
        allows, words = _RULES[path]
        if not allows(value):
            raise ConfigError(f"{path} = {value!r} is not legal: it must be {words}")
    if isinstance(value, str) and any(unicodedata.category(letter) == "Cc" for letter in value):
        raise ConfigError(f"{path} = {value!r} is not legal: it holds a control character")
    if path == "name" and (value in ("", ".", "..") or str(value) != Path(str(value)).name):
        raise ConfigError(f"name = {value!r} is not legal: it names a folder and must hold no '/'")
    if path == "graph.roles" and (bad := set(str(value)) - set("LMU")):
        raise ConfigError(f"graph.roles holds {sorted(bad)}: legal letters are L, M and U")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config with its dotted path, in the order of definition."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


def override(config: Config, values: Mapping[str, object]) -> Config:
    """A copy with some fields replaced, named by dotted path or, where only one ends so, by last name."""
    changes: dict[str, dict[str, Any]] = {"": {}}
    for name, value in values.items():
        path = full_path(name)
        section, _, leaf = path.rpartition(".")
        changes.setdefault(section, {})[leaf] = _coerce(path, _kinds()[path], value)
    top = changes.pop("")
    # All at once: fields that depend on each other may change together.
    return replace(config, **top, **{name: replace(getattr(config, name), **x) for name, x in changes.items()})


def full_path(name: str) -> str:
    """The dotted path of a field that may be named by its last part."""
    paths = list(help_of())
    if name in paths:
        return name
    # `iterations`, `batch`, `lr`, … stand in two sections and must be named in full.
    ends = [p for p in paths if p.rsplit(".", 1)[-1] == name]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError(f"{name!r} could be {' or '.join(ends)}: name the section too")
    known = paths if "." in name else [p.rsplit(".", 1)[-1] for p in paths]
    raise ConfigError(f"there is no field {name!r}{nearest(name, known)}; `semidfl run --help` lists them all")


def _coerce(path: str, kind: Any, value: object) -> object:
    """A value from TOML or from the command line (there a string) as the field's type."""
    if get_origin(kind) is Literal:
        legal = get_args(kind)
        if value not in legal:
            raise ConfigError(f"{path} = {value!r} is not legal: one of {', '.join(legal)}{nearest(str(value), legal)}")
        return value
    assert not isinstance(kind, UnionType)
    if kind is str and isinstance(value, str):
        return value
    if kind is bool:
        word = str(value).lower()
        if word in ("true", "on", "yes", "1", "false", "off", "no", "0"):
            return word in ("true", "on", "yes", "1")
        raise ConfigError(f"{path} = {value!r} is not legal: true or false")
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = kind(value)
            if math.isfinite(number) and float(number) == float(value):  # type: ignore[arg-type]
                return number
        except (TypeError, ValueError, OverflowError):
            pass
    raise ConfigError(f"{path} = {value!r} is not legal: it must be {_WORDS.get(kind, kind.__name__)}")


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def to_toml(config: Config) -> str:
    """The config as TOML; `from_toml` gives back an equal one."""
    lines: list[str] = []
    section = ""
    for path, value in leaves(config):
        head, _, name = path.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]"]
            section = head
        lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def from_toml(text: str, base: Config | None = None) -> Config:
    """A config from TOML; what the text leaves out is taken from `base` (else from the defaults)."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config is not valid TOML: {error}") from None
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not value and not any(path.startswith(f"{key}.") for path in help_of()):
            raise ConfigError(f"there is no section [{key}]{nearest(key, (f.name for f in fields(Config)))}")
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    if unknown := [path for path in flat if path not in help_of()]:
        raise ConfigError(f"there is no field {unknown[0]!r}{nearest(unknown[0], help_of())}")
    return override(base or Config(), flat)


def config_hash(config: Config) -> str:
    """Twelve hex digits that name what is computed; where and how (name, compute) stays out."""
    same = replace(config, name="run", compute=ComputeConfig(deterministic=config.compute.deterministic))
    return hashlib.sha256(to_toml(same).encode()).hexdigest()[:12]


@cache
def _kinds() -> dict[str, Any]:
    """The type of every field, by dotted path."""
    top = get_type_hints(Config)
    found = {name: kind for name, kind in top.items() if not is_dataclass(kind)}
    for name, section in top.items():
        if is_dataclass(section):
            found |= {f"{name}.{leaf}": kind for leaf, kind in get_type_hints(section).items()}
    return found


@cache
def help_of() -> dict[str, str]:
    """The help line of every field, by dotted path: the docstring that stands under it."""
    return dict(_helps(Config, ""))


def _helps(cls: type, prefix: str) -> Iterator[tuple[str, str]]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for line, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[line.target.id] = " ".join(str(below.value.value).split())
    hints = get_type_hints(cls)
    for f in fields(cls):
        if is_dataclass(hints[f.name]):
            yield from _helps(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", texts.get(f.name, "")
