"""What memory a run will need, found without running it: networks are traced on shapes alone."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from semidfl import topology
from semidfl.config import Config
from semidfl.data.dataset import Dataset
from semidfl.data.own import with_sites
from semidfl.data.sources import outline
from semidfl.exchange.compressed import lossy
from semidfl.learn.generator import Generator
from semidfl.methods import find_method
from semidfl.models.stacked import Network
from semidfl.setup import Setup

__all__ = ["activations_of", "estimate", "memory"]

_LARGEST = 2000
"""clients: the eigenvalues of a graph of so many take two seconds on a busy core, of 3000 seven"""


def estimate(config: Config) -> str:
    """The estimate in words."""
    parts = memory(config)
    graph = topology.build(with_sites(config, _outline(config)).graph, config.seed)
    rows = [f"{name:34} {size / 2**20:10.1f} MiB" for name, size in (parts | {"all": sum(parts.values())}).items()]
    lines = [_agreeing(graph, config.aggregation.gossip), "estimate of memory on the device", *rows]
    return "\n".join(f"# {line}" for line in lines)  # so that the whole printout is a config file


def _agreeing(graph: topology.Topology, mixings: int) -> str:
    """How fast clients of this graph come to agree."""
    words = f"graph: {graph.clients} clients, {len(graph.edges())} edges"
    if graph.clients > _LARGEST:
        return words
    return f"{words}; a round leaves {100 * graph.left(mixings):.1f} % of the difference that lasts longest"


def memory(config: Config) -> dict[str, int]:
    """Bytes by what they are for."""
    data = _outline(config)
    config = with_sites(config, data)
    graph = topology.build(config.graph, config.seed)
    setup = Setup.of(config, data, graph)
    method, clients = find_method(config.method)(setup), graph.clients
    parts = {"images": sum(x.nbytes for x in (data.train_images, data.test_images))}
    sources = 2 + (method.generates or config.pseudo.doubled) + (config.classifier.turns > 0)
    networks: dict[str, tuple[Network | Generator, int]] = {
        "classifier": (setup.classifier, config.classifier.batch * sources)
    }
    if method.generates:
        networks["generator"] = (setup.generator, config.generator.batch * 2)
    for name, (network, batch) in networks.items():
        chunk = min(clients, setup.chunk(network, clients))
        own = config.classifier if name == "classifier" else config.generator
        # Weights and what SGD or Adam keep of them, their moving average, …
        copies = (2 if name == "classifier" and config.classifier.optimizer == "sgd" else 3) + (own.ema > 0)
        copies += config.exchange.feedback and name in lossy(config.exchange)  # … and what rounding took
        parts[f"{name}: weights, optimiser"] = clients * network.size * 4 * copies
        parts[f"{name}: gradients of a chunk"] = chunk * network.size * 4 * 3
        parts[f"{name}: a step's activations"] = chunk * batch * _activations(network, setup)
        steps = own.iterations or config.classifier.iterations
        parts[f"{name}: a round's batches"] = chunk * batch * steps * data.train_images[0].size * 4 * 3
    return parts


def _outline(config: Config) -> Dataset:
    return outline(config.data.dataset, config.data, config.seed)


def _activations(network: Network | Generator, setup: Setup) -> int:
    """Bytes that one sample's step keeps from its forward passes."""
    with torch.device("meta"):
        if isinstance(network, Network):
            return activations_of(network, torch.empty(1, 1, *setup.space.shape))
        return sum(activations_of(part, *inputs) for part, inputs in network.examples())


def activations_of(network: Network, *inputs: Tensor) -> int:
    """Bytes that one forward pass leaves for the backward pass: about every layer's output."""
    seen: list[int] = []

    def note(module: nn.Module, _: object, out: Tensor) -> None:
        seen.append(out.numel())

    leaves = [m for m in network.module.modules() if not list(m.children())]
    hooks = [m.register_forward_hook(note) for m in leaves]
    functional_call(network.module, network.named(torch.empty(1, network.size)), inputs)
    for hook in hooks:
        hook.remove()
    # Activation functions and normalisations between the layers keep about as much again.
    return 2 * sum(seen) * (2 if network.dtype == torch.bfloat16 else 4)
