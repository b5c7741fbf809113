"""The methods by name; `module:Class` names one of your own."""

from semidfl.errors import ConfigError, nearest
from semidfl.methods.base import Method
from semidfl.methods.cbafed import CBAFed
from semidfl.methods.flexmatch import FlexMatch
from semidfl.methods.mixmatch import MixMatch
from semidfl.methods.semidfl import SemiDFL
from semidfl.methods.supervised import LowerBound, UpperBound
from semidfl.plugins import find_plugin

__all__ = ["METHODS", "Method", "find_method"]

METHODS: dict[str, type[Method]] = {
    "semidfl": SemiDFL,
    "dfl-lb": LowerBound,
    "dfl-ub": UpperBound,
    "mixmatch": MixMatch,
    "flexmatch": FlexMatch,
    "cbafed": CBAFed,
}


def find_method(name: str) -> type[Method]:
    """The class behind a name, of the package or of your own."""
    if name in METHODS:
        return METHODS[name]
    found = find_plugin("methods", "method", name)
    if found is None:
        legal = ", ".join(METHODS)
        raise ConfigError(f"method = {name!r} is not legal: {legal} or module:Class{nearest(name, METHODS)}")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"method = {name!r} is not a subclass of semidfl.Method")
    return found
