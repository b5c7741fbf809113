"""What a value of the config may be: types and choices, ranges, and how to say what is legal."""

import math
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from semidfl.errors import ConfigError, nearest

__all__ = ["check", "coerce", "legal_words", "refuse_text"]


def _at_least(low: float) -> "_Rule":
    return lambda x: x >= low, f"at least {low}"


def _between(low: float, high: float) -> "_Rule":
    return lambda x: low <= x <= high, f"from {low} to {high}"


_Rule = tuple[Callable[[float], bool], str]
_POSITIVE: _Rule = (lambda x: x > 0, "above 0")
_DECAY: _Rule = (lambda x: 0 <= x < 1, "from 0 to below 1")

# What a number may be, and how to say it. Types and choices are checked by `coerce`.
_RULES: dict[str, _Rule] = {
    "seed": (lambda x: 0 <= x < 2**63, "a whole number from 0 to below 2^63"),
    "rounds": _at_least(1),
    "data.ratio": (lambda x: 0 < x <= 100, "a percentage above 0 and at most 100"),
    "data.alpha": (lambda x: x >= 1e-9, "above 0 (1e-9 at least)"),
    "data.size": (lambda x: x == 0 or 4 <= x <= 1024, "0, or from 4 to 1024"),
    "data.channels": (lambda x: x in (0, 1, 3), "0 (found out), 1 (grey) or 3 (colour)"),
    "data.test": _between(1, 90),
    "data.held_out": _at_least(0),
    "graph.clients": _between(1, 10**6),
    "graph.degree": _at_least(1),
    "graph.probability": _between(0, 1),
    "augment.pad": _between(0, 64),
    "augment.strong": _between(0, 2),
    "classifier.turns": _between(0, 10),
    "classifier.iterations": _at_least(1),
    "classifier.batch": _at_least(1),
    "classifier.lr": _at_least(0),
    "classifier.momentum": _DECAY,
    "classifier.weight_decay": _at_least(0),
    "classifier.grad_clip": _at_least(0),
    "classifier.logit_adjustment": _between(0, 10),
    "classifier.ema": _DECAY,
    "pseudo.start": _at_least(1),
    "pseudo.pool": _at_least(0),
    "pseudo.prior": _POSITIVE,
    "pseudo.views": _between(1, 64),
    "pseudo.sharpen": _POSITIVE,
    "pseudo.threshold": _between(0, 1),
    "generator.iterations": _at_least(0),
    "generator.batch": _at_least(1),
    "generator.lr": _at_least(0),
    "generator.gan_lr": _at_least(0),
    "generator.width": (lambda x: 8 <= x <= 4096 and x % 8 == 0, "a multiple of 8 from 8 to 4096"),
    "generator.patch": _between(1, 8),
    "generator.levels": _between(1, 6),
    "generator.steps": _between(3, 10**4),
    "generator.label_dropout": _between(0, 1),
    "generator.min_snr": _at_least(0),
    "generator.ema": _DECAY,
    "generator.start": _at_least(1),
    "generator.every": _at_least(1),
    "generator.samples": _at_least(1),
    "generator.validation": _at_least(1),
    "generator.sampler_steps": _between(2, 1000),
    "generator.guidance": _at_least(0),
    "mixup.beta": (lambda x: x == 0 or 0.01 <= x <= 1000, "0, or from 0.01 to 1000"),
    "aggregation.gossip": _between(1, 100),
    "aggregation.idle": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "aggregation.clip": _POSITIVE,
    "aggregation.trim": _at_least(1),
    "exchange.generator_every": _at_least(1),
    "attack.count": _at_least(1),
    "attack.strength": _at_least(0),
    "evaluation.every": _at_least(1),
    "evaluation.last": _at_least(1),
    "compute.chunk": _at_least(0),
    "compute.threads": _between(0, 4096),
    "compute.checkpoint_every": _at_least(0),
    "compute.test_every": _at_least(0),
    "compute.actors": _between(0, 10**5),
    "compute.cores": _between(1, 4096),
}


def check(path: str, value: object) -> None:
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


def legal_words(path: str, kind: Any) -> str:
    """What the field may be, for the documentation."""
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return _RULES[path][1] if path in _RULES else _WORDS[kind]


def coerce(path: str, kind: Any, value: object) -> object:
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


def refuse_text(path: str, kind: Any, value: object) -> None:
    """Text stands for a number only in files and flags, not where a config is made in Python."""
    if isinstance(value, str) and kind in (int, float, bool):
        raise ConfigError(f"{path} = {value!r} is not legal: it must be {_WORDS[kind]}")
