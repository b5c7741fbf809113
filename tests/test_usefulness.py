"""benchmarks/usefulness.py: images are worth what a classifier learns from them alone."""

from pathlib import Path

import numpy as np
import pytest
from scripts import script
from small import tiny

from semidfl import recipes
from semidfl.data.sources import load
from semidfl.experiment import run

usefulness = script("benchmarks/usefulness.py")


def test_right_labels_teach_and_wrong_ones_do_not() -> None:
    config = recipes.paper("digits")
    data = load("digits", config.data, 0)
    images, labels = usefulness.as_many_real(data, 60, seed=0)
    assert np.bincount(labels).tolist() == [60] * 10
    assert usefulness.taught_by(config, data, images, labels, rounds=20) > 80
    assert usefulness.taught_by(config, data, images, np.roll(labels, 60), rounds=20) < 20


def test_it_says_what_generated_and_real_images_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny(attack__kind="noise", attack__who="1"), tmp_path / "run")  # of which the one client knows nothing
    monkeypatch.setattr("sys.argv", ["usefulness.py", str(tmp_path / "run"), "--count", "3", "--rounds", "2"])
    usefulness.main()
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split(" images: ")[0] for line in lines] == ["30 generated", "30 real"]
