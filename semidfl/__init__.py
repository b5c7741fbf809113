"""semidfl: clients on a graph, with no server, train a good classifier although most of their data has no labels."""

from semidfl import recipes
from semidfl.config import Config
from semidfl.errors import SemiDFLError
from semidfl.experiment import Result, resume, run
from semidfl.methods import Method

__all__ = ["Config", "Method", "Result", "SemiDFLError", "recipes", "resume", "run"]

__version__ = "0.1.0"
