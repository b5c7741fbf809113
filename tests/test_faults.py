"""Faults against live federations of real processes: the others go on, nothing hangs, and the log says what it was.

Three peers, each a neighbour of both others; c is the one with the fault.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
from federations import QUICK, SHORT, Live, digits, live, reissue, reread

from semidfl.node import identity

ROLES = {"a": "L", "b": "M", "c": "U"}
DEADLINES = SHORT | {"round": 0.6, "transfer": 0.8, "linger": 0.6, "hello": 4.0}
PATIENT = SHORT | {"round": 20.0, "transfer": 10.0, "linger": 10.0, "hello": 20.0}
"""where nobody may be left out, however busy the machine is"""
STARTED = DEADLINES | {"linger": 8.0, "hello": 20.0}
"""where all come, however late, and the fault is yet to happen"""
LONGEST = 30.0
"""seconds for a whole federation: start, four rounds, deadlines that halve (2 x round), transfers, linger, and slack"""


@dataclass(frozen=True, eq=False)  # an Enum takes members with equal values for one
class Case:
    """What the others see of a fault."""

    refused: str = ""
    """the reason for which they refuse"""
    said: str = ""
    """in the log, where the reason alone could mean another fault"""
    missing: bool = True
    """whether c is left out of some rounds"""
    survives: bool = False
    """whether c itself ends well"""


class Fault(Enum):
    KILLED_BEFORE_SENDING = Case()
    KILLED_IN_A_CHUNK = Case(missing=True)
    SLOW = Case(missing=False, survives=True)
    TOO_SLOW = Case(survives=True)
    WRONG_CERTIFICATE = Case("certificate")
    EXPIRED_CERTIFICATE = Case("certificate")
    WRONG_ID = Case("wrong-id")
    NOT_A_NUMBER = Case("not-finite", survives=True)
    INFINITE = Case("not-finite", survives=True)
    FAR_OFF = Case("range", survives=True)
    WRONG_SHAPE = Case("shape", survives=True)
    WRONG_NAMES = Case("names", survives=True)
    OVERSIZE = Case("oversize", survives=True)
    HUGE_MESSAGE = Case("oversize", survives=True)
    GARBAGE = Case("garbage", said="no Head: ", survives=True)
    UNSEALED_GARBAGE = Case("garbage", said="no sealed answer: ", survives=True)
    FOREIGN_SEAL = Case("certificate", said="the seal is not that of c", survives=True)
    GARBAGE_BODY = Case("garbage", said="a header of ", survives=True)
    CHANGED_BODY = Case("hash", survives=True)
    REPLAY = Case("replay", said="an answer to another question", survives=True)
    OLD_ROUND = Case("replay", said="is the oldest wanted", survives=True)
    SLOW_LORIS = Case("slow", survives=True)
    SINGLE_BYTES = Case("garbage", said="broke off or went wrong", survives=True)
    FAR_AHEAD = Case("replay", said="claims to be in round 100000000", survives=True)
    MANY_QUESTIONS = Case("busy", missing=False, survives=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits(tmp_path_factory.mktemp("data"))


def assert_went_on(made: Live, *names: str, rounds: int = 4) -> None:
    """These peers did all their rounds, and their models are sound."""
    for name in names:
        assert made.records(name)[-1]["round"] == rounds
        assert all(torch.isfinite(x).all() for x in made.model(name).values())


def start_slowly(made: Live) -> None:
    """Rounds of at least a tenth of a second, so that there is time to do something to a peer."""
    for name in ROLES:
        made.start(name, fault="slowly")


def refused(made: Live, reason: str) -> int:
    return sum(made.records(name)[-1]["refused"].get(reason, 0) for name in ("a", "b"))


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_the_others_go_on(fault: Fault, data: Path, tmp_path: Path) -> None:
    case = fault.value
    config = QUICK | {"rounds": 4}
    if fault is Fault.KILLED_IN_A_CHUNK:  # a model of several chunks
        config |= {"method": "semidfl", "generator.width": 32, "generator.levels": 3, "generator.start": 90}
    with live(tmp_path / "f", data, ROLES, config, deadlines=DEADLINES if case.missing else PATIENT) as made:
        if fault is Fault.WRONG_CERTIFICATE:
            identity.init(tmp_path / "f" / "other")
            identity.issue(tmp_path / "f" / "other", "c")
        if fault is Fault.EXPIRED_CERTIFICATE:
            shutil.copytree(tmp_path / "f" / "identity", tmp_path / "f" / "expired")
            for end in ("key", "crt"):
                (tmp_path / "f" / "expired" / f"c.{end}").unlink()
            identity.issue(tmp_path / "f" / "expired", "c", days=-0.1)
        started = time.monotonic()
        made.start("a")
        made.start("b")
        made.start("c", fault=fault.name.lower())
        made.ends("a", "b", limit=LONGEST)
        assert time.monotonic() - started < LONGEST
        assert_went_on(made, "a", "b")
        left_out = [record for name in ("a", "b") for record in made.records(name) if "c" in record["missing"]]
        if case.missing:
            assert left_out
            assert re.search(r"  missing: .*\bc \(", made.log("a") + made.log("b"))
        else:
            assert not left_out
        if case.refused:
            assert refused(made, case.refused) > 0, [made.records(name)[-1]["refused"] for name in "ab"]
            assert f"refused {case.refused} from" in made.log("a") + made.log("b")
            assert case.said in made.log("a") + made.log("b")
        else:
            assert not any(set(made.records(name)[-1]["refused"]) - {"slow"} for name in "ab")
        if case.survives:
            made.ends("c", limit=LONGEST)
            assert_went_on(made, "c")


def test_a_peer_that_is_late_is_taken_with_less_weight(data: Path, tmp_path: Path) -> None:
    """Behind by no more than the staleness limit; the simulator has no such case, so the weights are looked at."""
    faults = {"staleness": 3, "discount": 0.25}
    with live(tmp_path / "f", data, ROLES, QUICK | {"rounds": 4}, deadlines=DEADLINES, faults=faults) as made:
        made.start("a")
        made.start("b")
        made.start("c", fault="late")
        made.ends("a", "b", "c", limit=LONGEST)
        stale = [record for record in made.records("a") if "c" in record["stale"]]
        assert stale
        for record in stale:  # on a busy machine b may be behind as well, or missing
            there = [name for name in "abc" if name not in record["missing"]]
            weights = [0.25 ** record["stale"].get(name, 0) for name in there]
            assert record["weights"][0] == pytest.approx([w / sum(weights) for w in weights], abs=1e-5)


def test_killed_and_restarted(data: Path, tmp_path: Path) -> None:
    """It resumes from its checkpoint, takes its neighbours' round and models, and goes on."""
    config = QUICK | {"rounds": 24}
    with live(tmp_path / "f", data, ROLES, config, deadlines=STARTED) as made:
        start_slowly(made)
        made.wait_for_round("c", 3)
        made.kill("c")
        before = made.records("c")[-1]["round"]
        made.wait_for_round("a", before + 5)
        made.start("c", fault="slowly")
        made.ends("a", "b", "c", limit=40.0)
        assert "catches up from round" in made.log("c")
        rounds = [record["round"] for record in made.records("c")]
        assert rounds == sorted(set(rounds))
        assert rounds[-1] == 24
        skipped = max(b - a for a, b in itertools.pairwise(rounds))
        assert skipped > 3
        assert not made.records("a")[-1]["missing"]  # it is one of them again
        assert any("c" in record["missing"] for record in made.records("a"))
        assert_went_on(made, "a", "b", "c", rounds=24)


