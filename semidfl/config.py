"""The settings of a run: frozen dataclasses, in TOML and on the command line alike.

The line under each field is its help text and its documentation. Defaults are the `paper` recipe
for MNIST; `recipes.py` names the experiments. Every value, from wherever it comes, passes through
`coerce` and `check` in legal.py, so that an error always names the field, the value and what is legal.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from semidfl.errors import ConfigError, nearest
from semidfl.fields import helps_of, kinds_of, leaves, to_toml
from semidfl.legal import check, coerce, refuse_text

__all__ = [
    "AggregationConfig",
    "AttackConfig",
    "AugmentConfig",
    "ClassifierConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "GeneratorConfig",
    "GraphConfig",
    "MixupConfig",
    "PseudoLabelConfig",
    "config_hash",
    "from_toml",
    "full_path",
    "help_of",
    "kinds",
    "leaves",
    "override",
    "to_toml",
]


@dataclass(frozen=True)
class DataConfig:
    dataset: str = "mnist"
    """digits, mnist, fashion-mnist, cifar10, the path of an .npz with x_train, y_train, x_test, y_test,
    or of a folder of images (docs/own-data.md)"""
    ratio: float = 0.5
    """labelled share of all training samples, in percent; where some come without a label, all others keep theirs"""
    alpha: float = 100.0
    """Dirichlet concentration of the classes over the clients: 100 is near IID, 0.1 very skewed"""
    size: int = 0
    """side in pixels to which a folder's images are resized; 0: as they are if all are alike and at most 64, else 32"""
    channels: int = 0
    """of a folder's images: 1 makes them grey, 3 colour; 0: colour if any of them is"""
    test: float = 20.0
    """percent of a folder's labelled images that are kept for testing; a folder test/ in it comes first"""
    classes: str = ""
    """class names of a folder, with commas between, in their order; empty: those found"""
    held_out: int = 0
    """training samples that are put aside and tested on, in place of the test images, which choosing settings must
    not see; ratio counts what is left"""


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
    """how strongly pseudo-labelled samples are changed for training: in place, shape and colour, cut out; 0 is off"""


@dataclass(frozen=True)
class ClassifierConfig:
    model: Literal["cnn", "resnet18"] = "cnn"
    """network of the classifier"""
    standardise: bool = False
    """of resnet18: bring every filter to mean 0 and length 1 before it is used"""
    turns: float = 0.0
    """weight of telling by how many quarters an image was turned, which needs no labels: B more images in a batch, of
    all that a client holds; it fades as the learning rate does; 0 is off"""
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
    grad_clip: float = 0.0
    """length to which a longer gradient of a client is cut, before weight decay; 0: none is"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate over the rounds"""
    logit_adjustment: float = 0.0
    """train on logits shifted by this times the log of the client's own class shares: skewed classes bias it less"""
    ema: float = 0.0
    """decay a round of the moving average of the mixed classifier, which then gives the pseudo-labels; 0 is off"""
    loss: Literal["mean", "sources"] = "mean"
    """mean: over all samples of a client; sources: that, doubled where a client has both labelled and pseudo-labelled
    samples (generated ones do not count); methods with a loss of their own keep it"""


@dataclass(frozen=True)
class PseudoLabelConfig:
    start: int = 1
    """first round with pseudo-labels; before it, only labels teach"""
    pool: int = 0
    """unlabelled samples of a client that are looked at in a round, others in every round; 0: all"""
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
    """raise classes that the whole network predicts more seldom than its labels say, by gossip"""
    prior: float = 1.0
    """for align: labels of each class added to those there are; many say that classes are known to be about even"""
    masked: bool = False
    """weigh the pseudo-labelled samples by the share that qualified, as a masked mean over all would"""
    doubled: bool = False
    """2 B pseudo-labelled samples in a batch, each at half the weight, where there are no generated ones"""


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
    """channels of the generator's network at its highest resolution"""
    patch: int = 2
    """side of the squares of pixels that the UNet takes as one pixel of more channels"""
    levels: int = 2
    """resolutions of the UNet, each half of the one before; the GAN goes from full resolution to the same lowest"""
    steps: int = 1000
    """T, noise levels, linear beta from 1e-4 to 0.02"""
    all_images: bool = False
    """train also on unlabelled images without a qualified pseudo-label, as images of any class"""
    label_dropout: float = 0.15
    """share of training samples whose label is hidden, for classifier-free guidance"""
    min_snr: float = 0.0
    """signal-to-noise ratio above which a noise level counts less (Hang et al. 2023): shapes come sooner; 0 is off"""
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
    fill: bool = False
    """weigh generated samples by how uneven the client's own classes are: they fill in what it lacks"""


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
    gossip: int = 1
    """times that models are sent and mixed at the end of a round, by the same accuracies: more for graphs of few edges,
    at as many times the bytes of what is mixed"""
    idle: float = 1.0
    """factor of a client's weight in mixing while it has neither labels nor pseudo-labels; with labels, or with
    pseudo-labels for all its samples, it is 1, with both 2 less this; 1, or with a robust rule: all count alike"""
    robust: Literal["none", "clip", "trimmed-mean", "median"] = "none"
    """mixing that withstands a minority of lying neighbours; trimmed-mean and median count all neighbours alike"""
    clip: float = 0.3
    """distance to which clip cuts a neighbour's model, as a share of the own model's length"""
    trim: int = 1
    """values that trimmed-mean drops at either end of each weight: as many neighbours may lie"""


