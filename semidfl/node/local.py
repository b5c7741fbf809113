"""Federations made on this machine: the files of a new one, and a whole one on loopback for trying."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semidfl.errors import FederationError, Stopped
from semidfl.node import identity
from semidfl.node.federation import Federation, parse
from semidfl.record.atomic import replacing

__all__ = ["Local", "free_ports", "new_federation"]


def new_federation(
    folder: Path,
    peers: Mapping[str, tuple[str, str]],
    values: Mapping[str, object],
    sections: Mapping[str, Mapping[str, object]],
) -> Federation:
    """Writes federation.toml and identity/ with an authority and a certificate for each peer.

    peers: name -> (role, address); values: fields at the top; sections: tables below them.
    """
    path = folder / "federation.toml"
    if path.exists():
        raise FederationError(f"{path} is there already: choose another folder")
    federation, text = drafted(path, peers, values, sections)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temp:
        temp.write_text(text, encoding="utf-8")
    keys = folder / "identity"
    identity.init(keys)
    for name in peers:
        identity.issue(keys, name)
    return federation


def drafted(
    path: Path,
    peers: Mapping[str, tuple[str, str]],
    values: Mapping[str, object],
    sections: Mapping[str, Mapping[str, object]],
) -> tuple[Federation, str]:
    """A federation and the text of its file, which is not written."""
    text = _toml(values, sections, peers)
    return parse(text, path), text


def _toml(
    values: Mapping[str, object], sections: Mapping[str, Mapping[str, object]], peers: Mapping[str, tuple[str, str]]
) -> str:
    lines = ["# The same file at every peer; docs/federation.md explains each field."]
    lines += [f"{name} = {_plain(value)}" for name, value in values.items()]
    for section, table in sections.items():
        lines += ["", f"[{section}]", *(f"{_key(name)} = {_plain(value)}" for name, value in table.items())]
    for name, (role, address) in peers.items():
        lines += ["", "[[peers]]", f"name = {_plain(name)}", f"address = {_plain(address)}", f"role = {_plain(role)}"]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return json.dumps(name) if "." in name else name


def _plain(value: object) -> str:
    # JSON's text, numbers, lists and booleans are TOML's, too.
    return json.dumps(value, ensure_ascii=False)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


@dataclass
class Local:
    """Peers as processes of this machine, each with a log file beside its run folder."""

    folder: Path
    federation: Federation
    flags: Sequence[str] = ()
    """for every peer's command"""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def log_file(self, name: str) -> Path:
        return self.folder / "runs" / f"{name}.log"

    def command(self, name: str) -> list[str]:
        words = [sys.executable, "-m", "semidfl", "node", "--federation", str(self.folder / "federation.toml")]
        return [*words, "--name", name, "--folder", str(self.run_folder(name)), *self.flags]

    def start(self, name: str, command: Sequence[str] = (), prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Starts a peer, or starts it again."""
        self.log_file(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log_file(name).open("ab") as log:
            words = [*prefix, *(command or self.command(name))]
            process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_environment())
        self.processes[name] = process
        return process

    def start_all(self) -> None:
        for peer in self.federation.peers:
            self.start(peer.name)

    def wait(self, limit: float) -> dict[str, int]:
        """Exit codes of all, which must come within `limit` seconds."""
        until = time.monotonic() + limit
        for name, process in self.processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise FederationError(f"{name} has not ended within {limit:g} s; see {self.log_file(name)}") from None
        return {name: process.returncode for name, process in self.processes.items()}

    def summary(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_folder(name) / "summary.json").read_text(encoding="utf-8"))
        return found

    def end(self) -> None:
        """Ends what still runs, by its id."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _environment() -> dict[str, str]:
    # One thread each: many peers share few cores, and threads would only wait for each other.
    return os.environ | {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "INFO"}


def follow(local: Local) -> None:
    """Shows how the peers get on until all have ended."""
    said: dict[str, str] = {}
    try:
        while True:
            running = [name for name, process in local.processes.items() if process.poll() is None]
            for name in local.processes:
                line = _last_line(local.log_file(name))
                if line and said.get(name) != line:
                    said[name] = line
                    print(line, flush=True)
            if not running:
                return
            time.sleep(0.5)
    except KeyboardInterrupt:
        raise Stopped("stopped: the peers were ended; the same command goes on where they were") from None


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    told = [line for line in lines if not line.startswith("run folder")]
    return told[-1] if told else ""
