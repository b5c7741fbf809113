"""What a nest of dataclasses can be asked: its fields, their types, the help line under each, and all of it as TOML."""

import ast
import inspect
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["helps_of", "kinds_of", "leaves", "to_toml"]


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config with its dotted path, in the order of definition."""
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


def kinds_of(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The type of every field, by dotted path."""
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from kinds_of(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def helps_of(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The docstring under every field, on one line, by dotted path."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for line, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[line.target.id] = " ".join(str(below.value.value).split())
    hints = get_type_hints(cls)
    for f in fields(cls):
        if is_dataclass(hints[f.name]):
            yield from helps_of(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", texts.get(f.name, "")


def to_toml(config: Any, without: Collection[str] = ()) -> str:
    """As TOML, without the fields of these dotted paths; `from_toml` in config.py gives back an equal one."""
    lines: list[str] = []
    section = ""
    for path, value in leaves(config):
        head, _, name = path.rpartition(".")
        if path in without:
            continue
        if head != section:
            lines += ["", f"[{head}]"]
            section = head
        lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
