"""A network that is really cut in two: namespaces, joined by a wire that goes down and comes up again."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import QUICK, SHORT, Live, digits, live

HALVES = {"a": "10.83.7.1", "b": "10.83.7.1", "c": "10.83.7.2", "d": "10.83.7.2"}
ROUNDS = 35


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with an address each, on the two ends of a wire."""
    names = f"semidfl-{os.getpid()}-0", f"semidfl-{os.getpid()}-1"
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a real cut needs root and `ip netns`")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        for k, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.83.7.{k + 1}/24", "dev", f"wire{k}")
            for device in ("lo", f"wire{k}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def missing(made: Live, name: str, t: int) -> set[str]:
    return set(next(record for record in made.records(name) if record["round"] == t)["missing"])


def test_both_halves_train_on_and_merge(spaces: tuple[str, str], tmp_path: Path) -> None:
    """a and b on one side, c and d on the other; all are neighbours of all."""
    data = digits(tmp_path)
    addresses = {name: f"{host}:{7440 + k}" for k, (name, host) in enumerate(HALVES.items())}
    roles = dict(zip(HALVES, "LMMU", strict=True))
    deadlines = SHORT | {"round": 0.6, "transfer": 1.0, "hello": 20.0, "linger": 5.0}
    config = QUICK | {"rounds": ROUNDS}
    with live(tmp_path / "f", data, roles, config, deadlines=deadlines, addresses=addresses) as made:
        for name, host in HALVES.items():
            made.start(name, fault="slowly", namespace=spaces[int(host[-1]) - 1])
        made.wait_for_round("a", 4)
        ip("-n", spaces[0], "link", "set", "wire0", "down")
        cut = max(made.records(name)[-1]["round"] for name in HALVES)
        for name in HALVES:
            made.wait_for_round(name, cut + 5)
        assert missing(made, "a", cut + 4) == {"c", "d"}
        assert missing(made, "d", cut + 4) == {"a", "b"}
        ip("-n", spaces[0], "link", "set", "wire0", "up")
        made.ends(*HALVES, limit=60.0)
        for name in HALVES:
            records = made.records(name)
            assert records[-1]["round"] == ROUNDS
            assert not records[-1]["missing"], made.log(name)
            assert not set(records[-1]["refused"]) - {"slow"}
        # One federation again: after mixing with all the others, nobody is far from anybody.
        models = [made.model(name) for name in HALVES]
        for name, x in models[0].items():
            spread = max(float((other[name] - x).abs().max()) for other in models[1:])
            assert spread < 1e-4 * (1 + float(x.abs().max())), name
