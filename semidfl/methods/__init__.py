"""The methods by name; `module:Class` names one of your own."""

from importlib import import_module

from semidfl.errors import ConfigError, nearest
from semidfl.methods.base import Method
from semidfl.methods.semidfl import SemiDFL
from semidfl.methods.supervised import LowerBound, UpperBound

__all__ = ["METHODS", "Method", "find_method"]

METHODS: dict[str, type[Method]] = {
    "semidfl": SemiDFL,
    "dfl-lb": LowerBound,
    "dfl-ub": UpperBound,
}


def find_method(name: str) -> type[Method]:
    """The class behind a name, or behind `module:Class`."""
    if name in METHODS:
        return METHODS[name]
    module, colon, leaf = name.partition(":")
    if not colon:
        legal = ", ".join(METHODS)
        raise ConfigError(f"method = {name!r} is not legal: {legal} or module:Class{nearest(name, METHODS)}")
    try:
        found = getattr(import_module(module), leaf)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"method = {name!r} cannot be loaded: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"method = {name!r} is not a subclass of semidfl.Method")
    return found
