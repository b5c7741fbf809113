"""The commands of real peers: identity, federation, node, local-federation, audit."""

import sys
from collections.abc import Sequence
from pathlib import Path

from semidfl.commands.words import as_json, parsed
from semidfl.errors import ConfigError, FederationError, nearest

__all__ = ["audit", "federation", "identity", "local_federation", "node"]

IDENTITY = """usage: semidfl identity COMMAND … [--folder identity]

  init                             make the federation's authority; its key stays with whoever runs the federation
  issue NAME [--days 365]          make a key and certificate for a peer
  issue NAME --request FILE        sign the request of a peer that has made its key by itself
  request NAME                     at a peer: make a key, which never leaves, and NAME.csr for the authority
  show [FILE …] [--format json]    fingerprints and expiry

A peer needs authority.crt, NAME.crt and NAME.key. A name or fingerprint in denied.txt is refused from then on."""

FEDERATION = """usage: semidfl federation new FOLDER --peers NAME=ROLE[@HOST:PORT],… [--option value …]

Writes FOLDER/federation.toml and FOLDER/identity with a certificate for each peer. Roles: L (all samples have labels),
M (some), U (none). Without an address: 127.0.0.1 and a free port.

  --dataset NAME       the peers share out a data set, for trying; else each has its own data, and these are needed:
  --classes A,B,…      the names of the classes, in the order of their numbers
  --image CxHxW        channels, height and width, as in 1x28x28
  --topology ring      or full, star, line, …
  --recipe tuned       or paper, demo
  --FIELD value        any field of a run, as in `semidfl run --help`"""

NODE = """usage: semidfl node --federation FILE --name NAME [--data PATH] [--option value …]

Runs a peer: waits for its neighbours, trains with them, ends with its model. The same command again goes on where it
was stopped or killed.

  --data PATH          this peer's samples: a folder of images (docs/own-data.md), or an .npz with x_train, y_train
                       (-1: no label; left out at role U), x_test and y_test (if any)
  --identity FOLDER    with authority.crt, NAME.crt and NAME.key; default: identity/ beside the federation file
  --folder FOLDER      run folder; default: runs/FEDERATION-NAME
  --overwrite          start anew
  --insecure           without certificates and encryption: for trying, never for private data
  --compute.FIELD v    device, threads, … of this machine"""

LOCAL = """usage: semidfl local-federation [--peers 5] [--folder runs/local-federation] [--option value …]

Starts a whole federation on this machine, each peer a process with its own certificate.

  --dataset digits     shared out over the peers
  --topology ring      or full, star, line, …
  --recipe tuned       or paper, demo
  --overwrite          replace an earlier one in the same folder; else it goes on
  --FIELD value        any field of a run, as in `semidfl run --help`"""


def identity(words: list[str]) -> int:
    from semidfl.node import identity as made

    words, options = _options(words, IDENTITY, {"folder", "days", "request", "format"})
    folder = Path(options.get("folder", "identity"))
    match words:
        case ["init"]:
            print(_line(made.init(folder)))
        case ["issue", name]:
            csr = Path(options["request"]) if "request" in options else None
            days = _number("days", options.get("days", "365"))
            if not 0 < days <= made.AUTHORITY_DAYS:
                most = f"{made.AUTHORITY_DAYS}, as the authority"
                raise ConfigError(f"--days = {days:g} is not legal: more than 0, and at most {most}")
            print(_line(made.issue(folder, name, days, csr)))
        case ["request", name]:
            print(f"to be signed by the authority: {made.request(folder, name)}")
        case ["show", *files]:
            paths = [Path(file) for file in files] or sorted(folder.glob("*.crt"))
            if not paths:
                raise ConfigError(f"{folder} holds no certificates")
            found = [made.Certificate.read(path) for path in paths]
            print(as_json(found) if _format(options) == "json" else "\n".join(map(_line, found)))
        case _:
            raise ConfigError(IDENTITY)
    return 0


def _line(certificate: object) -> str:
    from semidfl.node.identity import Certificate

    assert isinstance(certificate, Certificate)
    left = certificate.days_left
    until = (
        f"until {certificate.ends:%Y-%m-%d} ({left:.0f} days)" if left > 0 else f"EXPIRED {certificate.ends:%Y-%m-%d}"
    )
    return f"{certificate.name:20} {until:32} sha256 {certificate.fingerprint}"


