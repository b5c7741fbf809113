"""The sink of `--log tensorboard`: the figures of each round as TensorBoard events, in the run folder's tensorboard/.

`tensorboard --logdir runs` then shows all runs side by side. The plain metrics.jsonl is written in any case.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from semidfl.errors import SemiDFLError

__all__ = ["TensorBoard", "check_sink", "opened"]

_CLIENTS = 20
"""lines of single clients up to this many; of more, TensorBoard would drown in them"""
_PER_CLIENT = ("accuracy", "loss", "generator_loss", "pseudo_labels", "pseudo_precision", "generated_accuracy")


class TensorBoard:
    """Writes records as scalars: the mean over the clients, and of few clients each one's."""

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # On a resume, what a killed run had written of later rounds is struck out.
        self._writer: Any = SummaryWriter(str(folder), purge_step=first)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the figures of one round."""
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        self._writer.close()


def check_sink(kind: str) -> None:
    """Refuse a sink that is not installed, before anything is written."""
    if kind == "tensorboard" and find_spec("tensorboard") is None:
        raise SemiDFLError("--log tensorboard needs tensorboard: pip install 'semidfl[tensorboard]'")


@contextmanager
def opened(kind: str, folder: Path, first: int) -> Iterator[TensorBoard | None]:
    """The sink that `compute.log` names, from round `first` on; none for "none"."""
    sink = TensorBoard(folder / "tensorboard", first) if kind == "tensorboard" else None
    try:
        yield sink
    finally:
        if sink is not None:
            sink.close()


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name in _PER_CLIENT:
        values = {i: float(x) for i, x in enumerate(record.get(name) or []) if x is not None}
        if values:
            yield f"{name}/mean", sum(values.values()) / len(values)
        if len(record.get(name) or []) <= _CLIENTS:
            yield from ((f"{name}/client-{i:02d}", x) for i, x in values.items())
    yield from ((f"seconds/{phase}", float(x)) for phase, x in record["seconds"].items())
    sent = record.get("bytes_sent") or {}
    yield from ((f"megabytes_sent/{topic}", sum(clients) / 1e6) for topic, clients in sent.items())
