"""Settings of all tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tests' tensors are small: more threads only wait for each other, on a busy machine for minutes."""
    torch.set_num_threads(1)
