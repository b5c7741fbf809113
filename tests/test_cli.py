"""The command line: what it prints and writes, and one clear line for every mistake."""

import contextlib
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from small import flags, tiny
from torch.nn import functional as F

import semidfl
from semidfl import recipes
from semidfl.cli import COMMANDS, main
from semidfl.config import Config, from_toml, help_of, override, to_toml
from semidfl.data import sources
from semidfl.errors import DataError
from semidfl.estimate import memory

PHASES = {"pseudo-label", "generator", "generate", "classifier", "mix", "round"}
QUICK = flags(method="dfl-lb", rounds=1)
ROUNDS, CLIENTS, DEGREE = 5, 4, 2  # of the tiny run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to runs/ of the folder at hand: not to the repository's."""
    monkeypatch.chdir(tmp_path)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr with which a command is refused."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("semidfl: ")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    return printed.err


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a tiny run that the command line did, and what it printed."""
    printed = io.StringIO()
    place = tmp_path_factory.mktemp("cli")
    with contextlib.chdir(place), contextlib.redirect_stdout(printed):
        assert main(["run", "paper", *flags()]) == 0
    return place / "runs" / "tiny", printed.getvalue()


@pytest.fixture(scope="module")
def records(done: tuple[Path, str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done[0] / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def summary(done: tuple[Path, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((done[0] / "summary.json").read_text())
    return found


def test_a_run_prints_its_result_and_where_it_is(done: tuple[Path, str], summary: dict[str, Any]) -> None:
    *_, result, where = done[1].splitlines()
    assert result.startswith(f"accuracy {100 * summary['accuracy']:.2f} ± {100 * summary['std_over_clients']:.2f} %")
    assert where == "run folder: runs/tiny"


def test_a_run_keeps_its_config(done: tuple[Path, str]) -> None:
    assert from_toml((done[0] / "config.toml").read_text()) == tiny()


def test_every_round_is_recorded(records: list[dict[str, Any]]) -> None:
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert len(record["loss"]) == len(record["generator_loss"]) == CLIENTS
        assert all(math.isfinite(loss) for loss in record["loss"] + record["generator_loss"])
        assert set(record["seconds"]) >= PHASES
        assert sum(s for phase, s in record["seconds"].items() if phase != "round") <= record["seconds"]["round"] + 1e-3


def test_accuracies_are_recorded_when_tested(records: list[dict[str, Any]]) -> None:
    assert [record["round"] for record in records if "accuracy" in record] == [2, 4, 5]
    assert [record["round"] for record in records if "test" in record["seconds"]] == [2, 4, 5]
    for record in records:
        assert all(0 <= a <= 1 for a in record.get("accuracy", [0] * CLIENTS))
        assert len(record.get("accuracy", [0] * CLIENTS)) == CLIENTS


def test_pseudo_labels_are_recorded(records: list[dict[str, Any]]) -> None:
    for record in records:
        counts, precision = record["pseudo_labels"], record["pseudo_precision"]
        assert counts[0] == 0  # an L-client has nothing to label
        assert all(isinstance(n, int) and n >= 0 for n in counts)
        assert [p is None for p in precision] == [n == 0 for n in counts]  # of no labels there is no precision
        assert all(p is None or 0 <= p <= 1 for p in precision)
        assert np.shape(record["thresholds"]) == (CLIENTS, 10)
    assert any(sum(record["pseudo_labels"]) for record in records)


def test_generation_and_weights_are_recorded(records: list[dict[str, Any]]) -> None:
    assert [record["round"] for record in records if "generated_kept" in record] == [2, 4]
    assert [record["round"] for record in records if "generated_accuracy" in record] == [2, 3, 4, 5]
    for record in records:
        weights = np.array(record["weights"])
        assert weights.shape == (CLIENTS, 1 + DEGREE)
        assert weights.sum(1) == pytest.approx(1, abs=1e-5)
        assert (np.ptp(weights) > 0) == (np.ptp(record.get("generated_accuracy", [0])) > 0)
    assert any(np.ptp(record["weights"]) > 0 for record in records)


def test_bytes_are_those_of_the_tensors(done: tuple[Path, str], records: list[dict[str, Any]]) -> None:
    sizes = {
        part: sum(x.nbytes for x in load_file(done[0] / "models" / f"{part}-0000.safetensors").values())
        for part in ("classifier", "generator")
    }
    for record in records:
        sent = record["bytes_sent"]
        assert all(len(clients) == CLIENTS for clients in sent.values())
        assert sent["classifiers"] == [sizes["classifier"] * DEGREE] * CLIENTS
        judged = 8 if "generated_accuracy" in record else 0  # one number
        assert sent["models"] == [(sum(sizes.values()) + judged) * DEGREE] * CLIENTS
        assert all(n > 0 for n in sent["counts"])


def test_the_summary_follows_from_the_records(summary: dict[str, Any], records: list[dict[str, Any]]) -> None:
    tests = np.array([record["accuracy"] for record in records if "accuracy" in record])[-2:]
    assert summary["per_client"] == pytest.approx(tests.mean(0))
    assert summary["accuracy"] == pytest.approx(tests.mean())
    assert summary["std_over_clients"] == pytest.approx(tests.mean(0).std())
    assert summary["last_test"] == pytest.approx(tests[-1])
    assert summary["rounds"] == ROUNDS
    assert summary["seconds"] == pytest.approx(sum(record["seconds"]["round"] for record in records))
    sent = [sum(map(sum, record["bytes_sent"].values())) for record in records]
    assert summary["bytes_per_client"] == pytest.approx(sum(sent) / CLIENTS)
    assert summary["device"].startswith("cpu")
    assert summary["versions"]["torch"] == torch.__version__
    assert {"python", "numpy", "torch"} <= set(summary["versions"])
    assert (summary["name"], summary["method"]) == ("tiny", "semidfl")


def plain_cnn(weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """The paper's classifier in plain torch."""
    x = F.max_pool2d(F.relu(F.conv2d(images, weights["conv1.weight"], weights["conv1.bias"], padding=1)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, weights["conv2.weight"], weights["conv2.bias"], padding=1)), 2)
    x = F.relu(F.linear(x.flatten(1), weights["hidden.weight"], weights["hidden.bias"]))
    return F.linear(x, weights["out.weight"], weights["out.bias"])


