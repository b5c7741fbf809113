"""Models in fewer bytes, around any exchange: what is published is rounded, what is seen is made float32 again.

*No receiver keeps anything.* Each message holds whole models: half-precision numbers, or int8 with a scale for every
128 of them. Deltas, and with them sending only the largest changes, would be smaller still, but a delta means something
only to whoever has got all messages before it. On a network neighbours miss rounds, restart and come back, so
every receiver would need a copy of each neighbour's last public model, a way to notice that it is old and one to ask
for a new one. To send less than int8 does, send less often: `exchange.generator_every`.

*What rounding takes is not lost.* A client's own row is rounded like all others (there is one row a client in an
exchange), so steps smaller than the grid would vanish for ever. Hence error feedback (Seide et al. 2014; for gossip
DeepSqueeze, Tang et al. 2019): a sender keeps what rounding took and adds it the next time. With v_j = theta_j + e_j,

    publish Q(v_j),    e_j <- v_j - Q(v_j),    theta_i <- sum over j in G_i of w_ij Q(v_j)

so that over the rounds the mean of what was published is the mean of what was meant. e_j is in the cohort's memory and
thus in its checkpoints. It is the sender's alone: if a message is lost or a neighbour comes late, nothing is out of
step.

Feedback is for what is mixed. Classifiers sent to label a neighbour's samples are only rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from semidfl.cohort import Cohort
from semidfl.config import ExchangeConfig
from semidfl.exchange.base import Exchange, Shared, mixing

__all__ = ["Codec", "Compressed", "Half", "Int8", "lossy"]


class Codec(Protocol):
    """How the rows (C, D) of a model are written: as several tensors, named by what is added to the model's name."""

    parts: ClassVar[tuple[str, ...]]

    def encode(self, x: Tensor) -> dict[str, Tensor]: ...

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Half:
    """Two bytes a number."""

    parts: ClassVar[tuple[str, ...]] = ("",)
    dtype: torch.dtype

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        # A large weight must not become infinite, which a neighbour would refuse; one that is infinite stays so.
        most = torch.finfo(self.dtype).max
        return {"": torch.where(x.isfinite(), x.clamp(-most, most), x).to(self.dtype)}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts[""].float()


@dataclass(frozen=True)
class Int8:
    """A byte a number, on a grid of 255 steps that spans the largest of each block."""

    parts: ClassVar[tuple[str, ...]] = ("", ".scale")
    block: int = 128

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        blocks = self._blocks(x)
        scale = blocks.abs().amax(2) / 127  # NaN where the weights are: it is not hidden
        steps = torch.where(scale[:, :, None] > 0, blocks / scale[:, :, None], 0.0).round()
        # Beside the smallest numbers there are, even the scale is coarse.
        return {"": steps.clamp(-127, 127).to(torch.int8).flatten(1)[:, : x.shape[1]], ".scale": scale}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        x = self._blocks(parts[""].float()) * parts[".scale"][:, :, None]
        return x.flatten(1)[:, : parts[""].shape[1]]

    def _blocks(self, x: Tensor) -> Tensor:
        """(C, D) -> (C, blocks, block), filled up with zeros."""
        return F.pad(x, (0, -x.shape[1] % self.block)).reshape(len(x), -1, self.block)


_CODECS: dict[str, Codec] = {"fp16": Half(torch.float16), "bf16": Half(torch.bfloat16), "int8": Int8()}


def lossy(config: ExchangeConfig) -> dict[str, Codec]:
    """The codec of each tensor that is rounded, by its name in the exchange."""
    generator = config.dtype if config.generator_dtype == "same" else config.generator_dtype
    names = {"classifier": config.dtype, "velocity": config.dtype, "generator": generator}
    return {name: _CODECS[dtype] for name, dtype in names.items() if dtype != "fp32"}


class Compressed:
    """An exchange that rounds models. The inner one carries, and so counts, what is really sent."""

    def __init__(self, inner: Exchange, config: ExchangeConfig, cohort: Cohort) -> None:
        self.inner, self.cohort = inner, cohort
        self.codecs, self.feedback = lossy(config), config.feedback

    @classmethod
    def around(cls, inner: Exchange, config: ExchangeConfig, cohort: Cohort) -> Exchange:
        """The exchange with its codecs, or as it is where nothing is rounded."""
        return cls(inner, config, cohort) if lossy(config) else inner

    def share(self, t: int, topic: str, tensors: Mapping[str, Tensor]) -> Shared:
        sent: dict[str, Tensor] = {}
        for name, x in tensors.items():
            parts = self._encode(topic, name, x) if name in self.codecs else {"": x}
            sent |= {name + part: y for part, y in parts.items()}
        seen = self.inner.share(t, topic, sent)
        return replace(seen, tensors={name: self._decode(name, seen.tensors) for name in tensors})

    def _encode(self, topic: str, name: str, x: Tensor) -> dict[str, Tensor]:
        codec, memory, kept = self.codecs[name], self.cohort.memory, f"unsent.{name}"
        if not mixing(topic) or not self.feedback:
            return codec.encode(x)
        meant = x + memory[kept] if kept in memory else x
        parts = codec.encode(meant)
        memory[kept] = meant - codec.decode(parts)
        return parts

    def _decode(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        if name not in self.codecs:
            return tensors[name]
        codec = self.codecs[name]
        return codec.decode({part: tensors[name + part] for part in codec.parts})