def federation(words: list[str]) -> int:
    from semidfl.node.local import free_ports, new_federation

    if any(word in ("-h", "--help") for word in words):
        print(FEDERATION)
        return 0
    if words[:1] != ["new"] or len(words) < 2 or words[1].startswith("-"):
        raise ConfigError(FEDERATION)
    folder = Path(words[1])
    _, options = _options(words[2:], FEDERATION, None)
    if "peers" not in options:
        raise ConfigError("--peers is missing: --peers north=L,south=M@10.0.0.2:7443,west=U")
    peers: dict[str, tuple[str, str]] = {}
    parts = options.pop("peers").split(",")
    for part, port in zip(parts, free_ports(len(parts)), strict=True):
        name, _, rest = part.partition("=")
        role, _, address = rest.partition("@")
        if name in peers:
            raise ConfigError(f"--peers names {name!r} twice")
        peers[name] = (role or "M", address or f"127.0.0.1:{port}")
    values, sections = _top(options, folder.name)
    made = new_federation(folder, peers, values, sections)
    print(f"written: {folder / 'federation.toml'} ({len(made.peers)} peers, {len(made.graph.edges())} edges)")
    print(f"written: {folder / 'identity'} (give each peer authority.crt and its own two files; keep authority.key)")
    data = "" if made.dataset else " --data PATH"
    print(f"at each peer: semidfl node --federation {folder / 'federation.toml'} --name NAME{data}")
    return 0


