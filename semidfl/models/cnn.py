"""The paper's CNN for small grey images: two convolutions, two linear layers, 63,245 parameters at 28x28."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.models.stacked import Conv2d, Linear, fold, fused, unfold

__all__ = ["CNN"]


class CNN(nn.Module):
    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(channels, 6, 3)
        self.conv2 = Conv2d(6, 25, 3)
        self.hidden = Linear(25 * (height // 4) * (width // 4), 50)
        self.out = Linear(50, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(C, B, ch, H, W) -> logits (C, B, K)."""
        logits: Tensor = self.out(F.relu(self.hidden(self._features(images))))
        return logits

    def _features(self, images: Tensor) -> Tensor:
        layers = self.conv1.weight, cast(Tensor, self.conv1.bias), self.conv2.weight, cast(Tensor, self.conv2.bias)
        if fused(images) and not images.requires_grad:  # our kernels' gradients end at the weights
            from semidfl.models import pooling, unpooling

            features = unpooling.features if torch.is_grad_enabled() else pooling.features
            return features(images, *layers).flatten(2)
        if images.device.type == "cpu" and not _is_traced():
            from semidfl.models import planes

            x = planes.convolve_and_pool(images, *layers[:2])
            return planes.convolve_and_pool(x, *layers[2:]).flatten(2)
        x = F.max_pool2d(F.relu(self.conv1(fold(images))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return unfold(x, images.shape[0]).flatten(2)


def _is_traced() -> bool:
    """Whether the network is being compiled or exported: tracers know only PyTorch's own layers."""
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())
