"""A finished run's networks, ready to use: the mean over the clients or one client's, without the data at hand.

Every file in models/ says in its metadata what images the network takes and what its classes are called.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from semidfl.config import Config, from_toml
from semidfl.data.shards import Space
from semidfl.errors import CheckpointError, RunFolderError
from semidfl.learn.classifier import probabilities
from semidfl.learn.generator import Generator
from semidfl.models.stacked import Network
from semidfl.record.checkpoint import load_model
from semidfl.record.version import refuse_other_version, space_of
from semidfl.setup import build_classifier, build_generator

__all__ = ["Trained", "load_classifier", "load_generator"]

_PASS = 256
_ANEW = "use that version, or run it anew"


@dataclass(frozen=True)
class Trained:
    """One network of a run with its weights."""

    folder: Path
    config: Config
    space: Space
    params: Tensor  # (1, D)
    clients: tuple[int, ...]
    """whose weights these are: the mean over all, or one"""

    @property
    def device(self) -> torch.device:
        return self.params.device

    @property
    def classifier(self) -> Network:
        return build_classifier(self.config, self.space, self.device)

    @property
    def generator(self) -> Generator:
        return build_generator(self.config, self.space, self.device)

    @property
    def whose(self) -> str:
        """In words."""
        return f"client {self.clients[0]}" if len(self.clients) == 1 else f"mean of {len(self.clients)} clients"

    def predict(self, images: Tensor) -> Tensor:
        """uint8 (n, ch, H, W) in the network's size -> probabilities (n, K)."""
        return probabilities(self.classifier, self.space, self.params, images[None].to(self.device), _PASS)[0]


def load_classifier(run: Path, client: int | None = None, device: torch.device | None = None) -> Trained:
    """The classifier of a run: of one client, or the mean over all."""
    return _load(run, "classifier", client, device or torch.device("cpu"))


def load_generator(run: Path, client: int | None = None, device: torch.device | None = None) -> Trained:
    """The same of the model that generates images."""
    return _load(run, "generator", client, device or torch.device("cpu"))


def _load(run: Path, part: str, client: int | None, device: torch.device) -> Trained:
    config, files = _config(run), _files(run, part)
    # Whatever the run computed in: a prediction must not depend on the machine it is made on.
    config = replace(config, compute=replace(config.compute, precision="fp32"))
    if client is not None and client not in files:
        raise RunFolderError(f"{run} has no client {client}: they are {min(files)} to {max(files)}")
    chosen = [client] if client is not None else sorted(files)
    space = _space(files[chosen[0]])
    network = (build_classifier if part == "classifier" else build_generator)(config, space, device)
    expected = {name: tuple(x.shape[1:]) for name, x in network.named(torch.empty(1, network.size)).items()}
    # A running sum in double: with a hundred clients the order would else show.
    total = torch.zeros(network.size, dtype=torch.float64)
    for one in chosen:
        total += network.row(_tensors(files[one], expected)).double()
    if not total.isfinite().all():
        raise RunFolderError(f"the {part} of {run} came apart in training: not all of its numbers are finite")
    return Trained(run, config, space, (total / len(chosen)).float()[None].to(device), tuple(chosen))


def _config(run: Path) -> Config:
    if not run.is_dir():
        raise RunFolderError(f"there is no run folder {run}: `ls runs` shows those here, `semidfl run` makes one")
    try:
        return from_toml((run / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{run} is not a run folder: config.toml is missing; name one such as runs/NAME") from None
    except OSError as error:
        raise RunFolderError(f"{run}/config.toml cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RunFolderError(f"{run}/config.toml is not text: it is damaged") from None


def _files(run: Path, part: str) -> dict[int, Path]:
    found = {int(p.stem.rpartition("-")[2]): p for p in sorted((run / "models").glob(f"{part}-[0-9]*.safetensors"))}
    if found:
        return found
    if part == "generator" and any((run / "models").glob("classifier-*.safetensors")):
        raise RunFolderError(f"{run} has no generator: its method or generator.kind = 'none' trains none")
    how = f"`semidfl resume {run}`; a peer: its `semidfl node …` again"
    raise RunFolderError(f"{run} has no trained models yet: end the run first ({how})")


def _space(path: Path) -> Space:
    _, meta = load_model(path)
    refuse_other_version(path, meta, _ANEW)
    return space_of(meta)


def _tensors(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The weights by their names."""
    tensors, meta = load_model(path)
    refuse_other_version(path, meta, _ANEW)
    if {name: tuple(x.shape) for name, x in tensors.items()} != expected:
        raise CheckpointError(f"{path} holds another network than config.toml describes: it belongs to another run")
    return tensors
