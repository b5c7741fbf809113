"""A trained classifier as one plain module with all its preprocessing inside: bytes of any size in, probabilities out.

The steps are those of `data/pictures.py` and `Space.normalise`, in operations that ONNX and TorchScript have too;
resizing is done in double precision, so that it rounds to the same bytes everywhere.
"""

import torch
from torch import Tensor, nn

from semidfl.data.pictures import ROUND
from semidfl.use.model import Trained

__all__ = ["Deployed"]


class Deployed(nn.Module):
    """uint8 (n, ch, H, W), any H and W, ch as the network's -> probabilities (n, K)."""

    scale: Tensor
    shift: Tensor

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        space = trained.space
        self.height, self.width = space.height, space.width
        self.register_buffer("scale", torch.tensor([1 / (255 * s) for s in space.std])[:, None, None])
        pairs = zip(space.mean, space.std, strict=True)
        self.register_buffer("shift", torch.tensor([-m / s for m, s in pairs])[:, None, None])
        network, self.classes = trained.classifier, space.classes
        self.network = network.module
        for name, value in network.named(trained.params.cpu()).items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.network.get_submodule(owner), leaf, nn.Parameter(value.clone(), requires_grad=False))

    def forward(self, image: Tensor) -> Tensor:
        down, across = _weights(image.shape[2], self.height), _weights(image.shape[3], self.width)
        small = (down @ image.double() @ across.mT + ROUND).floor()
        x = small.float() * self.scale + self.shift
        logits: Tensor = self.network(x[None])[0, :, : self.classes]  # as a cohort of one client
        return logits.softmax(1)


def _weights(old: int, new: int) -> Tensor:
    """(new, old), as `pictures.weights`; the old size stays a tensor, so that an exported graph takes any."""
    place = torch.arange(old, dtype=torch.float64)
    scale = (place[-1] + 1) / new
    centre = (torch.arange(new, dtype=torch.float64) + 0.5) * scale - 0.5
    share = (1 - (place - centre[:, None]).abs() / scale.clamp(min=1.0)).clamp(min=0.0)
    return share / share.sum(1, keepdim=True)
