"""The paper's CNN for small grey images: two convolutions, two linear layers, 63,245 parameters at 28x28."""

from torch import Tensor, nn
from torch.nn import functional as F

from semidfl.models.stacked import Conv2d, Linear, fold, unfold

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
        x = F.max_pool2d(F.relu(self.conv1(fold(images))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = unfold(x, images.shape[0]).flatten(2)
        logits: Tensor = self.out(F.relu(self.hidden(x)))
        return logits
