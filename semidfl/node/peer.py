"""A peer's life: join, train, checkpoint each round, catch up, serve to the end, leave with a model.

The rounds are those of the simulator, with an exchange that goes over the network and a cohort of this peer's own
clients.
"""

import logging
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semidfl.cohort import Cohort, Learner
from semidfl.config import Config, config_hash, override
from semidfl.data.sources import load
from semidfl.errors import ConfigError, FederationError, Stopped
from semidfl.exchange.base import Neighbourhood
from semidfl.exchange.grpc import GrpcExchange
from semidfl.exchange.plan import Meeting
from semidfl.exchange.refuse import Tally
from semidfl.exchange.spare import Spared
from semidfl.experiment import Rounds, gather, keep, prepare, save_checkpoint, save_models, test, train
from semidfl.learn.aggregate import equal_weights
from semidfl.learn.robust import combiner
from semidfl.methods import Method, find_method
from semidfl.node.audit import Audit
from semidfl.node.deny import DenyList
from semidfl.node.federation import Federation
from semidfl.node.identity import DENIED, Identity, readable_by_others
from semidfl.node.restart import SENT_BEFORE, open_folder, sent, take_up
from semidfl.node.site import load_site
from semidfl.record.card import model_card
from semidfl.record.clients import write_clients, write_confusion
from semidfl.record.folder import RunFolder
from semidfl.report.html import at_the_end
from semidfl.setup import Setup
from semidfl.stop import Stop

__all__ = ["Peer", "Place", "run_peer"]


@dataclass(frozen=True)
class Place:
    """Where a peer finds its things."""

    folder: Path
    """its run folder"""
    identity: Path | None
    """folder with its key and certificates; None: insecure"""
    data: Path | None = None
    """its own data"""
    compute: Mapping[str, str] = field(default_factory=dict)
    """settings of compute.*, which each peer chooses by itself"""
    overwrite: bool = False


def run_peer(
    federation: Federation,
    name: str,
    place: Place,
    log: logging.Logger,
    on_tally: Callable[[Tally], None] = lambda tally: None,
) -> dict[str, Any]:
    """Takes part in a federation from start or checkpoint to the end; returns the summary."""
    federation.member(name)
    identity = None if place.identity is None else Identity.load(place.identity, name)
    if place.identity is not None and readable_by_others(place.identity, name):
        log.warning("others on this machine can read %s: chmod 600 it", place.identity / f"{name}.key")
    method, cohort = _prepare(federation, name, place)
    config = override(method.setup.config, {"name": name})
    with open_folder(place.folder, config, place.overwrite) as kept:
        done, marks = take_up(kept, config, federation, cohort)
        write_clients(kept, federation.images.classes, method.setup, cohort)
        audit = Audit(kept.path)
        denied = DenyList((place.identity or place.folder) / DENIED, log)
        try:
            with GrpcExchange(federation.plan(name), identity, audit, log, denied.holds) as exchange:
                on_tally(exchange.tally)
                log.info("round %d of %d, listening on port %d", done + 1, federation.config.rounds, exchange.port)
                summary = Peer(federation, name, method, cohort, exchange, kept, marks, audit, log).live(done)
        finally:
            audit.flush(federation.config.rounds)
            audit.close()
    if method.setup.config.compute.report:  # last, when no neighbour waits for anything any more
        at_the_end(place.folder)
    return summary


