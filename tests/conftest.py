"""Settings of all tests."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Read when a kernel is defined, so before any test imports one: where there is no GPU, Triton interprets them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# How long one example takes says nothing on a busy machine.
settings.register_profile("semidfl", deadline=None)
settings.load_profile("semidfl")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tests' tensors are small: more threads only wait for each other, on a busy machine for minutes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates of three peers."""
    from semidfl.node import identity

    folder = tmp_path_factory.mktemp("identity")
    identity.init(folder)
    for name in ("one", "two", "three"):
        identity.issue(folder, name)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: at the end, where files are tested side by side, all would wait for it."""
    items.sort(key=lambda item: item.path.name != "test_ray.py")
