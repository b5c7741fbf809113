"""The CNN's layer on a CPU: the same as torch's convolution, pooling and ReLU, forwards and backwards."""

import pytest
import torch
from helpers import assert_close, random
from torch import Tensor
from torch.nn import functional as F

from semidfl.models.planes import convolve_and_pool


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack(
        [F.max_pool2d(F.relu(F.conv2d(*one, padding=1)), 2) for one in zip(x, weight, bias, strict=True)]
    )


def graded(layer, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of a loss in which every place counts differently."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = layer(*leaves)
    loss = (out * random(9, *out.shape)).sum()
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


SHAPES = [(3, 5, 1, 28, 28, 6), (2, 4, 6, 14, 14, 25), (1, 1, 2, 2, 2, 3), (2, 3, 3, 9, 6, 4), (2, 3, 1, 7, 13, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_torchs(shape: tuple[int, ...]) -> None:
    clients, batch, inp, height, width, out = shape
    inputs = random(1, clients, batch, inp, height, width), random(2, clients, out, inp, 3, 3), random(3, clients, out)
    for ours, theirs in zip(graded(convolve_and_pool, *inputs), graded(plain, *inputs), strict=True):
        assert_close(ours, theirs)


def test_of_equal_pixels_the_first_takes_the_gradient() -> None:
    """A flat image: all four products of a cell are equal, as over the background of a digit."""
    inputs = torch.full((1, 2, 1, 8, 8), -1.0), torch.full((1, 3, 1, 3, 3), -0.5), torch.ones(1, 3)
    for ours, theirs in zip(graded(convolve_and_pool, *inputs), graded(plain, *inputs), strict=True):
        assert_close(ours, theirs)


def test_any_layout_of_the_inputs_will_do() -> None:
    x, weight, bias = random(1, 2, 3, 4, 8, 8), random(2, 2, 5, 4, 3, 3), random(3, 2, 5)
    turned = x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    stored = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    for ours, theirs in zip(
        graded(convolve_and_pool, turned, stored, bias), graded(plain, x, weight, bias), strict=True
    ):
        assert_close(ours, theirs)


def test_an_image_of_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="1x8"):
        convolve_and_pool(random(1, 1, 1, 1, 1, 8), random(2, 1, 2, 1, 3, 3), random(3, 1, 2))
