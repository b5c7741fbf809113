"""Runs that train together, held against the same runs done alone."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small import tiny

from semidfl import reproduce, together
from semidfl.config import Config
from semidfl.data.sources import load
from semidfl.errors import ConfigError
from semidfl.exchange.memory import MemoryExchange
from semidfl.experiment import prepare, resume, run, train
from semidfl.record.folder import read_records
from semidfl.together import joined, likeness, run_together


def runs_of(method: str = "semidfl", **switches: object) -> list[Config]:
    """Three runs that differ in all that may differ; their clients hold lists of unequal lengths."""
    return [
        tiny(method=method, name="a", **switches),
        tiny(method=method, name="b", seed=1, data__ratio=20, data__alpha=0.1, **switches),
        tiny(method=method, name="c", seed=2, graph__topology="full", graph__roles="LLMU", **switches),
    ]


def models_of(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{path.stem} {name}": x for path in sorted(folder.glob("models/*")) for name, x in load_file(path).items()}


def same_records(mine: list[dict[str, Any]], alone: list[dict[str, Any]], tolerance: float) -> None:
    assert len(mine) == len(alone)
    for one, other in zip(mine, alone, strict=True):
        assert one.keys() - {"together"} == other.keys() - {"together"}
        for name in other.keys() - {"seconds", "bytes_sent", "together"}:
            np.testing.assert_allclose(
                np.array(one[name], dtype=float), np.array(other[name], dtype=float), atol=tolerance, err_msg=name
            )
        assert one["bytes_sent"] == other["bytes_sent"]


LEVERS = {
    "pseudo__align": True,
    "pseudo__pool": 100,
    "generator__fill": True,
    "classifier__ema": 0.9,
    "generator__ema": 0.9,
    "augment__strong": 1.0,
    "pseudo__masked": True,
    "generator__all_images": True,
    "generator__keep_agreed": True,
}


@pytest.mark.parametrize(
    ("method", "switches"),
    [("semidfl", {}), ("semidfl", LEVERS), ("flexmatch", {}), ("cbafed", {}), ("mixmatch", {"variant": "tuned"})],
    ids=["semidfl", "levers", "flexmatch", "cbafed", "mixmatch"],
)
def test_runs_end_as_they_do_alone_bit_for_bit(method: str, switches: dict[str, object], tmp_path: Path) -> None:
    configs = runs_of(method, compute__deterministic=True, rounds=3, **switches)
    results = run_together(configs, [tmp_path / config.name for config in configs])
    for config, result in zip(configs, results, strict=True):
        alone = run(config, tmp_path / f"{config.name} alone")
        same_records(read_records(result.folder), read_records(alone.folder), 0)
        mine, theirs = models_of(result.folder), models_of(alone.folder)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        for name in ("accuracy", "per_client", "std_over_clients", "config", "bytes_per_client"):
            assert result.summary[name] == alone.summary[name]


@pytest.mark.parametrize("draw", ["round", "sample"])
def test_a_run_that_diverges_leaves_the_others_alone(draw: str) -> None:
    """Also where a run's clients have fewer neighbours than another's."""
    configs = runs_of("semidfl", rounds=2, pseudo__npl_draw=draw, pseudo__align=True, aggregation__momentum=True)
    data = load(configs[0].data.dataset)
    method, cohort, runs = joined(configs, [prepare(config, data) for config in configs])
    cohort.classifier.params[runs[0].rows] = torch.nan
    list(train(configs[0], method, cohort, MemoryExchange(cohort.ids)))
    assert cohort.classifier.params[runs[0].rows].isnan().all()
    assert cohort.classifier.params[runs[0].rows.stop :].isfinite().all()


def test_stacked_they_agree_up_to_rounding(tmp_path: Path) -> None:
    configs = runs_of("dfl-lb", compute__chunk=12, rounds=3)
    results = run_together(configs, [tmp_path / config.name for config in configs])
    for config, result in zip(configs, results, strict=True):
        alone = run(config, tmp_path / f"{config.name} alone")
        mine, theirs = models_of(result.folder), models_of(alone.folder)
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in theirs)


def test_each_can_be_resumed_alone_and_all_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = runs_of(compute__deterministic=True, rounds=4)
    whole = run_together(configs, [tmp_path / f"{config.name} whole" for config in configs])
    half = [tmp_path / config.name for config in configs]

    class Stopping(together.Stop):
        asked = 0

        @property
        def requested(self) -> bool:
            Stopping.asked += 1
            return True

        @requested.setter
        def requested(self, value: bool) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(together, "Stop", Stopping)
        with pytest.raises(together.Stopped, match="stopped after round 1"):
            run_together(configs, half)
    first = resume(half[0])
    with pytest.raises(ConfigError, match="equally far"):
        run_together(configs, half)
    rest = run_together(configs[1:], half[1:])
    for result, other in zip([first, *rest], whole, strict=True):
        same_records(read_records(result.folder), read_records(other.folder), 0)


def test_unlike_runs_are_refused(tmp_path: Path) -> None:
    for other in (tiny(classifier__lr=0.3), tiny(rounds=6), tiny(method="dfl-lb"), tiny(graph__clients=5)):
        assert likeness(other) != likeness(tiny())
        with pytest.raises(ConfigError, match="seed, ratio, alpha and graph"):
            run_together([tiny(), other], [tmp_path / "a", tmp_path / "b"])
    assert len({likeness(config) for config in runs_of()}) == 1
    with pytest.raises(ConfigError, match="one by one"):
        run_together(runs_of(attack__kind="noise"), [tmp_path / name for name in "abc"])


def test_reproduce_stacks_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same table, whether its runs train one by one or several at once."""
    groups: list[int] = []

    def counted(configs: list[Config], *args: Any) -> Any:
        groups.append(len(configs))
        return run_together(configs, *args)

    monkeypatch.setattr(reproduce, "run_together", counted)
    tables = []
    for size in (1, 3):
        monkeypatch.setattr(reproduce, "at_once", lambda *_, size=size: size)
        place = tmp_path / str(size)
        options = reproduce.options_of(
            [("dataset", "digits"), ("method", "dfl-lb,flexmatch"), ("ratio", "5"), ("seeds", "2"), ("rounds", "2"),
             ("out", str(place)), ("runs", str(place / "runs")), ("compute.deterministic", "true")]
        )  # fmt: skip
        reproduce.reproduce("table-main", options, "semidfl reproduce table-main")
        with (place / "table-main-digits.csv").open() as file:
            tables.append([row | {"seconds": ""} for row in csv.DictReader(file)])
    assert groups == [1] * 8 + [3, 3, 1, 1]
    assert tables[0] == tables[1]