def _top(options: dict[str, str], name: str) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Options of a new federation as fields and tables of its file."""
    from semidfl.config import Config, full_path, leaves, override

    values: dict[str, object] = {"name": name or "federation", "recipe": options.pop("recipe", "tuned")}
    values |= {key: options.pop(key) for key in ("dataset", "topology") if key in options}
    values["seed"] = int(_number("seed", options.pop("seed", "0")))
    sections: dict[str, dict[str, object]] = {}
    if "dataset" not in values:
        if "classes" not in options or "image" not in options:
            raise ConfigError(
                "needed: --dataset NAME, or, where each has its own data, --classes A,B,… and --image CxHxW"
            )
        shape = options.pop("image").split("x")
        if len(shape) != 3 or not all(part.isdigit() for part in shape):
            raise ConfigError("--image must be channels, height and width, as in 1x28x28")
        classes = options.pop("classes").split(",")
        sections["images"] = {
            "classes": classes,
            **dict(zip(("channels", "height", "width"), map(int, shape), strict=True)),
        }
    for section in ("deadlines", "faults"):
        names = [key for key in options if key.startswith(f"{section}.")]
        if names:
            sections[section] = {key.partition(".")[2]: _typed(_number(key, options.pop(key))) for key in names}
    typed = dict(leaves(override(Config(), options)))
    if options:
        sections["config"] = {full_path(key): typed[full_path(key)] for key in options}
    return values, sections


def _typed(number: float) -> float | int:
    return int(number) if number == int(number) else number


def node(words: list[str]) -> int:
    _, options = _options(words, NODE, None, ("overwrite", "insecure"))
    for needed in ("federation", "name"):
        if needed not in options:
            raise ConfigError(f"--{needed} is missing; `semidfl node --help` says what a peer needs")
    from semidfl.exchange.refuse import Refusal, Refused, Tally
    from semidfl.node.federation import read
    from semidfl.node.files import allow_many_files
    from semidfl.node.log import Tap, make_log
    from semidfl.node.peer import Place, run_peer

    allow_many_files()
    path, name, insecure = Path(options.pop("federation")), options.pop("name"), "insecure" in options
    options.pop("insecure", None)
    made = read(path)
    keys = Path(options.pop("identity", path.parent / "identity"))
    folder = Path(options.pop("folder", Path("runs") / f"{made.name}-{name}"))
    data = Path(options.pop("data")) if "data" in options else None
    overwrite = options.pop("overwrite", "") != ""
    place = Place(folder, None if insecure else keys, data, options, overwrite)
    tallies: list[Tally] = []

    def refuse(words: str) -> None:
        for tally in tallies:
            tally.note("a caller", Refused(Refusal.CERTIFICATE, words))

    with Tap(refuse) as tap:
        log = make_log(name, not insecure, tap.real)
        if insecure:
            log.warning("neither certificates nor encryption: anybody on the network can read and forge")
        summary = run_peer(made, name, place, log, tallies.append)
    print(f"run folder: {folder}")
    return 0 if summary else 1


def local_federation(words: list[str]) -> int:
    import shutil

    from semidfl.node.federation import read
    from semidfl.node.local import Local, drafted, follow, free_ports, new_federation

    _, options = _options(words, LOCAL, None, ("overwrite",))
    folder, overwrite = Path(options.pop("folder", "runs/local-federation")), bool(options.pop("overwrite", ""))
    file, asked = folder / "federation.toml", bool(options)
    count = int(_number("peers", options.pop("peers", "5")))
    if not 2 <= count <= 100:
        raise ConfigError(f"--peers = {count} is not legal: 2 to 100")
    peers = {
        f"peer-{k:02d}": (role, f"127.0.0.1:{port}")
        for k, (role, port) in enumerate(zip(_roles(count), free_ports(count), strict=True))
    }
    values, sections = _top({"dataset": "digits", "deadlines.linger": "10"} | options, folder.name)
    if file.exists() and not overwrite:
        made = read(file)
        if asked and (apart := made.apart(drafted(file, peers, values, sections)[0])):
            raise ConfigError(
                f"{folder} was made with other options ({', '.join(apart)}): give none to go on with it, "
                "or --overwrite to start anew"
            )
        print(f"goes on with {folder} (--overwrite starts anew)")
    else:
        drafted(file, peers, values, sections)  # what is not legal is refused before anything is removed
        if file.exists():
            for part in ("runs", "identity"):
                shutil.rmtree(folder / part, ignore_errors=True)
            file.unlink()
        made = new_federation(folder, peers, values, sections)
    with Local(folder, made, ("--compute.threads", "1")) as local:
        local.start_all()
        follow(local)
        codes = local.wait(1.0)
        if bad := [name for name, code in codes.items() if code]:
            raise FederationError(f"{', '.join(bad)} did not end well: see {local.log_file(bad[0])}")
        print()
        for name in codes:
            s = local.summary(name)
            held = s["held_out_accuracy"]
            score = f"{100 * sum(held) / len(held):6.2f} %" if held else "  (no held-out labels)"
            sent = f"{s['bytes_sent'] / 1e6:8.2f} MB sent"
            print(f"{name}  role {made.member(name).role}  {score}  {sent}  {s['seconds']:6.1f} s")
    print(f"federation: {folder}")
    return 0


def _roles(count: int) -> str:
    from semidfl.topology import _default_roles

    return _default_roles(count)


def audit(words: list[str]) -> int:
    from semidfl.node.audit import sum_up

    (folder,), given = parsed(words, "semidfl audit DIR [--format text|json]", 1, formats=("text", "json"))
    found = sum_up(Path(folder))
    if given["format"] == "json":
        rows = [
            {"peer": peer, "topic": topic, "times": count, "bytes": found.sizes[peer, topic]}
            | {"tensors": sorted(found.tensors.get(topic, ()))}
            for (peer, topic), count in sorted(found.messages.items())
        ]
        span = {"lines": found.lines, "first": found.first, "last": found.last, "end": found.end}
        print(as_json(span | {"sent": rows, "broken": found.broken}))
        return int(bool(found.broken))
    print(f"{found.lines} lines from {found.first} to {found.last}")
    for (peer, topic), count in sorted(found.messages.items()):
        names = ", ".join(sorted(found.tensors.get(topic, ()))) or "no tensors"
        print(f"  to {peer:16} {topic:12} {count:7} times {found.sizes[peer, topic]:14,} bytes  {names}")
    print(f"  in all {sum(found.sizes.values()):,} bytes")
    if found.broken:
        some = ", ".join(map(str, found.broken[:10]))
        print(f"  CHANGED OR DAMAGED: lines {some} do not follow from the ones before", file=sys.stderr)
        return 1
    print("  every line follows from the one before: nothing before the last was taken out or changed")
    print(f"  whether the last was changed, or more followed, its hash shows to who has noted it: {found.end}")
    return 0


def _format(options: dict[str, str]) -> str:
    form = options.get("format", "text")
    if form not in ("text", "json"):
        raise ConfigError(f"--format {form} is not legal: text or json")
    return form


# --- words ------------------------------------------------------------------------------------------------------------


def _options(
    words: Sequence[str], usage: str, known: set[str] | None, switches: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Plain words, and --name value or --name=value; switches stand alone. `known` None: any name."""
    if (not words and known is not None) or any(word in ("-h", "--help") for word in words):
        print(usage)
        raise SystemExit(0)
    plain: list[str] = []
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if known is not None and name not in known:
            raise ConfigError(f"there is no option --{name}{nearest(name, known)}")
        if name in switches:
            found[name] = "on"
            continue
        found[name] = value if equals else next(rest, "")
        if not found[name]:
            raise ConfigError(f"--{name} needs a value")
    return plain, found


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name} = {text!r} is not legal: it must be a number") from None