def test_one_that_claims_to_be_far_ahead_and_has_nothing_to_show_for_it(data: Path, tmp_path: Path) -> None:
    """It is asked ever more rarely, and who was away catches up with the others all the same."""
    with live(tmp_path / "f", data, ROLES, QUICK | {"rounds": 24}, deadlines=STARTED) as made:
        for name, fault in {"a": "slowly", "b": "slowly", "c": "ahead_and_silent"}.items():
            made.start(name, fault=fault)
        made.wait_for_round("b", 3)
        made.kill("b")
        before = made.records("b")[-1]["round"]
        made.wait_for_round("a", before + 6)
        made.start("b", fault="slowly")
        made.ends("a", "b", limit=40.0)
        assert made.log("a").count("too few neighbours give their models") <= 5
        assert min(map(int, re.findall(r"catches up from round \d+ to (\d+)", made.log("b")))) < 24
        assert_went_on(made, "a", "b", rounds=24)


def test_frozen_and_thawed(data: Path, tmp_path: Path) -> None:
    """Its connections stay open and nothing comes: that costs the others a probe a round, not a whole transfer."""
    config = QUICK | {"rounds": 24}
    with live(tmp_path / "f", data, ROLES, config, deadlines=STARTED | {"transfer": 30.0}) as made:
        start_slowly(made)
        made.wait_for_round("a", 3)
        os.kill(made.running["c"].pid, signal.SIGSTOP)
        started, before = time.monotonic(), made.records("a")[-1]["round"]
        made.wait_for_round("a", before + 5)
        assert time.monotonic() - started < 15.0
        os.kill(made.running["c"].pid, signal.SIGCONT)
        made.ends("a", "b", "c", limit=40.0)
        assert any("c" in record["missing"] for record in made.records("a"))
        assert "c" not in made.records("a")[-1]["missing"], made.log("a")
        assert_went_on(made, "a", "b", "c", rounds=24)


