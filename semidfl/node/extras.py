"""What only real peers need: grpcio, msgspec and cryptography, imported where they are used."""

from importlib import import_module
from typing import Any

from semidfl.errors import SemiDFLError

__all__ = ["need", "need_all"]


def need(module: str) -> Any:
    """The module, or an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise SemiDFLError(f"{name} is needed for peers ({error}): pip install 'semidfl[net]'") from None


def need_all() -> None:
    """All of them, before a command begins."""
    for module in ("grpc", "msgspec", "cryptography"):
        need(module)