@dataclass(frozen=True)
class ExchangeConfig:
    dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    """numbers of shared models as they are sent; int8: whole numbers with a scale for every 128"""
    generator_dtype: Literal["same", "fp32", "fp16", "bf16", "int8"] = "same"
    """those of the generator; same: as dtype"""
    feedback: bool = True
    """add what rounding took from a model to what is sent of it the next time"""
    generator_every: int = 1
    """rounds between two exchanges of the generator"""


@dataclass(frozen=True)
class AttackConfig:
    kind: Literal["none", "sign-flip", "noise", "nan", "label-flip"] = "none"
    """what simulated attackers do: send their models turned round, with noise, as NaN; or train on wrong labels"""
    who: str = ""
    """ids of the attackers, parted by commas; empty: drawn from the seed"""
    count: int = 1
    """how many attackers to draw"""
    strength: float = 1.0
    """factor of the turned model; of noise: its size as a multiple of the weights'"""


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
    chunk: int = 0
    """clients trained together as one stacked network; 1 is a loop; 0: what is fastest"""
    threads: int = 0
    """CPU threads; 0: one a core, or 1 with deterministic"""
    deterministic: bool = False
    """client by client, with a fixed order of summation: the same bits however clients are placed (CPU)"""
    checkpoint_every: int = 10
    """rounds between two checkpoints, more where writing takes long; 0: only at the end and on Ctrl-C"""
    test_every: int = 0
    """rounds between two tests before those whose mean is the result, which stays the same; 0: evaluation.every"""
    engine: Literal["memory", "ray"] = "memory"
    """memory: all clients in this process; ray: blocks of clients in the actors of a Ray cluster"""
    actors: int = 0
    """of engine ray; 0: one a GPU of the cluster, or as many as its cores allow"""
    cores: int = 1
    """CPU cores that each actor takes, and threads that it computes with"""
    ray_address: str = ""
    """of a running cluster, HOST:PORT or auto; empty: engine ray starts one on this machine and ends it"""
    log: Literal["none", "tensorboard"] = "none"
    """where to write the figures besides metrics.jsonl; tensorboard: to tensorboard/ in the run folder"""
    report: bool = True
    """write report.html at the end, where matplotlib and jinja2 are installed"""


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
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        for path, value in leaves(self):
            refuse_text(path, kinds()[path], value)
            coerce(path, kinds()[path], value)
            check(path, value)
        if self.generator.sampler_steps >= self.generator.steps:
            raise ConfigError(
                f"generator.sampler_steps = {self.generator.sampler_steps} is not legal: "
                f"it must be below generator.steps = {self.generator.steps}"
            )


def override(config: Config, values: Mapping[str, object]) -> Config:
    """A copy with some fields replaced, named by dotted path or, where only one ends so, by last name."""
    changes: dict[str, dict[str, Any]] = {"": {}}
    for name, value in values.items():
        path = full_path(name)
        section, _, leaf = path.rpartition(".")
        changes.setdefault(section, {})[leaf] = coerce(path, kinds()[path], value)
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
    usual = dict(leaves(Config()))
    without = [path for path, value in leaves(same) if path in _YOUNGER and value == usual[path]]
    return hashlib.sha256(to_toml(same, without).encode()).hexdigest()[:12]


_YOUNGER = (
    "classifier.loss",
    "classifier.grad_clip",
    "classifier.standardise",
    "classifier.turns",
    "pseudo.doubled",
    "aggregation.idle",
    "aggregation.gossip",
    "compute.test_every",
)
"""than the tables in results/: where such a field has its default, runs keep the name that they had without it"""


@cache
def kinds() -> dict[str, Any]:
    """The type of every field, by dotted path."""
    return dict(kinds_of(Config))


@cache
def help_of() -> dict[str, str]:
    """The help line of every field, by dotted path: the docstring that stands under it."""
    return dict(helps_of(Config))
