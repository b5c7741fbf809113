"""Many runs spread over a cluster: plain Ray tasks, each a run or a stack of runs that are alike.

A task that dies with its process or node is done again by Ray, elsewhere, and goes on from the run's last checkpoint
where both see the same folder. Whatever a run leaves lies in its own folder, as if it had been run here.
"""

import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from semidfl.cluster.start import Place, cluster, place_of
from semidfl.config import Config, config_hash
from semidfl.errors import SemiDFLError, Stopped
from semidfl.overall import describe
from semidfl.stop import Stop
from semidfl.terminal import Progress
from semidfl.together import run_together

__all__ = ["run_on_cluster", "spread"]

R = TypeVar("R")

_RETRIES = 2
"""of a task whose process or node is lost"""


def spread(ray: Any, place: Place, work: Callable[..., R], jobs: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """(number of the job, what `work` gave or the error that ended it), as they end. Leaving the loop ends the rest."""
    task = ray.remote(work).options(max_retries=_RETRIES, **place.needs)
    open_calls = {task.remote(*job): number for number, job in enumerate(jobs)}
    with Stop() as stop:
        try:
            while open_calls:
                ready, _ = ray.wait(list(open_calls), num_returns=1, timeout=1.0)
                for call in ready:
                    yield open_calls.pop(call), _result(ray, call)
                if stop.requested and open_calls:
                    raise Stopped(f"stopped; {len(open_calls)} of {len(jobs)} tasks were not done")
        finally:
            for call in open_calls:
                ray.cancel(call, force=True)


def _result(ray: Any, call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SemiDFLError):
            return error.cause
        raise
    except ray.exceptions.RayError as error:
        return SemiDFLError(f"lost {_RETRIES + 1} times: {str(error).strip().splitlines()[0]}")


def train_group(configs: list[Config], folders: list[Path], place: Place) -> list[dict[str, Any]]:
    """Runs that are alike, in one process; the summary of each."""
    quiet = Progress(plain=True, stream=io.StringIO())
    results = run_together([place.config(config) for config in configs], folders, quiet)
    for folder in folders:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of no use once a run has ended
    return [result.summary for result in results]


def run_on_cluster(todo: Sequence[Config], runs: Path) -> None:
    """Runs all configs, each into RUNS/HASH; says what has ended, and at the end what has failed."""
    from semidfl.reproduce import groups_of

    runs = runs.resolve()
    with cluster(todo[0]) as ray:
        place = place_of(ray, todo[0])
        groups = groups_of(todo, runs, "cuda" if place.gpu else "cpu")
        jobs = [(group, [runs / config_hash(config) for config in group], place) for group in groups]
        failed, done = [], 0
        for number, found in spread(ray, place, train_group, jobs):
            if isinstance(found, SemiDFLError):
                failed.append(f"{describe(groups[number][0])}: {found}")
                continue
            for config, summary in zip(groups[number], found, strict=True):
                done += 1
                accuracy, seconds = summary["accuracy"], summary["seconds"]
                print(
                    f"run {done}/{len(todo)}  {describe(config)}  accuracy {accuracy:.3f}  {seconds:.0f} s", flush=True
                )
    if failed:
        raise SemiDFLError(f"{len(failed)} of {len(groups)} groups of runs failed; the first: {failed[0]}")