def test_models_can_be_used_without_semidfl(done: tuple[Path, str], summary: dict[str, Any]) -> None:
    data = sources.load("digits")
    images = (torch.from_numpy(data.test_images).float() / 255 - 0.5) / 0.5
    for client in range(CLIENTS):
        weights = load_file(done[0] / "models" / f"classifier-{client:04d}.safetensors")
        assert {name: tuple(x.shape) for name, x in weights.items()} == {
            "conv1.weight": (6, 1, 3, 3),
            "conv1.bias": (6,),
            "conv2.weight": (25, 6, 3, 3),
            "conv2.bias": (25,),
            "hidden.weight": (50, 100),
            "hidden.bias": (50,),
            "out.weight": (10, 50),
            "out.bias": (10,),
        }
        right = plain_cnn(weights, images).argmax(1) == torch.from_numpy(data.test_labels)
        assert right.float().mean().item() == pytest.approx(summary["last_test"][client], abs=1.1 / 360)


def test_the_models_are_those_of_the_last_checkpoint(done: tuple[Path, str]) -> None:
    state = load_file(done[0] / "checkpoints" / f"round-{ROUNDS:06d}.safetensors")
    for part in ("classifier", "generator"):
        for client in range(CLIENTS):
            weights = load_file(done[0] / "models" / f"{part}-{client:04d}.safetensors")
            flat = torch.cat([x.flatten() for x in weights.values()]).sort().values
            assert torch.equal(flat, state[f"{part}.params"][client].sort().values)


def test_samples_are_a_picture(done: tuple[Path, str]) -> None:
    pictures = sorted((done[0] / "samples").iterdir())
    assert [path.name for path in pictures] == ["round-000002.png", "round-000004.png"]
    with Image.open(pictures[0]) as picture:
        assert picture.format == "PNG"
        # A row a client, 20 images of 8x8 each pixel 8 wide, a gap of 2 between.
        assert picture.size == (20 * 66 - 2, CLIENTS * 66 - 2)
        assert np.ptp(np.asarray(picture)) > 0


