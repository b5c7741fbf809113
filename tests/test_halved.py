"""benchmarks/halved.py: CIFAR-10 and its network in small, with all else as it is."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scripts import ROOT, script

from semidfl import setup
from semidfl.data import sources
from semidfl.models.resnet import ResNet18
from semidfl.models.stacked import Network


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """In place over a made-up CIFAR-10 of 300 and 20 images; taken out again afterwards."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    halved = script("benchmarks/halved.py")
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (320, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(320) % 10

    def read(_: Path) -> sources.Arrays:
        return images[:300], labels[:300], images[300:], labels[300:]

    item = replace(sources.CATALOGUE["cifar10"], train=300, test=20, files=(), read=read)
    monkeypatch.setitem(sources.CATALOGUE, "cifar10", item)
    monkeypatch.setattr(setup, "ResNet18", ResNet18)
    monkeypatch.setattr(halved, "COUNT", 240)
    halved.put_in_place()
    return halved


def test_each_pixel_is_the_mean_of_four(small: ModuleType) -> None:
    images = np.random.default_rng(1).integers(0, 256, (2, 3, 6, 4), dtype=np.uint8)
    made = small.halved(images)
    assert made.shape == (2, 3, 3, 2)
    for n, channel, y, x in np.ndindex(made.shape):
        four = images[n, channel, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float)
        assert abs(made[n, channel, y, x] - four.mean()) <= 0.5


def test_its_network_has_the_parts_of_the_large_one(small: ModuleType) -> None:
    def size(net: type[ResNet18]) -> int:
        return Network(lambda: net(3, 10), torch.float32, 10).size

    def block(i: int, o: int) -> int:
        return 9 * (i + o) * o + 4 * o + (0 if i == o else (i + 2) * o)

    assert size(small.SmallResNet) == (27 + 2) * 16 + block(16, 16) + block(16, 32) + block(32, 64) + 65 * 10
    large = (27 + 2) * 64 + sum(block(i, o) + block(o, o) for i, o in ((64, 64), (64, 128), (128, 256), (256, 512)))
    assert size(ResNet18) == large + 513 * 10


def test_variants_are_compared_on_the_small_copy(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.jsonl"
    words = ["halved.py", "--cells", "50:100", "--seeds", "0", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*words, "labels=method:dfl-lb,rounds:2,classifier.iterations:1"])
    networks = []
    build = setup.build_classifier
    monkeypatch.setattr(setup, "build_classifier", lambda *given: networks.append(build(*given)) or networks[-1])
    small.main(None, "cifar10", small.USUAL)
    (found,) = (json.loads(line) for line in out.read_text().splitlines())
    assert list(found["tests"]) == ["2"]  # every 20 rounds, and after the last
    own = {"method": "dfl-lb", "rounds": "2", "classifier.iterations": "1"}
    assert found["fields"] == small.USUAL | own  # which tell its lines from those of the whole
    assert [network.size for network in networks] == [Network(lambda: small.SmallResNet(3, 10), torch.float32, 10).size]
    whole, kept = sources.CATALOGUE["cifar10"], sources.load("cifar10")
    assert (whole.train, whole.shape) == (240, (3, 16, 16))
    assert kept.train_images.shape == (240, 3, 16, 16)
