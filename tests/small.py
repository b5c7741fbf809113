"""A run that takes every step of SemiDFL in about a second: for tests of what surrounds the method."""

from semidfl.config import Config, override

__all__ = ["TINY", "flags", "tiny"]

TINY: dict[str, object] = {
    "name": "tiny",
    "rounds": 5,
    "data.dataset": "digits",
    "data.ratio": 50,
    "graph.topology": "ring",
    "graph.clients": 4,
    "graph.roles": "LMUU",
    "augment.pad": 1,
    "augment.flip": False,
    "classifier.iterations": 10,
    "classifier.batch": 20,
    "classifier.lr": 0.1,
    # So that in these few rounds some clients keep all pseudo-labels, some a few, some none.
    "pseudo.threshold": 0.15,
    "pseudo.threshold_warmup": False,
    "generator.iterations": 1,
    "generator.batch": 4,
    "generator.width": 8,
    "generator.patch": 1,
    "generator.levels": 2,
    "generator.gan_lr": 1e-3,  # as in the digits recipe
    "generator.steps": 20,
    "generator.start": 2,
    "generator.every": 2,
    "generator.samples": 20,
    "generator.validation": 20,
    "generator.sampler_steps": 2,
    "evaluation.every": 2,
    "evaluation.last": 2,
    "compute.device": "cpu",
    "compute.threads": 1,  # several small runs on few cores: threads would only wait for each other
    "compute.checkpoint_every": 1,
    "compute.report": False,  # two seconds of drawing, after a second of work
}
"""every field that differs from the defaults"""


def tiny(**overrides: object) -> Config:
    """The tiny run; two underscores part a section and its field: `classifier__lr=0.05`."""
    return override(Config(), TINY | _paths(overrides))


def flags(**overrides: object) -> list[str]:
    """The same as flags of `semidfl run paper`."""
    return [f"--{path}={value}" for path, value in (TINY | _paths(overrides)).items()]


def _paths(overrides: dict[str, object]) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in overrides.items()}
