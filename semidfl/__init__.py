"""semidfl: clients on a graph, with no server, train a good classifier although most of their data has no labels."""

import os

# Threads that spin while they wait take the cores from each other: on a busy machine that costs a factor of three.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

from semidfl import recipes
from semidfl.config import Config
from semidfl.errors import SemiDFLError
from semidfl.experiment import Result, resume, run
from semidfl.methods import Method

__all__ = ["Config", "Method", "Result", "SemiDFLError", "recipes", "resume", "run"]

__version__ = "0.1.0"
