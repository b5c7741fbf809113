"""semidfl: clients on a graph, with no server, train a good classifier although most of their data has no labels."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# Threads that spin while they wait take the cores from each other: on a busy machine that costs a factor of three.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

from semidfl import recipes
from semidfl.config import Config
from semidfl.errors import SemiDFLError

if TYPE_CHECKING:
    from semidfl.experiment import Result, resume, run
    from semidfl.methods import Method

__all__ = ["Config", "Method", "Result", "SemiDFLError", "recipes", "resume", "run"]

__version__ = "0.1.0"

_HEAVY = {"Method": "methods", "Result": "experiment", "resume": "experiment", "run": "experiment"}
"""what loads torch, and the module it comes from: `semidfl --help` should not take two seconds"""


if not TYPE_CHECKING:  # for a checker of types the imports above say it all

    def __getattr__(name: str) -> object:
        if name not in _HEAVY:
            raise AttributeError(f"module 'semidfl' has no attribute {name!r}")
        return getattr(import_module(f"semidfl.{_HEAVY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HEAVY})
