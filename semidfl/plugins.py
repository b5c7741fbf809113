"""Things of your own: a method, an aggregation rule, a data set or a topology that the package does not know.

A name with a colon is `module:object`; any other is looked for among the installed packages' entry points, in
the groups semidfl.methods, semidfl.weights, semidfl.datasets and semidfl.topologies.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from semidfl.errors import ConfigError

__all__ = ["find_plugin"]


def find_plugin(group: str, field: str, name: str) -> Any:
    """The object behind a name of your own, or None where no entry point is called so."""
    module, colon, leaf = name.partition(":")
    try:
        if colon:
            return getattr(import_module(module), leaf)
        found = entry_points(group=f"semidfl.{group}", name=name)
        return next(iter(found)).load() if found else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field} = {name!r} cannot be loaded: {error}") from None
