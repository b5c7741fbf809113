"""What all clients of a run agree on: networks, graph, device, and how many clients to compute at once."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from semidfl.config import Config
from semidfl.data.augment import Augment, Strong
from semidfl.data.dataset import Dataset, Images, Labels
from semidfl.data.shards import Space
from semidfl.errors import ConfigError
from semidfl.learn.diffusion_model import DiffusionModel
from semidfl.learn.gan import GAN
from semidfl.learn.generator import Generator
from semidfl.learn.optimise import Optimiser
from semidfl.learn.turn import QUARTERS
from semidfl.models.cnn import CNN
from semidfl.models.resnet import ResNet18
from semidfl.models.stacked import WIDE, Network
from semidfl.topology import Topology

__all__ = ["Setup", "build_classifier", "build_generator", "choose_device"]

_PROBE = 512
"""Test images that the adatest ablation looks at."""


@dataclass(frozen=True)
class Setup:
    config: Config
    graph: Topology
    space: Space
    device: torch.device
    classifier: Network
    generator: Generator
    optimiser: Optimiser
    augment: Augment
    strong: Strong | None
    test_images: Tensor  # (1, n, ch, H, W) uint8
    test_labels: Tensor  # (1, n)
    clients: int  # of a run's network; the graph holds more where several runs train together

    @classmethod
    def of(cls, config: Config, data: Dataset, graph: Topology) -> "Setup":
        return cls.build(config, graph, Space.of(data), data.test_images, data.test_labels)

    @classmethod
    def build(cls, config: Config, graph: Topology, space: Space, test_images: Images, test_labels: Labels) -> "Setup":
        """From what a peer has that knows no whole data set; it may have no test images."""
        device = choose_device(config)
        c, a = config.classifier, config.augment
        return cls(
            config,
            graph,
            space,
            device,
            build_classifier(config, space, device),
            build_generator(config, space, device),
            Optimiser(c.optimizer, c.lr, c.momentum, c.nesterov, c.weight_decay, c.grad_clip),
            Augment(a.pad, a.flip),
            Strong(a.pad, a.flip, a.strong) if a.strong else None,
            torch.from_numpy(test_images).to(device)[None],
            torch.from_numpy(test_labels).to(device)[None],
            graph.clients,
        )

    @property
    def together(self) -> bool:
        """Whether several runs train as one; none may feel another, not even a NaN times zero."""
        return self.graph.clients > self.clients

    @property
    def probe(self) -> tuple[Tensor, Tensor]:
        """The shared test images of the adatest ablation."""
        return self.test_images[:, :_PROBE], self.test_labels[:, :_PROBE]

    def chunk(self, network: Network | Generator, clients: int) -> int:
        """How many clients to run as one stacked network: the one place where that is chosen."""
        compute = self.config.compute
        if compute.deterministic:
            return 1
        if compute.chunk:
            return compute.chunk
        if self.device.type == "cuda":
            return min(clients, 1000 if network is self.classifier and self.config.classifier.model == "cnn" else 120)
        # Measured on 2 cores: stacking pays while one client's layers are too small to fill a core.
        pixels, share = self.space.height * self.space.width, -(-clients // torch.get_num_threads())
        if network is self.generator:
            return min(10, share) if pixels <= 64 else 1
        if self.config.classifier.model != "cnn":
            return 1
        return min(clients, 50, max(share, 2500 // pixels))  # chunks run side by side, but one must be worth a thread

    def passes(self, clients: int, samples: int, uneven: bool = False) -> tuple[int, int]:
        """How many clients, and samples of each, the classifier judges in one pass without gradients.

        `uneven`: they have lists of unequal length, which are padded to the longest of a pass.
        """
        size = self.chunk(self.classifier, clients)
        if self.device.type == "cuda":
            if self.config.classifier.model != "cnn" and samples >= WIDE:
                size = 1  # fills a GPU by itself
            elif uneven:
                size = min(size, 16)
        return size, self.limit(self.classifier, size)

    def limit(self, network: Network | Generator, chunk: int) -> int:
        """Samples of one client in one forward pass without gradients: small images go in larger passes.

        On a GPU a pass must take longer than it takes to launch its kernels; then the memory of activations counts.
        """
        pixels = 1_600_000
        if self.device.type == "cuda":
            small = network is self.classifier and self.config.classifier.model == "cnn"
            pixels = 64_000_000 if small else 16_000_000
        samples = max(16, pixels // (self.space.height * self.space.width * chunk))
        return samples // 4 if network is self.generator else samples  # a UNet's sample is dearer than a classifier's


def build_classifier(config: Config, space: Space, device: torch.device) -> Network:
    """The network that the config names, for these images."""
    standard, outputs = config.classifier.standardise, space.classes
    if config.classifier.turns:
        if space.height != space.width:
            raise ConfigError(f"classifier.turns is for square images, not {space.height}x{space.width}")
        outputs += QUARTERS
    if config.classifier.model == "resnet18":
        return Network(lambda: ResNet18(space.channels, outputs, standard), _dtype(config, device), space.classes)
    if standard:
        raise ConfigError("classifier.standardise is for resnet18: the cnn has no norm that would scale its filters")
    if min(space.height, space.width) < 4:
        raise ConfigError(f"classifier.model = 'cnn' needs images of at least 4x4, not {space.height}x{space.width}")
    # The CNN is too small to gain from bf16.
    return Network(lambda: CNN(space.channels, space.height, space.width, outputs), torch.float32, space.classes)


def build_generator(config: Config, space: Space, device: torch.device) -> Generator:
    """The model of the consensus data space that the config names."""
    dtype = _dtype(config, device)
    if config.generator.kind == "gan":
        return GAN.of(config.generator, space, dtype)
    # With "none", too: shapes alone cost nothing, and no method then asks for more.
    return DiffusionModel.of(config.generator, space, device, dtype)


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    precision = config.compute.precision
    half = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if half else torch.float32


def choose_device(config: Config) -> torch.device:
    """The device of the config, with the number of threads set as it asks."""
    compute = config.compute
    threads = compute.threads or (1 if compute.deterministic else os.cpu_count() or 1)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    name = compute.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"compute.device = {name!r} is not legal: auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"compute.device = {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # as in our own kernels; nothing else is a product in float32
        # Its rule of thumb takes grouped convolutions one group at a time, but is the same every time.
        torch.backends.cudnn.benchmark = not compute.deterministic
        torch.backends.cudnn.deterministic = compute.deterministic
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"compute.device = {name!r} is not legal: auto, cpu, cuda or cuda:N")
    return device
