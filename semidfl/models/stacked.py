"""Layers that hold the weights of C clients and run them as one network.

Activations are (B, C*ch, H, W) in channels-last memory: a convolution of all clients is one grouped
convolution, a group norm one with C times the groups, a linear layer one batched product. With C = 1
it is the plain network. Modules only declare shapes; the weights of all layers of all clients are one
matrix (C, D), so that mixing, optimisers and messages never need to know the network.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from semidfl.draws import Draws
from semidfl.models.home import apart

__all__ = [
    "EPS",
    "WIDE",
    "Conv2d",
    "GroupNorm",
    "Linear",
    "Network",
    "Part",
    "concat",
    "fold",
    "fused",
    "join",
    "standardised",
    "unfold",
]

_HEAVY = 500_000
"""weights of a network from which on it takes long to copy them: a ResNet's or UNet's, not a CNN's"""

EPS = 1e-4
"""beside the squared length of a filter that is standardised: one of zeros stays so"""

WIDE = 1000
"""samples in a pass without gradients with which one client's heavy network fills a GPU"""

_Table = TypeVar("_Table")

_filled: ContextVar[Tensor | None] = ContextVar("filled", default=None)
"""(C,) how many of a client's samples are real, for layers that can leave out the others"""


class Conv2d(nn.Conv2d):
    """(B, C*in, H, W) -> (B, C*out, H', W') with weights (C, out, in, k, k), `standard` or as they are."""

    def __init__(
        self, inp: int, out: int, kernel: int, stride: int = 1, zero: bool = False, bias: bool = True,
        standard: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(inp, out, kernel, stride, padding=kernel // 2, bias=bias)
        self.zero, self.standard = zero, standard

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        """The convolution, plus `extra` where that is given."""
        weight: Tensor = self.weight
        if weight.dim() == 4:  # (C, taps, in, out): for our own kernels, standardised if they shall be
            from semidfl.models.convolution import convolve

            last = [None if v is None else v.permute(0, 2, 3, 1).contiguous() for v in (x, extra)]
            y = convolve(cast(Tensor, last[0]), weight, self.bias, last[1], self.stride[0], _filled.get())
            return y.permute(0, 3, 1, 2)
        weight = standardised(weight) if self.standard else weight
        clients = weight.shape[0]
        bias = None if self.bias is None else self.bias.flatten()
        weight = weight.flatten(0, 1)
        if x.is_cuda:  # weights in the layout of the images: else cuDNN goes through the groups one by one
            weight = weight.contiguous(memory_format=torch.channels_last)
        y = F.conv2d(x, weight, bias, self.stride, cast(Any, self.padding), groups=clients)
        return y if extra is None else extra + y


def standardised(weight: Tensor) -> Tensor:
    """Every filter less its mean and at length 1 (Qiao et al. 2019, arXiv:1903.10520); the norm that follows scales.

    weight (C, out, in, k, k); `models/weights.py` has the same for a GPU
    """
    exact = weight.float() if weight.dtype == torch.bfloat16 else weight
    centred = exact - exact.mean((2, 3, 4), keepdim=True)
    return (centred * (centred.square().sum((2, 3, 4), keepdim=True) + EPS).rsqrt()).to(weight.dtype)


class GroupNorm(nn.GroupNorm):
    """Normalises each client's groups of channels by themselves; what mostly follows is done with it on a GPU."""

    def forward(
        self, x: Tensor, condition: Tensor | None = None, act: str = "none", extra: Tensor | None = None
    ) -> Tensor:
        """act(norm(x) (1 + scale) + shift + extra), with `condition` (C, B, 2 ch): scale before shift."""
        if fused(x):
            from semidfl.models.normalisation import normalise

            last = [None if v is None else v.permute(0, 2, 3, 1).contiguous() for v in (x, extra)]
            own, per = (self.weight, self.bias), self.num_channels // self.num_groups
            y = normalise(cast(Tensor, last[0]), *own, condition, per, act, self.eps, last[1], _filled.get())
            return y.permute(0, 3, 1, 2)
        groups = self.weight.shape[0] * self.num_groups
        h = F.group_norm(x, groups, self.weight.flatten(), self.bias.flatten(), self.eps)
        if condition is not None:
            scale, shift = (_per_channel(v) for v in condition.chunk(2, dim=2))
            h = h * (1 + scale) + shift
        return ACTIVATIONS[act](h if extra is None else h + extra)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "silu": F.silu, "relu": F.relu}


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fused(x: Tensor) -> bool:
    """Whether our own kernels take this tensor."""
    return x.is_cuda and _has_triton()


class Linear(nn.Linear):
    """(C, B, in) -> (C, B, out) with weights (C, out, in)."""

    zero = False

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(x, self.weight.mT)
        return torch.baddbmm(self.bias[:, None], x, self.weight.mT)


def fold(x: Tensor) -> Tensor:
    """(C, B, ch, H, W) -> (B, C*ch, H, W), channels last."""
    clients, batch, channels, height, width = x.shape
    last = x.permute(1, 3, 4, 0, 2).reshape(batch, height, width, clients * channels)
    # With one channel the reshape is but a view, and all layers that follow would work channels first.
    return last.contiguous().permute(0, 3, 1, 2)


def unfold(x: Tensor, clients: int) -> Tensor:
    """(B, C*ch, H, W) -> (C, B, ch, H, W)."""
    batch, _, height, width = x.shape
    return x.view(batch, clients, -1, height, width).transpose(0, 1)


def concat(a: Tensor, b: Tensor, clients: int) -> Tensor:
    """Joins the channels of each client; done channels-last, so that no layer pays for a change of layout."""
    parts = [x.permute(0, 2, 3, 1).unflatten(3, (clients, -1)) for x in (a, b)]
    return torch.cat(parts, dim=4).flatten(3).permute(0, 3, 1, 2)


def join(x: Tensor, skip: Tensor, clients: int) -> Tensor:
    """What a UNet does on its way up: x at the size of skip, and skip's channels behind its own."""
    if fused(x):
        from semidfl.models import kernels

        last = [v.permute(0, 2, 3, 1).contiguous() for v in (x, skip)]
        return kernels.join(last[0], last[1], clients).permute(0, 3, 1, 2)
    if x.shape[2:] != skip.shape[2:]:
        x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
    return concat(x, skip, clients)


def _per_channel(x: Tensor) -> Tensor:
    """(C, B, ch) -> (B, C*ch, 1, 1), to scale or shift channels."""
    return x.transpose(0, 1).flatten(1)[:, :, None, None]


class Part(NamedTuple):
    """A client's part of a layer in a matrix or row of all weights."""

    client: int
    start: int
    rows: int
    columns: int  # of a convolution to standardise: its filters
    filters: bool


class Network:
    """A module run for all clients at once, with parameters (C, D)."""

    def __init__(self, build: Callable[[], nn.Module], dtype: torch.dtype, answers: int | None = None) -> None:
        self._build = build
        self.answers = answers  # outputs that are the answer; those behind them serve training alone
        self.module = self._shapes()
        named = dict(self.module.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in named.items()}
        self.sizes = [p.numel() for p in named.values()]
        self.dtype = dtype
        flagged = (name for name, layer in self.module.named_modules() if getattr(layer, "standard", False))
        self._filters = {f"{name}.weight" for name in flagged}
        self._tables: dict[Hashable, Any] = {}
        self._idle = [self.module]
        self._rehearsed: set[Hashable] = set()

    @property
    def size(self) -> int:
        """D, parameters of one client."""
        return sum(self.sizes)

    @property
    def heavy(self) -> bool:
        """Whether it is better not to copy weights about."""
        return self.size >= _HEAVY

    def __call__(self, params: Tensor, *inputs: Tensor, filled: Tensor | None = None, whole: bool = False) -> Tensor:
        """params (C, D) or `by_layer`, inputs (C, B, …) -> (C, B, …) in float32, the answers or the `whole` output.

        filled (C,): only so many of a client's samples count. The others may become any number.
        """
        half = params.to(self.dtype)
        moved = tuple(x.to(self.dtype) if x.is_floating_point() else x for x in inputs)

        def run() -> Tensor:
            if fused(params) and not self._wide(params, inputs[0]):
                weights = self._by_taps(self._standardised(half))
            else:
                weights = self.named(half)
            with self._module() as module:
                return cast(Tensor, functional_call(module, weights, moved))

        told = _filled.set(filled)
        try:
            if fused(params) and not torch.is_grad_enabled():  # training is rehearsed as a whole
                self._rehearse(run, (params.shape, *(x.shape for x in inputs)))
            y = run().float()
            return y if whole or self.answers is None else y[..., : self.answers]
        finally:
            _filled.reset(told)

    def _wide(self, params: Tensor, x: Tensor) -> bool:
        """Whether this is a pass in which cuDNN's plain convolution is faster than ours of all clients."""
        return not torch.is_grad_enabled() and self.heavy and len(params) == 1 and x.shape[1] >= WIDE

    def _rehearse(self, run: Callable[[], Tensor], shapes: Hashable) -> None:
        if shapes not in self._rehearsed:
            from semidfl.models.launch import rehearse

            rehearse(run)
            self._rehearsed.add(shapes)

    @contextmanager
    def _module(self) -> Iterator[nn.Module]:
        """One that nobody uses: while it runs, a module holds its caller's weights, so every thread needs its own."""
        try:
            module = self._idle.pop()
        except IndexError:
            module = self._shapes()
        try:
            yield module
        finally:
            self._idle.append(module)

    def _shapes(self) -> nn.Module:
        with torch.device("meta"):  # no memory, no global random state
            return self._build()

    def named(self, params: Tensor) -> dict[str, Tensor]:
        """(C, D) -> name -> (C, *shape), as views, in PyTorch's order of axes."""
        return {name: x.permute(0, 4, 3, 1, 2) if x.dim() == 5 else x for name, x in self._stored(params).items()}

    def row(self, named: Mapping[str, Tensor]) -> Tensor:
        """name -> shape, as `named` gives for one client, back to (D,)."""
        parts = (named[name] for name in self.shapes)
        return torch.cat([(x.permute(2, 3, 1, 0) if x.dim() == 4 else x).flatten() for x in parts])

    def _by_taps(self, params: Tensor) -> dict[str, Tensor]:
        """The same for our own kernels: convolutions as (C, taps, in, out)."""
        if params.dim() == 1 and params.requires_grad:  # these kernels can write gradients where they belong
            clients = params.numel() // self.size
            shapes = [(s[2] * s[3], s[1], s[0]) if len(s) == 4 else s for s in self.shapes.values()]
            return dict(zip(self.shapes, apart(params, [(clients, *shape) for shape in shapes]), strict=True))
        return {name: x.flatten(1, 2) if x.dim() == 5 else x for name, x in self._stored(params).items()}

    def _standardised(self, params: Tensor) -> Tensor:
        """With those filters standardised that shall be, by our own kernel."""
        if not self._filters:
            return params
        from semidfl.models import weights

        return weights.standardise(params, self._table(weights.tiles, params))

    def _table(self, build: Callable[[list["Part"], torch.device], _Table], params: Tensor) -> _Table:
        """For a kernel that goes through all clients' layers at once: where they are, as `build` wants it."""
        clients, layered = params.numel() // self.size, params.dim() == 1
        key = (build, clients, layered, params.device)
        if key not in self._tables:
            parts, before = [], 0
            for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
                columns = shape[0] if name in self._filters else size
                for client in range(clients):
                    start = clients * before + client * size if layered else client * self.size + before
                    parts.append(Part(client, start, size // columns, columns, name in self._filters))
                before += size
            self._tables[key] = build(parts, params.device)
        return cast(_Table, self._tables[key])

    def _stored(self, params: Tensor) -> dict[str, Tensor]:
        """As they lie in a row; convolutions (C, k, k, in, out). `split`, since its gradient is one concatenation."""
        clients = params.numel() // self.size
        parts = self._layers(params) if params.dim() == 1 else params.split(self.sizes, dim=1)
        shapes = ((s[2], s[3], s[1], s[0]) if len(s) == 4 else s for s in self.shapes.values())
        return {name: x.view(clients, *shape) for name, x, shape in zip(self.shapes, parts, shapes, strict=True)}

    def by_layer(self, params: Tensor) -> Tensor:
        """(C, D) -> (C x D,): all clients' first layer, then all clients' second: each is one piece of memory."""
        return torch.cat([x.flatten() for x in params.split(self.sizes, dim=1)])

    def owners(self, clients: int, device: torch.device) -> Tensor:
        """Whose each weight is in what `by_layer` gives."""
        rows = torch.arange(clients, dtype=torch.int16, device=device)[:, None]
        return self.by_layer(rows.expand(-1, self.size))

    def by_client(self, params: Tensor) -> Tensor:
        """What `by_layer` did, undone."""
        clients = params.numel() // self.size
        return torch.cat([x.view(clients, -1) for x in self._layers(params)], dim=1)

    def shortened(self, grad: Tensor, limit: float) -> Tensor:
        """A gradient (C, D) or `by_layer` with every client's no longer than `limit`; it may be overwritten."""
        if fused(grad):
            from semidfl.models import weights

            grad = grad.contiguous()
            weights.shorten(grad, self._table(weights.pieces, grad), grad.numel() // self.size, limit)
            return grad
        clients, out = grad.numel() // self.size, torch.empty_like(grad, dtype=torch.float32)
        parts = [(grad, out)] if grad.dim() == 2 else zip(self._layers(grad), self._layers(out), strict=True)
        rows = [(x.view(clients, -1), y.view(clients, -1)) for x, y in parts]
        # Over millions of weights, in float32, torch is off by 4e-4 on a CPU, and by something else in another order.
        lengths = [torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x, _ in rows]
        factor = (limit / torch.stack(lengths).norm(dim=0)).clamp(max=1.0).float()[:, None]
        for x, y in rows:  # written where it is needed: a ResNet's gradients take as long to copy as to shorten
            torch.mul(x, factor, out=y)
        return out

    def _layers(self, params: Tensor) -> tuple[Tensor, ...]:
        clients = params.numel() // self.size
        parts: tuple[Tensor, ...] = params.split([clients * size for size in self.sizes])
        return parts

    def initial(self, seed: int) -> Tensor:
        """(D,) weights drawn from the seed, the same on every machine: PyTorch's default ranges."""
        parts = {}
        for name, module in self.module.named_modules():
            for leaf, p in module.named_parameters(recurse=False):
                path = f"{name}.{leaf}".removeprefix(".")
                parts[path] = _initial(module, leaf, p, seed, f"{name}.{leaf}").view(p.shape)
        return self.row(parts)


def _initial(module: nn.Module, leaf: str, p: nn.Parameter, seed: int, path: str) -> Tensor:
    if isinstance(module, GroupNorm):
        return torch.full((p.numel(),), float(leaf == "weight"))
    if getattr(module, "zero", False):
        return torch.zeros(p.numel())
    fan_in = cast(nn.Parameter, module.weight)[0].numel()
    u = Draws.of([seed], [0], torch.device("cpu")).uniform(0, f"initial {path}", p.numel())[0]
    bound: float = fan_in**-0.5
    return (2 * u - 1) * bound
