"""A federation of real processes gives what the simulator gives, and a peer's data and files are what it says."""

from pathlib import Path

import pytest
from federations import SHORT, Live, digits, live
from small import TINY

import semidfl
from semidfl.config import override
from semidfl.record.checkpoint import load_model

FULL: dict[str, object] = {
    path: value for path, value in TINY.items() if not path.startswith(("graph.", "name", "data.dataset", "compute."))
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits(tmp_path_factory.mktemp("data"))


def simulated(made: Live, folder: Path) -> Path:
    """The same config in memory, all clients in one process."""
    config = override(made.federation.config, {"compute.threads": 1, "compute.device": "cpu"})
    return semidfl.run(config, folder).folder


def distances(made: Live, folder: Path) -> dict[str, float]:
    """The largest difference of each peer's final weights from those of the simulation."""
    found = {}
    for peer in made.federation.peers:
        for part in ("classifier", "generator"):
            for client in made.federation.clients_of(peer.name):
                file = f"models/{part}-{client:04d}.safetensors"
                if not (folder / file).exists():
                    continue
                ours, theirs = (load_model(place / file)[0] for place in (made.run_folder(peer.name), folder))
                assert ours.keys() == theirs.keys()
                gap = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
                found[f"{peer.name} {part} {client}"] = gap
    return found


ROLES = {f"p{k}": role for k, role in enumerate("LLMMUUUUUU")}


@pytest.mark.parametrize("deterministic", [True, False])
def test_ten_peers_end_with_the_weights_of_the_simulation(deterministic: bool, data: Path, tmp_path: Path) -> None:
    config = FULL | {"compute.deterministic": deterministic, "pseudo.align": True, "aggregation.momentum": True}
    patient = SHORT | {"round": 60.0, "hello": 60.0, "transfer": 30.0, "linger": 30.0}
    with live(tmp_path / "f", data, ROLES, config, topology="fig1", deadlines=patient) as made:
        made.start_all()
        whole = simulated(made, tmp_path / "whole")
        made.ends(*ROLES, limit=120.0)
        gaps = distances(made, whole)
        assert len(gaps) == 20
        assert max(gaps.values()) <= (0.0 if deterministic else 1e-4), gaps
        for name in ROLES:
            records = made.records(name)
            assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
            assert not any(record["missing"] or record["stale"] or record["refused"] for record in records)
