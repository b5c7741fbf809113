"""The words of a command line: what stands first, and --name value after it."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from semidfl.errors import ConfigError, nearest

__all__ = ["as_json", "flags", "parsed", "table", "whole_number"]


def flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every --name value, or --name=value, in their order; dashes within a name count as underscores."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} stands where a --field is expected")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = next(rest, "")
            if not value:
                raise ConfigError(f"--{name} needs a value")
        yield name.replace("-", "_"), value


def parsed(
    words: Sequence[str], usage: str, places: int, options: Collection[str] = (), formats: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """What stands before the first flag, `places` words, and the flags; all others are refused with the usage."""
    first = next((k for k, word in enumerate(words) if word.startswith("--")), len(words))
    given = dict(flags(words[first:]))
    legal = [*options, *(["format"] if formats else [])]
    if unknown := [name for name in given if name not in legal]:
        raise ConfigError(f"there is no option --{unknown[0]}{nearest(unknown[0], legal)}; usage: {usage}")
    if first != places:
        raise ConfigError(f"usage: {usage}")
    if formats and given.setdefault("format", formats[0]) not in formats:
        wrong = given["format"]
        raise ConfigError(f"--format {wrong} is not legal: one of {', '.join(formats)}{nearest(wrong, formats)}")
    return list(words[:first]), given


def whole_number(given: dict[str, str], name: str, default: int, least: int = 0) -> int:
    """The whole number of an option."""
    text = given.get(name, str(default))
    if not text.isdecimal() or not least <= int(text) < 2**63:
        raise ConfigError(f"--{name} {text} is not legal: it must be a whole number from {least}, below 2^63")
    return int(text)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """Columns as wide as their widest cell; `right` are those of numbers."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def as_json(value: Any) -> str:
    """A dataclass, or a list of them, for another program."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.tolist() if hasattr(value, "tolist") else value.as_posix() if isinstance(value, Path) else str(value)
