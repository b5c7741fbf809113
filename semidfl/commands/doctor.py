"""`semidfl doctor`: is everything there that a run needs?"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from semidfl.commands.words import as_json, parsed, table, whole_number

if TYPE_CHECKING:
    from semidfl.doctor import Finding

__all__ = ["doctor"]

_USAGE = "semidfl doctor [--port N] [--identity FOLDER] [--federation FILE] [--name PEER] [--format text|json]"


def doctor(words: list[str]) -> int:
    _, given = parsed(words, _USAGE, 0, ("port", "identity", "federation", "name"), ("text", "json"))
    found = list(_findings(given))
    if given["format"] == "json":
        print(as_json(found))
    else:
        print(table(("", "", ""), [(f.state, f.what, f.text) for f in found]).lstrip("\n"))
        hints = [f"{f.what}: {f.advice}" for f in found if f.advice]
        print("\n".join(["", "what to do:", *(f"- {hint}" for hint in hints)]) if hints else "\nall is well")
    return 2 if any(f.state == "bad" for f in found) else 0


def _findings(given: dict[str, str]) -> "Iterator[Finding]":
    from semidfl.doctor import look_at_certificates, look_at_machine, look_at_neighbours, look_at_port

    yield from look_at_machine(Path("runs"))
    if "port" in given:
        yield look_at_port(whole_number(given, "port", 0, least=1))
    identity = Path(given["identity"]).expanduser() if "identity" in given else None
    if identity is not None:
        yield from look_at_certificates(identity)
    if "federation" in given:
        yield from look_at_neighbours(Path(given["federation"]).expanduser(), given.get("name", ""), identity)