def test_the_same_from_python(tmp_path: Path, summary: dict[str, Any]) -> None:
    result = semidfl.run(tiny(), folder=tmp_path / "mine")
    assert result.accuracy == summary["accuracy"]
    assert result.summary["per_client"] == summary["per_client"]
    assert result.folder == tmp_path / "mine"


# --- run: configs -----------------------------------------------------------------------------------------------------


def dry_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Config, str]:
    """The config and the estimate that --dry-run prints."""
    assert main([*words, "--dry-run"]) == 0
    toml, _, estimate = capsys.readouterr().out.partition("estimate of memory")
    assert "\n# graph: " in toml
    return from_toml(toml.rstrip("# \n")), estimate


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["demo"], recipes.demo()),
        (["demo", "--method", "dfl-lb", "--seed", "3"], recipes.demo("dfl-lb", 3)),
        (["paper", "--dataset=digits", "--alpha", "0.1"], recipes.paper("digits", alpha=0.1)),
        (["paper", "--dataset", "digits", "--rounds", "7"], replace(recipes.paper("digits"), rounds=7)),
        (["paper", "--dataset=digits", "--label-dropout=0"], override(recipes.paper("digits"), {"label_dropout": 0})),
        (["paper", "--dataset=digits", "--seed=1", "--seed=2"], recipes.paper("digits", seed=2)),
        (["paper", *flags()], tiny()),
    ],
)
def test_a_dry_run_prints_the_config_and_the_memory(
    words: list[str], config: Config, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed, estimate = dry_run(["run", *words], capsys)
    assert printed == config
    rows = {
        line.rpartition("MiB")[0].split("  ")[0].strip("# "): line.split()[-2] for line in estimate.splitlines()[1:]
    }
    assert float(rows.pop("all")) == pytest.approx(sum(map(float, rows.values())), abs=0.1 * len(rows))
    assert any("classifier" in name for name in rows)
    assert any("generator" in name for name in rows) == (config.method == "semidfl")
    assert not any(tmp_path.iterdir())


def test_more_clients_need_more_memory(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        dry_run(["run", "paper", *flags(graph__clients=n, graph__roles="")], capsys)[1].split()[-2] for n in (4, 400)
    )
    assert float(many) > 10 * float(few)


def test_a_dry_run_needs_no_download(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DataError("no network")

    monkeypatch.setattr(sources, "fetch", refuse)
    assert dry_run(["run", "paper"], capsys)[0] == recipes.paper()


def test_a_recipes_argument_is_known_by_its_path_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(["run", "paper", "--data.dataset=digits"], capsys)[0] == recipes.paper("digits")


def test_a_later_value_wins(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "paper", "--dataset=digits", "--data.ratio=1", "--ratio=2"]
    assert dry_run(words, capsys)[0].data.ratio == 2


def test_a_config_file_is_a_recipe(tmp_path: Path) -> None:
    config = tiny(method="dfl-lb", rounds=1)
    (tmp_path / "mine.toml").write_text(to_toml(config))
    assert main(["run", "mine.toml", "--seed", "3", "--name=other"]) == 0
    kept = from_toml((tmp_path / "runs" / "other" / "config.toml").read_text())
    assert kept == override(config, {"seed": 3, "name": "other"})


def test_a_folder_in_use_is_kept_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "paper", *QUICK]) == 0
    before = (tmp_path / "runs" / "tiny" / "config.toml").read_text()
    capsys.readouterr()
    message = refusal(["run", "paper", *QUICK, "--seed=1"], capsys)
    assert all(word in message for word in ("runs/tiny already holds a run", "resume", "--name", "--overwrite"))
    assert (tmp_path / "runs" / "tiny" / "config.toml").read_text() == before
    assert main(["run", "paper", *QUICK, "--seed=1", "--overwrite"]) == 0
    assert from_toml((tmp_path / "runs" / "tiny" / "config.toml").read_text()).seed == 1