def test_restarted_without_its_checkpoint(data: Path, tmp_path: Path) -> None:
    """The disk is lost: it starts from its neighbours' models, not from the first round."""
    config = QUICK | {"rounds": 20, "method": "semidfl", "generator.width": 8}
    with live(tmp_path / "f", data, ROLES, config, deadlines=STARTED) as made:
        start_slowly(made)
        made.wait_for_round("a", 4)
        made.kill("c")
        shutil.rmtree(made.run_folder("c"))
        made.wait_for_round("a", 8)
        made.start("c", fault="slowly")
        made.ends("a", "b", "c", limit=40.0)
        assert made.records("c")[0]["round"] > 6
        assert not made.records("a")[-1]["missing"]
        assert_went_on(made, "a", "b", "c", rounds=20)


def test_a_clock_that_is_wrong(data: Path, tmp_path: Path) -> None:
    """Twelve hours behind, the system's calls included: nothing but certificates depends on the time of day."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make a wrong clock with")
    clock = tmp_path / "clock.so"
    source = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <sys/time.h>
        #include <time.h>
        #define OFF (12 * 3600)
        int clock_gettime(clockid_t id, struct timespec *t) {
            static int (*real)(clockid_t, struct timespec *);
            if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
            int code = real(id, t);
            if (id == CLOCK_REALTIME) t->tv_sec -= OFF;
            return code;
        }
        time_t time(time_t *p) {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            if (p) *p = t.tv_sec;
            return t.tv_sec;
        }
        int gettimeofday(struct timeval *v, void *zone) {
            struct timespec t;
            clock_gettime(CLOCK_REALTIME, &t);
            v->tv_sec = t.tv_sec;
            v->tv_usec = t.tv_nsec / 1000;
            return 0;
        }
    """
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", clock, "-ldl"], input=source, text=True, check=True)
    with live(tmp_path / "f", data, ROLES, QUICK, deadlines=PATIENT) as made:
        made.start("a")
        made.start("b")
        with made.log_file("c").open("wb") as log:
            words = ["env", f"LD_PRELOAD={clock}", sys.executable, "-m", "semidfl", *made.words("c")]
            c = subprocess.Popen([*words, "--compute.threads", "1"], stdout=log, stderr=log)
        try:
            made.ends("a", "b", limit=40.0)
            assert c.wait(20.0) == 0, made.log("c")
        finally:
            c.kill()
            c.wait()
        late = time.time() - 11 * 3600
        assert made.log("c")[:13] < time.strftime("%Y-%m-%d %H", time.localtime(late)) + "~"
        assert not any(record["missing"] for name in ROLES for record in made.records(name))


