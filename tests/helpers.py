"""What several tests need: small cohorts to work on, and slow plain versions of what the package does in one stroke."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from semidfl.data.shards import Index, Shards
from semidfl.draws import Draws
from semidfl.exchange.base import Neighbourhood
from semidfl.models.stacked import Network
from semidfl.topology import Topology

CPU = torch.device("cpu")


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` of the largest number there is: a sum's error follows its largest terms."""
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    error, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert error <= tolerance * max(size, 1e-6), f"off by {error:.2e} where the numbers go up to {size:.2e}"


def draws_of(clients: int, seed: int = 7) -> Draws:
    return Draws.of([seed] * clients, range(clients), CPU)


def random(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers that depend on nothing but the seed."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def pixels(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


# --- networks ----------------------------------------------------------------------------------------------


def network_of(build: Callable[[], nn.Module]) -> Network:
    return Network(build, torch.float32)


def params_of(network: Network, clients: int) -> Tensor:
    """(C, D): initial weights of another seed at every client, shaken so that no layer is left at zero."""
    rows = [network.initial(seed) + 0.03 * random(seed, network.size) for seed in range(clients)]
    return torch.stack(rows)


class PlainCNN(nn.Sequential):
    """The CNN of PAPER.md, section 3, in plain torch layers."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__(
            nn.Conv2d(channels, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 25, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(25 * (height // 4) * (width // 4), 50),
            nn.ReLU(),
            nn.Linear(50, classes),
        )


def load(plain: nn.Module, row: Tensor) -> nn.Module:
    """Copies one client's weights (D,) into a plain network whose layers come in the same order."""
    parts = row.detach().split([p.numel() for p in plain.parameters()])
    for p, x in zip(plain.parameters(), parts, strict=True):
        # A row holds a convolution as (k, k, in, out).
        p.data = x.view(*p.shape[2:], p.shape[1], p.shape[0]).permute(3, 2, 0, 1) if p.dim() == 4 else x.view(p.shape)
    return plain


def as_row(tensors: Iterable[Tensor]) -> Tensor:
    """Weights, or gradients, of a plain network as they lie in a client's row (D,)."""
    return torch.cat([(x.permute(2, 3, 1, 0) if x.dim() == 4 else x).flatten() for x in tensors])


# --- graphs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A graph, the clients of one process, and those that answered it."""

    graph: Topology
    own: list[int]
    seen: list[int]

    @property
    def near(self) -> Neighbourhood:
        return Neighbourhood.of(self.graph, self.own, self.seen, CPU)

    def group(self, i: int) -> list[int]:
        """G_i: client i and those of its neighbours that answered, by the definition."""
        return [j for j in self.seen if j == i or j in self.graph.neighbours[i]]


def topology(neighbours: Sequence[Sequence[int]]) -> Topology:
    return Topology("test", tuple(tuple(sorted(row)) for row in neighbours), "M" * len(neighbours))


@st.composite
def scenes(draw: st.DrawFn, most: int = 7) -> Scene:
    """Any graph, hosted in part, with some of the others missing."""
    n = draw(st.integers(1, most))
    edges = {(i, j) for i in range(n) for j in range(i) if draw(st.booleans())}
    graph = topology([[j for j in range(n) if (i, j) in edges or (j, i) in edges] for i in range(n)])
    own = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))
    return Scene(graph, own, sorted({*own, *draw(st.sets(st.integers(0, n - 1)))}))


# --- data --------------------------------------------------------------------------------------------------


def shards_of(images: Tensor, labels: Tensor, labelled: list[list[int]], unlabelled: list[list[int]]) -> Shards:
    one, other = (Index.of([np.array(x, dtype=np.int64) for x in lists], CPU) for lists in (labelled, unlabelled))
    return Shards(images, labels, one, other)


def plain_augment(image: Tensor, pad: int, down: int, right: int, mirror: bool) -> Tensor:
    """Flips, pads with zeros and crops, pixel by pixel: the picture (ch, H, W) moves `down` and `right`."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for c in range(channels):
        rows = [[int(v) for v in row] for row in image[c]]
        if mirror:
            rows = [row[::-1] for row in rows]
        blank = [0] * (width + 2 * pad)
        padded = [blank] * pad + [[0] * pad + row + [0] * pad for row in rows] + [blank] * pad
        for y in range(height):
            for x in range(width):
                out[c, y, x] = padded[y + pad - down][x + pad - right]
    return out
