"""Methods that fail in the middle of a round, once or always: for tests of what a cluster makes of it."""

import os
from pathlib import Path

import torch

from semidfl.cohort import Cohort
from semidfl.errors import DataError
from semidfl.learn.batch import PseudoLabels
from semidfl.methods.semidfl import SemiDFL
from semidfl.methods.supervised import Supervised
from semidfl.record.log import RoundLog

VICTIM, ROUND = 7, 3


class DiesOnce(SemiDFL):
    """The process that hosts client 7 dies in round 3; a file says that it has."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: RoundLog) -> None:
        mark = Path(os.environ["SEMIDFL_TEST_MARK"])
        if t == ROUND and VICTIM in cohort.ids and not mark.exists():
            mark.touch()
            os._exit(1)
        super().train_classifier(t, cohort, pseudo, log)


class Refuses(Supervised):
    """Client 7 finds something wrong that the user can mend."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: RoundLog) -> None:
        if t == ROUND and VICTIM in cohort.ids:
            raise DataError("client 7 has no such sample")
        super().train_classifier(t, cohort, pseudo, log)
        assert torch.isfinite(cohort.classifier.params).all()