# --- mistakes ---------------------------------------------------------------------------------------------------------

RUN = ["run", "paper", *flags()]
SHORT = ["run", "paper", "--dataset=digits", "--device=cpu", "--threads=1"]  # on fig1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rnu"], ["no command 'rnu'", "did you mean 'run'"]),
        (["run", "pepar"], ["no recipe 'pepar'", "did you mean 'paper'", "demo, paper"]),
        (["run", "missing.toml"], ["cannot read missing.toml", "No such file"]),
        ([*RUN, "--treshold=1"], ["no field 'treshold'", "did you mean 'threshold'"]),
        ([*RUN, "--batch=3"], ["'batch'", "classifier.batch or generator.batch"]),
        ([*RUN, "--seed"], ["--seed needs a value"]),
        ([*RUN, "--seed="], ["seed = ''", "a whole number"]),
        ([*RUN, "seed=3"], ["'seed=3'", "--field"]),
        ([*RUN, "--rounds=ten"], ["rounds = 'ten'", "a whole number"]),
        ([*RUN, "--data.ratio=0"], ["data.ratio = 0.0", "above 0 and at most 100"]),
        ([*SHORT, "--ratio", "0"], ["data.ratio = 0.0", "above 0 and at most 100"]),
        ([*SHORT, "--alpha", "-1"], ["data.alpha = -1.0", "above 0"]),
        ([*SHORT, "--alpha=-1"], ["data.alpha = -1.0", "above 0"]),
        ([*RUN, "--data.dataset=digts"], ["no data set 'digts'", "did you mean 'digits'"]),
        ([*RUN, "--data.dataset=none.npz"], ["none.npz", "no such file", "x_train"]),
        ([*SHORT, "--method=semidlf"], ["method = 'semidlf'", "did you mean 'semidfl'", "dfl-lb"]),
        ([*SHORT, "--method=nowhere:Mine"], ["method = 'nowhere:Mine'", "nowhere"]),
        ([*SHORT, "--method=os:path"], ["method = 'os:path'", "semidfl.Method"]),
        ([*SHORT, "--topology=fig2"], ["graph.topology = 'fig2'", "did you mean 'fig1'"]),
        ([*SHORT, "--topology=./edges.txt"], ["edges.txt"]),
        ([*SHORT, "--clients=7"], ["graph.topology = 'fig1'", "10 clients", "graph.clients = 7"]),
        ([*SHORT, "--roles=LMU"], ["graph.roles = 'LMU'", "3 letters", "graph.clients = 10"]),
        ([*RUN, "--device=gpu"], ["compute.device = 'gpu'", "auto, cpu, cuda or cuda:N"]),
        ([*RUN, "--device=cuda:99"], ["compute.device = 'cuda:99'"]),
        ([*RUN, "--name=a/b"], ["name = 'a/b'"]),
        ([*RUN, "--model=cnnn"], ["classifier.model = 'cnnn'", "cnn, resnet18"]),
        (["resume"], ["usage: semidfl resume FOLDER"]),
        (["resume", "nowhere"], ["no run folder nowhere"]),
        (["data"], ["usage: semidfl data"]),
        (["data", "check", "digts"], ["no data set 'digts'", "did you mean 'digits'"]),
        (["data", "get", "none"], ["no data set 'none'", "digits, mnist, fashion-mnist, cifar10"]),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_a_mistake_is_answered_with_one_line(
    words: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(words, capsys)
    assert all(part in message for part in parts), message
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_answered_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "compute.device = 'cuda'" in refusal([*RUN, "--device=cuda"], capsys)


@pytest.mark.parametrize("text", [b"rounds =\n", b"rounds = ten\n", b"[data\n"])
def test_a_broken_config_file_is_answered_with_one_line(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.toml").write_bytes(text)
    assert "not valid TOML" in refusal(["run", "broken.toml"], capsys)


def test_a_config_file_in_another_encoding_is_answered_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.toml").write_bytes('name = "größe"\n'.encode("latin-1"))
    assert "latin.toml" in refusal(["run", "latin.toml"], capsys)


@pytest.mark.parametrize("flag", ["--method=:Mine", "--seed=" + "9" * 400])
def test_odd_mistakes_are_answered_with_one_line_too(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    refusal([*SHORT, flag], capsys)


@pytest.mark.parametrize(
    "extremes",
    [
        "--mixup.beta=100 --views=1 --pad=64 --generator.start=1",
        "--mixup.beta=0 --samples=1 --validation=1 --classifier.batch=1",
        "--classifier.lr=1e6",  # losses become NaN, null in the metrics
        "--pseudo.sharpen=100 --data.alpha=1e-9 --levels=6",
        "--pseudo.threshold=1 --label_dropout=1 --guidance=1 --keep_agreed=true",
        "--pseudo.start=100 --generator.start=100",
        "--data.ratio=100 --evaluation.every=100 --evaluation.last=100",
        "--data.ratio=0.15",  # two labels in all: most classes nobody has
        "--graph.clients=1 --graph.roles=",
        "--graph.roles=LLLL --precision=bf16",
        "--graph.roles=MMMM --weights=adatest --pseudo.kind=vanilla",
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of clients that get nothing
def test_what_the_config_allows_runs(extremes: str, tmp_path: Path) -> None:
    assert main(["run", "paper", *flags(rounds=2), *extremes.split()]) == 0
    assert len((tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sampler_with_more_steps_than_noise_levels_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "--rounds=1", "--generator.width=8", "--generator.steps=20", "--generator.sampler_steps=20"]
    assert "generator.sampler_steps" in refusal(words, capsys)


# --- help, data, version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["run", "--help"], ["run", "paper", "--help"], ["run"]])
def test_help_lists_every_field_and_recipe(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    printed = capsys.readouterr().out
    for path, text in help_of().items():
        assert f"--{path} " in printed
        assert text in printed
    assert all(name in printed for name in recipes.RECIPES)


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("demo", "run RECIPE", "resume FOLDER", "data list", "version"))


@pytest.mark.parametrize("words", [[command] for command in COMMANDS] + [["federation", "new"], ["identity", "issue"]])
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main([*words, "--help"]) == 0
    assert "usage" in capsys.readouterr().out


def test_flags_before_the_recipe_are_not_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipe" in refusal(["run", "--seed", "3", "paper"], capsys)


def test_data_list_names_every_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["digits", "mnist", "fashion-mnist", "cifar10"]
    assert "1437 +   360 images  1x8x8" in rows[0]


def test_data_check_counts_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "digits"]) == 0
    *_, total = rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert total == ["all", "1437", "360"]
    counts = np.array([row[1:] for row in rows[2:-1]], dtype=int)
    assert counts.shape == (10, 2)
    assert counts.sum(0).tolist() == [1437, 360]


def test_data_check_counts_what_has_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = np.array([0, 1, 1, -1, -1, -1])
    images = np.zeros((6, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    assert main(["data", "check", str(tmp_path / "some.npz")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == [["0", "1", "1"], ["1", "2", "1"], ["no", "label", "3", "0"], ["all", "6", "2"]]


def test_the_estimate_knows_averages_moments_and_each_networks_steps() -> None:
    paper = recipes.paper("digits")
    usual = memory(paper)
    for values in ({"classifier.ema": 0.9}, {"classifier.optimizer": "adam"}):
        name = "classifier: weights, optimiser"
        assert memory(override(paper, values))[name] == 1.5 * usual[name]
    fewer = memory(override(paper, {"generator.iterations": 1}))
    assert fewer["generator: a round's batches"] == usual["generator: a round's batches"] / 10
    assert fewer["classifier: a round's batches"] == usual["classifier: a round's batches"]
    turned = memory(override(paper, {"classifier.turns": 1.0}))  # a fourth block of images
    assert turned["classifier: a round's batches"] == usual["classifier: a round's batches"] * 4 / 3


def test_data_get_verifies_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "digits"]) == 0
    assert "digits is verified" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == 0
    assert capsys.readouterr().out == f"semidfl {semidfl.__version__}\n" * 2


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "semidfl", "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"semidfl {semidfl.__version__}\n"
