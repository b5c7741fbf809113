"""A cohort: the clients that one process hosts, stacked on axis 0 of every tensor.

A simulation is one cohort of all clients, an actor of a cluster hosts a block of them, a real peer a
cohort of one. `each` is the one place where a cohort is worked on whole, in chunks or client by client.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from semidfl.data.shards import Rows, Shards
from semidfl.draws import Draws
from semidfl.errors import CheckpointError

__all__ = ["Cohort", "Learner", "Synthetic", "each", "take"]

T = TypeVar("T")


@dataclass
class Learner:
    """A network's weights at every client, the optimiser's state, and a moving average if one is kept."""

    params: Tensor  # (C, D)
    optimiser: dict[str, Tensor]  # (C, …)
    average: Tensor | None = None  # (C, D)

    @property
    def best(self) -> Tensor:
        """The weights to label or to sample with."""
        return self.params if self.average is None else self.average

    def follow(self, decay: float) -> None:
        """The average follows the mixed weights."""
        if self.average is not None:
            self.average = decay * self.average + (1 - decay) * self.params

    def rows(self, rows: Rows) -> "Learner":
        average = None if self.average is None else take(self.average, rows)
        return Learner(take(self.params, rows), take(self.optimiser, rows), average)


@dataclass(frozen=True)
class Synthetic:
    """D_i: what each client generated last."""

    images: Tensor  # (C, n, ch, H, W) uint8, for training
    labels: Tensor  # (C, n)
    kept: Tensor  # (C, n) bool
    check_images: Tensor  # (C, v, ch, H, W) uint8, for judging the classifier
    check_labels: Tensor  # (C, v)

    def rows(self, rows: Rows) -> "Synthetic":
        return Synthetic(*(take(x, rows) for x in vars(self).values()))


@dataclass
class Cohort:
    """All that its clients own. What is here, and nothing else, makes a checkpoint."""

    ids: tuple[int, ...]
    draws: Draws
    shards: Shards
    classifier: Learner
    generator: Learner | None = None
    synthetic: Synthetic | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)  # (C, …), what a method keeps from round to round

    @contextmanager
    def looking_at(self, t: int, most: int) -> Iterator[None]:
        """Inside, clients have at most so many of their unlabelled samples, others in every round; 0: all."""
        whole = self.shards
        if most:
            self.shards = replace(whole, unlabelled=whole.unlabelled.some(t, self.draws, most))
        try:
            yield
        finally:
            self.shards = whole

    def state(self) -> dict[str, Tensor]:
        """Every tensor that changes over the rounds, by name, and the print of the data, which must not."""
        tensors = {f"memory.{name}": x for name, x in self.memory.items()}
        if self.shards.prints is not None:
            tensors["data"] = self.shards.prints
        for part in ("classifier", "generator"):
            learner: Learner | None = getattr(self, part)
            if learner is not None:
                tensors[f"{part}.params"] = learner.params
                tensors |= {f"{part}.optimiser.{name}": x for name, x in learner.optimiser.items()}
                if learner.average is not None:
                    tensors[f"{part}.average"] = learner.average
        if self.synthetic is not None:
            tensors |= {f"synthetic.{name}": x for name, x in vars(self.synthetic).items()}
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up the state that `state` gave, on this cohort's device."""
        device = self.draws.keys.device
        self._refuse_other_data(tensors.get("data"))
        try:
            for part in ("classifier", "generator"):
                learner: Learner | None = getattr(self, part)
                if learner is not None:
                    learner.params = _like(learner.params, tensors[f"{part}.params"])
                    learner.optimiser = {
                        name: _like(x, tensors[f"{part}.optimiser.{name}"]) for name, x in learner.optimiser.items()
                    }
                    if learner.average is not None:
                        learner.average = _like(learner.average, tensors[f"{part}.average"])
        except KeyError as error:
            raise CheckpointError(f"the checkpoint lacks {error}: it belongs to a run with another config") from None
        drawn = {k.removeprefix("synthetic."): x.to(device) for k, x in tensors.items() if k.startswith("synthetic.")}
        self.synthetic = Synthetic(**drawn) if drawn else None
        self.memory = {k.removeprefix("memory."): x.to(device) for k, x in tensors.items() if k.startswith("memory.")}

    def _refuse_other_data(self, saved: Tensor | None) -> None:
        """Test images could by now be ones that the run has trained on. Older checkpoints do not know."""
        now = self.shards.prints
        if saved is None or now is None or torch.equal(saved, now):
            return
        other = [str(i) for i, same in zip(self.ids, (saved == now).tolist(), strict=True) if not same]
        who = f"client{'s' * (len(other) > 1)} {', '.join(other[:8])}{', …' if len(other) > 8 else ''}"
        raise CheckpointError(
            f"the data is not what this run began with ({who}: other images or labels to train on, or to test on): "
            "put it back, or pass --overwrite to start anew"
        )


def _like(now: Tensor, saved: Tensor) -> Tensor:
    if now.shape != saved.shape:
        raise CheckpointError(
            f"the checkpoint holds weights of shape {tuple(saved.shape)} where this run has {tuple(now.shape)}: "
            "it belongs to a run with another config"
        )
    return saved.to(now.device, now.dtype)


@runtime_checkable
class _HasRows(Protocol):
    def rows(self, rows: Rows) -> Any: ...


def take(x: Any, rows: Rows) -> Any:
    """Some clients of anything that carries the client axis first.

    Tensors are copied, so that a client's weights lie at the same alignment alone and in company:
    matrix libraries choose their kernels, and so the last bits, by it.
    """
    if isinstance(x, Tensor):
        return x[rows].clone()
    if isinstance(x, dict):
        return type(x)({name: take(value, rows) for name, value in x.items()})
    return x.rows(rows) if isinstance(x, _HasRows) else x


def each(work: Callable[..., T], size: int, *args: Any) -> T:
    """work(*args) on chunks of `size` clients, the results joined; 1 is a loop, all is one stacked call."""
    clients = next(len(x) for x in args if isinstance(x, Sized))
    if size >= clients:
        return _side_by_side([lambda: work(*args)], clients)[0]
    chunks = [slice(i, i + size) for i in range(0, clients, size)]
    calls = [lambda rows=rows: work(*(take(x, rows) for x in args)) for rows in chunks]
    return cast(T, _joined(_side_by_side(calls, clients)))


def _side_by_side(calls: Sequence[Callable[[], T]], clients: int) -> list[T]:
    """On a CPU all at once, each on one of the threads that torch may use; a client alone has them all.

    Layers this small are done before a second thread has taken up its part of one: two chunks at a time take little
    more than half of what they take one after the other with two threads, and a chunk by itself wants but one.
    """
    threads = torch.get_num_threads()
    if threads == 1 or clients == 1 or torch.cuda.is_initialized():
        return [call() for call in calls]
    with ThreadPoolExecutor(min(threads, len(calls)), initializer=torch.set_num_threads, initargs=(1,)) as crew:
        running = [crew.submit(call) for call in calls]
        try:
            return [done.result() for done in running]
        except BaseException:  # Ctrl-C, say: what has not begun need not
            crew.shutdown(wait=False, cancel_futures=True)
            raise


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return {name: _joined([p[name] for p in parts]) for name in first}
    return type(first)(_joined(x) for x in zip(*parts, strict=True))
