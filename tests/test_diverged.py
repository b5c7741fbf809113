"""A run that diverges says so: a network full of NaN has no right answer, not those of the first class."""

from pathlib import Path

import pytest
import torch
from small import tiny

from semidfl import experiment
from semidfl.config import override
from semidfl.data.sources import load
from semidfl.errors import RunFolderError
from semidfl.record.history import History
from semidfl.use.model import load_classifier
from semidfl.web.words import accuracy_words


def test_a_network_of_nan_answers_nothing() -> None:
    method, cohort = experiment.prepare(tiny(), load("digits"))
    params = cohort.classifier.params.clone()
    params[1:3] = torch.nan
    found = experiment.test(method.setup, params)
    assert found[1:3].tolist() == [0, 0]
    assert (found[[0, 3]] > 0).all()


def test_a_run_that_diverges_ends_and_says_so(tmp_path: Path) -> None:
    ended = experiment.run(override(tiny(), {"classifier.lr": 1e30, "generator.kind": "none"}), tmp_path / "run")
    assert ended.accuracy == 0
    history = History(tmp_path / "run")
    history.refresh()
    assert accuracy_words(history) == "No model gives a right answer after round 5: training may have diverged."
    assert "0.00 %" in (tmp_path / "run/model_card.md").read_text()
    with pytest.raises(RunFolderError, match="came apart in training: not all of its numbers are finite"):
        load_classifier(tmp_path / "run")  # for answers and exports, which would be made up
