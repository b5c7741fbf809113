"""What only real peers need: grpcio, msgspec and cryptography, imported where they are used."""

from importlib import import_module
from typing import Any

from semidfl.errors import SemiDFLError

__all__ = ["need"]


def need(module: str) -> Any:
    """The module, or an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise SemiDFLError(f"{name} is needed for peers ({error}): pip install 'semidfl[net]'") from None
