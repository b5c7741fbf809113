"""Methods that fail in the middle of a round: for tests of what a cluster makes of it."""

import os
from pathlib import Path

from semidfl.cohort import Cohort
from semidfl.errors import DataError
from semidfl.exchange.ray import Key, Mailbox, Parcel
from semidfl.learn.batch import PseudoLabels
from semidfl.methods.base import Method
from semidfl.methods.semidfl import SemiDFL
from semidfl.record.log import RoundLog

VICTIM, ROUND = 7, 3
MARKS = "SEMIDFL_TEST_MARKS"
"""the environment's name of a folder for files that say what has happened"""


class DiesOnce(SemiDFL):
    """The process that hosts client 7 dies in round 3, the first time that a run of this name comes there."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: RoundLog) -> None:
        mark = Path(os.environ[MARKS]) / self.setup.config.name
        if t == ROUND and VICTIM in cohort.ids and not mark.exists():
            mark.touch()
            os._exit(1)
        super().train_classifier(t, cohort, pseudo, log)


class LosesMailOnce(SemiDFL):
    """In round 3 a parcel for client 7 cannot be taken in, the first time that a run of this name comes there."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: RoundLog) -> None:
        mark = Path(os.environ[MARKS]) / self.setup.config.name
        if t == ROUND - 1 and VICTIM in cohort.ids and not mark.exists():
            take_in = Mailbox.put

            def put(mail: Mailbox, epoch: int, key: Key, sender: int, parcel: Parcel) -> None:
                if key[0] == ROUND and not mark.exists():
                    mark.touch()
                    raise MemoryError("no room for a parcel")
                take_in(mail, epoch, key, sender, parcel)

            Mailbox.put = put  # type: ignore[method-assign]
        super().train_classifier(t, cohort, pseudo, log)


class AlwaysDies(Method):
    """The process that hosts client 7 never survives round 3."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: RoundLog) -> None:
        if t == ROUND and VICTIM in cohort.ids:
            os._exit(1)
        super().train_classifier(t, cohort, pseudo, log)


class Refuses(Method):
    """Client 7 finds something wrong that the user can mend."""

    def train_classifier(self, t: int, cohort: Cohort, pseudo: PseudoLabels | None, log: RoundLog) -> None:
        if t == ROUND and VICTIM in cohort.ids:
            raise DataError("client 7 has no such sample")
        super().train_classifier(t, cohort, pseudo, log)
