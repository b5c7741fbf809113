"""Randomness that belongs to a client, a round and a purpose, never to a process.

Every draw is a pure function of (seed, client, round, purpose, position): the SplitMix64 sequence
(Steele, Lea, Flood 2014), started at a key mixed from the first four and read at the fifth. So a run
draws the same numbers in one process, on many machines, after a restart and, since this is integer
arithmetic, on CPU and GPU; and all clients are drawn for in one vectorised step.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["Draws"]


def _signed(word: int) -> int:
    """A 64-bit word as the signed integer with the same bits: torch has no arithmetic on uint64."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function, in place. The masks turn torch's arithmetic shift into a logical one."""
    z ^= (z >> 30) & (2**34 - 1)
    z *= _MIX1
    z ^= (z >> 27) & (2**37 - 1)
    z *= _MIX2
    z ^= (z >> 31) & (2**33 - 1)
    return z


def _own_kernel(keys: Tensor) -> bool:
    """On a GPU thirty small kernels take longer to launch than one to run."""
    return keys.is_cuda and find_spec("triton") is not None


@cache
def _word(purpose: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little"))


@dataclass(frozen=True)
class Draws:
    """The random numbers of C clients; every method returns one row per client."""

    keys: Tensor  # (C,) int64

    @classmethod
    def of(cls, seeds: Sequence[int], clients: Sequence[int], device: torch.device) -> "Draws":
        seed = torch.tensor(seeds, dtype=torch.int64)
        client = torch.tensor(clients, dtype=torch.int64)
        return cls(_mix(_mix(seed + _GAMMA) + (client + 1) * _GAMMA).to(device))

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, rows: slice | list[int]) -> "Draws":
        return Draws(self.keys[rows])

    def words(self, t: int, purpose: str, count: int) -> Tensor:
        """(C, count) full 64-bit words."""
        shift, word = _signed((t + 1) * _GAMMA), _word(purpose)
        if _own_kernel(self.keys):
            from semidfl.models.kernels import splitmix

            return splitmix(self.keys, count, shift, word, _GAMMA, _MIX1, _MIX2)
        start = _mix(_mix(self.keys + shift) ^ word)
        position = torch.arange(1, count + 1, device=self.keys.device)
        return _mix(start[:, None] + position * _GAMMA)

    def bits(self, t: int, purpose: str, *shape: int) -> Tensor:
        """(C, *shape) whole numbers below 2^32: each word gives two."""
        return self._halves(t, purpose, None, *shape)

    def _halves(self, t: int, purpose: str, bound: Tensor | None, *shape: int) -> Tensor:
        """(C, *shape) below 2^32, or scaled to be below a bound (C,) or (1,)."""
        count = math.prod(shape)
        if _own_kernel(self.keys):
            from semidfl.models.kernels import splitmix

            shift, word = _signed((t + 1) * _GAMMA), _word(purpose)
            return splitmix(self.keys, count, shift, word, _GAMMA, _MIX1, _MIX2, True, bound).reshape(-1, *shape)
        words = self.words(t, purpose, (count + 1) // 2)
        halves = torch.stack([words & (2**32 - 1), (words >> 32) & (2**32 - 1)], dim=2)
        bits = halves.flatten(1)[:, :count]
        return (bits if bound is None else (bits * bound[:, None]) >> 32).reshape(-1, *shape)

    def uniform(self, t: int, purpose: str, *shape: int) -> Tensor:
        """(C, *shape) in [0, 1), on the grid of 2^-24 that float32 holds exactly."""
        return (self.bits(t, purpose, *shape) >> 8).float() * 2.0**-24

    def below(self, t: int, purpose: str, bound: Tensor | int, *shape: int) -> Tensor:
        """(C, *shape) whole numbers below `bound`, which may differ by client; 0 where the bound is 0."""
        limit = bound if isinstance(bound, Tensor) else torch.full((1,), bound, device=self.keys.device)
        return self._halves(t, purpose, limit, *shape)

    def normal(self, t: int, purpose: str, *shape: int) -> Tensor:
        """(C, *shape) standard normal numbers, by Box and Muller."""
        count = math.prod(shape)
        words = self.words(t, purpose, (count + 1) // 2)
        # In (0, 1], so that the logarithm is finite.
        u = (((words >> 40) & (2**24 - 1)) + 1).float() * 2.0**-24
        angle = (words & (2**24 - 1)).float() * (2 * math.pi * 2.0**-24)
        radius = (-2 * u.log()).sqrt()
        both = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        return both[:, :count].reshape(-1, *shape)

    def order(self, t: int, purpose: str, *shape: int) -> Tensor:
        """(C, *shape) random permutations of the last axis."""
        return self.bits(t, purpose, *shape).argsort(dim=-1, stable=True)

    def beta(self, t: int, purpose: str, beta: float, *shape: int) -> Tensor:
        """(C, *shape) from Beta(beta, beta), by its inverse distribution function."""
        table = _beta_table(beta, self.keys.device)
        place = self.uniform(t, purpose, *shape) * (len(table) - 1)
        low = place.long()
        return torch.lerp(table[low], table[(low + 1).clamp(max=len(table) - 1)], place - low)


@cache
def _beta_table(beta: float, device: torch.device) -> Tensor:
    return torch.tensor(_beta_quantiles(beta), device=device)


@cache
def _beta_quantiles(beta: float, cells: int = 4096) -> list[float]:
    """Beta(beta, beta) at equal steps of probability: the lower half by quadrature, the upper by symmetry.

    With x = sin^2(a) the density in a is (sin 2a)^(2 beta - 1): flat for 1/2, where the midpoint rule is
    exact, smooth above. Below 1/2 it has a pole at 0, which a = pi/4 s^(1 / (2 beta)) takes away.
    """
    power = max(1.0, 1 / (2 * beta))
    angles = [math.pi / 4 * ((i + 0.5) / cells) ** power for i in range(cells)]
    places = [(i + 0.5) / cells for i in range(cells)]
    density = [math.sin(2 * a) ** (2 * beta - 1) * s ** (power - 1) for a, s in zip(angles, places, strict=True)]
    total = [0.0, *accumulate(density)]
    lower, cell = [], 0
    for step in range(cells + 1):
        goal = total[-1] * step / cells
        while cell < cells - 1 and total[cell + 1] < goal:
            cell += 1
        inside = (goal - total[cell]) / density[cell] if density[cell] else 0.0
        lower.append(math.sin(math.pi / 4 * min(1.0, (cell + inside) / cells) ** power) ** 2)
    return [*lower, *(1 - x for x in reversed(lower[:-1]))]
