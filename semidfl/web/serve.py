"""`semidfl watch`: what was asked for, the address to bind, the server."""

import secrets
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from semidfl.errors import ConfigError, SemiDFLError
from semidfl.record.history import find_runs
from semidfl.web.guard import Guard, is_loopback

__all__ = ["Options", "options_of", "watch"]

USAGE = "usage: semidfl watch RUN_OR_FOLDER … [--port N] [--host ADDRESS]"
PORT = 8470


@dataclass(frozen=True)
class Options:
    """Of `semidfl watch`."""

    places: tuple[str, ...] = ("runs",)
    """run folders, and folders of run folders"""
    host: str = "127.0.0.1"
    """address to bind; any but this machine's own asks every visitor for a token"""
    port: int = PORT
    """0: any that is free"""


def options_of(places: Sequence[str], flags: dict[str, str]) -> Options:
    """The command line's words, checked."""
    if unknown := set(flags) - {"port", "host"}:
        raise ConfigError(f"watch has no option --{sorted(unknown)[0]}; {USAGE}")
    port = flags.get("port", str(PORT))
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--port {port} is not legal: 0 (any free one) to 65535")
    return Options(tuple(places) or ("runs",), flags.get("host", "127.0.0.1"), int(port))


def watch(options: Options) -> int:
    """Serves the page until Ctrl-C."""
    if find_spec("nicegui") is None:
        raise SemiDFLError("the page needs nicegui: pip install 'semidfl[web]'")
    if options.places == ("runs",) and not Path("runs").is_dir():
        raise SemiDFLError("there is no folder runs here: start a run with `semidfl demo`, or name a run folder")
    if not find_runs(options.places):
        raise SemiDFLError(
            f"there is no run in {', '.join(options.places)}: start one with `semidfl demo`, or name a run folder"
        )
    with bound(options.host, options.port) as listening:
        # Only now: loading the server takes a second, and a mistake should be told at once.
        from semidfl.web.page import application

        token = "" if is_loopback(options.host) else secrets.token_urlsafe(24)
        app = application(options.places, far=bool(token))
        _announce(options, listening.getsockname()[1], token)
        _serve(Guard(app, token), listening)
    return 0


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens, or one line on why not."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise ConfigError(f"--host {host} is no address of this machine: 127.0.0.1, or 0.0.0.0 for all") from None
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise SemiDFLError(
            f"cannot listen on {host} port {port} ({reason[:1].lower()}{reason[1:]}): choose another --port, "
            "or --port 0 for any that is free"
        ) from None
    return listening


def _announce(options: Options, port: int, token: str) -> None:
    name = f"[{options.host}]" if ":" in options.host else options.host
    if name in ("0.0.0.0", "[::]"):  # noqa: S104  compared with, not bound
        name = socket.gethostname()
    print(
        f"watching {', '.join(options.places)}: http://{name}:{port}/{'?token=' + token if token else ''}", flush=True
    )
    if token:
        print("whoever has this address sees the runs; without TLS, so can who listens on the way", flush=True)
    print("Ctrl-C ends it; the runs go on", flush=True)


def _serve(guard: Guard, listening: socket.socket) -> None:
    import uvicorn

    # NiceGUI looks through all objects for its server, and trips over an old name in torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module="nicegui")
    config = uvicorn.Config(guard, log_level="warning", access_log=False, lifespan="on", ws_max_size=2**22)
    uvicorn.Server(config).run(sockets=[listening])
