"""The file of summaries: shared by processes, and whole whatever becomes of them."""

import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from semidfl.record.summaries import add_summaries, read_summaries


def test_a_run_that_ended_in_nan_is_kept_as_its_folder_has_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    add_summaries(path, [{"config": "a", "accuracy": math.nan, "per_client": [0.5, math.nan]}])
    assert read_summaries(path) == {"a": {"config": "a", "accuracy": None, "per_client": [0.5, None]}}


def test_of_several_lines_of_a_run_the_last_counts_and_none_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "results/runs.jsonl"
    for accuracy in (0.1, 0.2, 0.2, 0.3):
        add_summaries(path, [{"config": "a", "accuracy": accuracy}])
    assert read_summaries(path) == {"a": {"config": "a", "accuracy": 0.3}}
    assert len(path.read_text().splitlines()) == 3


def test_processes_may_add_to_the_same_file(tmp_path: Path) -> None:
    path, names = tmp_path / "runs.jsonl", [f"{i}" for i in range(200)]
    summaries = [[{"config": name, "per_client": [0.5] * 100}] for name in names]
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(add_summaries, [path] * len(names), summaries))
    assert sorted(read_summaries(path)) == sorted(names)


def test_what_a_killed_writer_left_of_a_line_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    add_summaries(path, [{"config": "a"}, {"config": "b"}])
    path.write_bytes(path.read_bytes()[:-5])
    assert read_summaries(path) == {"a": {"config": "a"}}
    add_summaries(path, [{"config": "c"}])
    assert read_summaries(path) == {"a": {"config": "a"}, "c": {"config": "c"}}