def test_denied_while_running(data: Path, tmp_path: Path) -> None:
    config = QUICK | {"rounds": 2000}
    with live(tmp_path / "f", data, ROLES, config, deadlines=DEADLINES) as made:
        made.start_all()
        made.wait_for_round("a", 3)
        assert "c" not in made.records("a")[-1]["missing"]
        print_of_c = identity.Certificate.read(tmp_path / "f" / "identity" / "c.crt").fingerprint
        (tmp_path / "f" / "identity" / identity.DENIED).write_text(f"# stolen\n{print_of_c}\n")
        until = time.monotonic() + 15.0
        while not made.records("a")[-1]["refused"].get("denied") and time.monotonic() < until:
            time.sleep(0.05)
        assert made.records("a")[-1]["refused"].get("denied"), made.log("a")
        t = made.records("a")[-1]["round"] + 3
        made.wait_for_round("a", t)
        last = next(record for record in made.records("a") if record["round"] == t)
        assert last["missing"]["c"] == "refused: denied"  # neither answered nor believed
        assert "b" not in last["missing"]


def test_another_config_is_told_apart_at_the_barrier(data: Path, tmp_path: Path) -> None:
    with live(tmp_path / "f", data, ROLES, QUICK, deadlines=DEADLINES | {"hello": 8.0}) as made:
        made.start("a")
        made.start("b")
        until = time.monotonic() + 10.0
        while not all("listening" in made.log(name) for name in "ab") and time.monotonic() < until:
            time.sleep(0.01)
        reread(made, lambda text: text.replace('"classifier.lr" = 0.1', '"classifier.lr" = 0.2'))
        c = made.start("c")
        c.join(LONGEST)
        assert c.exitcode == 2
        assert "disagrees: config: 'lr = 0.2' here, 'lr = 0.1' there" in made.log("c")
        made.ends("a", "b", limit=LONGEST)
        assert "goes on without c: disagrees: config: 'lr = 0.1' here, 'lr = 0.2' there" in made.log("a")


def test_quorum(data: Path, tmp_path: Path) -> None:
    """Without enough neighbours, a peer neither starts nor goes on for ever."""
    faults = {"quorum": 2}
    deadlines = DEADLINES | {"hello": 2.0, "round": 2.0, "alone": 2.0}
    with live(tmp_path / "f", data, ROLES, QUICK | {"rounds": 5000}, deadlines=deadlines, faults=faults) as made:
        a = made.start("a")
        a.join(LONGEST)
        assert a.exitcode == 2
        assert "too few neighbours came" in made.log("a")
        assert "b: not reachable" in made.log("a")
        reread(made, lambda text: text.replace("hello = 2.0", "hello = 20.0"))  # a busy machine starts them apart
        made.start_all()
        made.wait_for_round("a", 2)
        made.kill("c")
        for name in ("a", "b"):
            made.running[name].join(LONGEST)
            assert made.running[name].exitcode == 2
            assert "fewer than 2 neighbours for 2 s; go on with the same command" in made.log(name)


def test_a_peer_with_an_expired_certificate_says_so_itself(data: Path, tmp_path: Path) -> None:
    with live(tmp_path / "f", data, ROLES, QUICK, deadlines=DEADLINES) as made:
        reissue(made, "c", days=-0.1)
        c = made.start("c")
        c.join(LONGEST)
        assert c.exitcode == 2
        assert "the certificate of c has expired" in made.log("c")