class Peer:
    def __init__(
        self,
        federation: Federation,
        name: str,
        method: Method,
        cohort: Cohort,
        exchange: GrpcExchange,
        kept: RunFolder,
        marks: Mapping[str, str],
        audit: Audit,
        log: logging.Logger,
    ) -> None:
        self.federation, self.name, self.method, self.cohort = federation, name, method, cohort
        self.exchange, self.kept, self.marks, self.audit, self.log = exchange, kept, marks, audit, log
        self.config = method.setup.config
        self._doubted = Spared(most=self.config.rounds)  # those far ahead who had no models to show for it
        self._lonely = 0.0  # since when there are fewer neighbours than the quorum; 0: there are enough

    def live(self, done: int) -> dict[str, Any]:
        """From the round after `done` to the last, and the goodbye."""
        self.exchange.enter(min(done + 1, self.config.rounds))
        if done < self.config.rounds:
            self._train(done)
        else:  # killed after the last round: all that is missing is its end, whoever may still be there
            self._offer(done)
        save_models(self.kept, self.method, self.cohort)
        summary = self._summary()
        self._write_up(summary)
        self.log.info("done: %s", _score_text(summary))
        if unserved := self.exchange.finish():
            self.log.warning("leaves although %s never said that they have all they need", ", ".join(sorted(unserved)))
        return summary

    def _train(self, done: int) -> None:
        missing = self.exchange.hello(self.federation.faults.quorum, restarted=done > 0)
        for who, why in missing.items():
            self.log.warning("goes on without %s: %s", who, why)
        rounds = train(self.config, self.method, self.cohort, self.exchange, done + 1)
        self._catch_up(rounds, restarted=True)
        done = rounds.t - 1
        self._offer(done)
        with Stop() as stop:
            for record in rounds:
                done = record["round"]
                self._record(record)
                if done < self.config.rounds:
                    if stop.requested:
                        raise Stopped(f"stopped after round {done}; go on with the same command")
                    self._check_quorum(done)
                    self._catch_up(rounds, restarted=False)

    def _write_up(self, summary: dict[str, Any]) -> None:
        """What a simulated run leaves behind, too, as far as this peer knows it."""
        setup, mean = self.method.setup, math.nan
        if setup.test_labels.numel():
            write_confusion(self.kept, setup, self.cohort)
            mean = float(test(setup, self.cohort.classifier.params.mean(0, keepdim=True)))
        self.kept.write_text("model_card.md", model_card(setup, self.cohort, summary, mean))
        self.kept.write_summary(summary)

    def _record(self, record: dict[str, Any]) -> None:
        """A round is over: keep it, offer its models to whoever has to catch up, say how it went."""
        done, meeting = record["round"], self.exchange.report()
        record |= {
            "missing": meeting.missing,
            "absent": sorted(i for name in meeting.missing for i in self.federation.clients_of(name)),
            "stale": meeting.stale,
            "refused": self.exchange.tally.snapshot(),
            "bytes_received": meeting.received,
            "present": len(meeting.present),
        }
        self._lonely = self._lonely_since(meeting)
        self._offer(done)
        keep(self.method, self.kept, record, lambda: self.cohort)
        save_checkpoint(self.config, self.kept, done, self.cohort, self.marks)
        self.audit.flush(done)
        self.log.info("%s", _round_text(record, self.config.rounds))

    def _offer(self, done: int) -> None:
        self.exchange.publish(done, "state", _state(self.cohort))

    def _lonely_since(self, meeting: Meeting) -> float:
        enough = len(meeting.present) >= min(self.federation.faults.quorum, len(self.exchange.plan.neighbours))
        return 0.0 if enough else self._lonely or time.monotonic()

    def _check_quorum(self, done: int) -> None:
        limit = self.federation.deadlines.alone
        if self._lonely and time.monotonic() - self._lonely > limit:
            raise FederationError(
                f"stopped after round {done}: fewer than {self.federation.faults.quorum} neighbours for {limit:g} s; "
                "go on with the same command when they are back"
            )

    def _catch_up(self, rounds: Rounds, restarted: bool) -> None:
        """Where neighbours are far ahead: take their models and their round, and go on from there.

        A peer that was away takes the mean of its neighbours' models; one that trained on, as half of a network that
        was cut, puts its own among them. Who is far ahead by its own word, but has no models to show for it, is not
        believed for a while: each time would cost all others a wait.
        """
        faults, robust = self.federation.faults, self.config.aggregation.robust != "none"
        # Where liars are reckoned with, the word of one neighbour is not enough.
        needed = min(max(faults.witnesses, 2 * robust), len(self.exchange.plan.neighbours))
        seen = {name: at for name, at in self.exchange.at.items() if rounds.t >= self._doubted.until(name)}
        if len(seen) < needed:
            return
        target = min(sorted(seen.values(), reverse=True)[needed - 1], self.config.rounds)
        if target <= rounds.t + faults.staleness:
            return
        oldest = target - faults.staleness - 1
        asked = [name for name, at in seen.items() if at > oldest]
        answers = self.exchange.collect("state", _state(self.cohort), oldest, asked)
        for name in asked:
            if name in answers:
                self._doubted.answers(name)
            else:
                self._doubted.fails(name, rounds.t)
        found = [answer.tensors for answer in answers.values() if answer.tensors is not None]
        if len(found) < needed:
            self.log.warning("is %d rounds behind, but too few neighbours give their models", target - rounds.t)
            return
        _adopt(self.cohort, found, self.config, keep_own=robust or not restarted)
        who = ", ".join(sorted(answers))
        self.log.info("catches up from round %d to %d with the models of %s", rounds.t, target, who)
        rounds.t = target

    def _summary(self) -> dict[str, Any]:
        records = self.kept.records()
        tests = [r["accuracy"] for r in records if "accuracy" in r][-self.config.evaluation.last :]
        self.audit.flush(self.config.rounds)
        judged = [r["generated_accuracy"] for r in records if "generated_accuracy" in r]
        return {
            "name": self.name,
            "federation": self.federation.name,
            "method": self.config.method,
            "config": config_hash(self.config),
            "agreement": self.federation.agreement,
            "clients": list(self.cohort.ids),
            "held_out_accuracy": torch.tensor(tests).mean(0).tolist() if tests else None,
            "generated_accuracy": judged[-1] if judged else None,
            "rounds": len(records),
            "seconds": sum(r["seconds"]["round"] for r in records),
            "bytes_sent": sent(self.kept.path) - int(self.marks[SENT_BEFORE]),
            "bytes_received": sum(r["bytes_received"] for r in records),
            "rounds_with_missing": sum(bool(r["missing"]) for r in records),
            "refused": self.exchange.tally.snapshot(),
            "device": str(self.method.setup.device),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }


# --- before the first round -------------------------------------------------------------------------------------------


def _prepare(federation: Federation, name: str, place: Place) -> tuple[Method, Cohort]:
    """The method and this peer's cohort, from its part of the shared data set or from its own data."""
    if bad := [path for path in place.compute if not path.startswith("compute.") or path.endswith("deterministic")]:
        raise ConfigError(f"{bad[0]} stands in the federation file: a peer chooses only compute.* by itself")
    config = override(federation.config, place.compute)
    ids = federation.clients_of(name)
    if federation.dataset:
        if place.data is not None:
            raise ConfigError(f"--data is not legal here: all peers share out the data set {federation.dataset!r}")
        return prepare(config, load(federation.dataset, config.data, config.seed), ids, federation.graph)
    if config.data.held_out:
        raise ConfigError("data.held_out is not legal here: peers with data of their own test on data.test of it")
    if place.data is None:
        raise ConfigError("--data is missing: a folder or an .npz with this peer's own samples")
    kind = find_method(config.method)
    space, role = federation.images.space, "L" if kind.all_labelled else federation.member(name).role
    site = load_site(place.data, space, role, federation.images.classes, config.data.test, config.seed)
    method = kind(Setup.build(config, federation.graph, space, site.test_images, site.test_labels))
    return method, gather(method, ids, site.shards(method.setup.device))


# --- models of the neighbours -----------------------------------------------------------------------------------------


def _learners(cohort: Cohort) -> dict[str, Learner]:
    both = {"classifier": cohort.classifier, "generator": cohort.generator}
    return {part: learner for part, learner in both.items() if learner is not None}


def _state(cohort: Cohort) -> dict[str, Tensor]:
    """What a peer that catches up needs."""
    return {part: learner.params for part, learner in _learners(cohort).items()}


def _adopt(cohort: Cohort, found: list[Mapping[str, Tensor]], config: Config, keep_own: bool) -> None:
    """Takes the models of neighbours, all alike, by the rule of mixing that the config names."""
    mix, clients = combiner(config.aggregation, config.compute.deterministic), len(cohort.ids)
    for part, learner in _learners(cohort).items():
        theirs = torch.cat([tensors[part] for tensors in found]).to(learner.params)
        others = torch.arange(clients, clients + len(theirs), device=theirs.device).expand(clients, -1)
        index = torch.cat([torch.arange(clients, device=theirs.device)[:, None], others], dim=1)
        mask = torch.ones_like(index, dtype=torch.bool)
        mask[:, 0] = keep_own
        near = Neighbourhood(index, mask)
        weights = equal_weights(near)
        own, average = learner.params, learner.average
        learner.params = mix(weights, near, own, torch.cat([own, theirs]))
        if average is not None:
            learner.average = mix(weights, near, average, torch.cat([average, theirs]))


# --- words ------------------------------------------------------------------------------------------------------------


def _round_text(record: Mapping[str, Any], rounds: int) -> str:
    text = f"round {record['round']}/{rounds}  {record['seconds']['round']:.2f} s"
    if "accuracy" in record:
        text += f"  held-out accuracy {_mean(record['accuracy']):.3f}"
    if "generated_accuracy" in record:
        text += f"  on generated data {_mean(record['generated_accuracy']):.3f}"
    if record["missing"]:
        text += "  missing: " + ", ".join(f"{who} ({why})" for who, why in sorted(record["missing"].items()))
    if record["stale"]:
        text += "  behind: " + ", ".join(f"{who} by {age}" for who, age in sorted(record["stale"].items()))
    return text


def _score_text(summary: Mapping[str, Any]) -> str:
    held, made = summary["held_out_accuracy"], summary["generated_accuracy"]
    one = f"accuracy on own held-out labels {100 * _mean(held):.2f} %" if held else "no held-out labels here"
    two = f"on generated data {100 * _mean(made):.2f} %" if made else "nothing generated"
    return f"{one}, {two}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
