"""The benchmark: its plain networks are ours, it counts the work it times, and it says what it was asked."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import assert_close, params_of, random
from small import tiny
from torch import Tensor, nn

from semidfl.bench import measure as measuring
from semidfl.bench.measure import Asked, measure
from semidfl.bench.plain import plain_classifier, plain_generator
from semidfl.bench.reference import Reference
from semidfl.bench.work import one_pass, work_of
from semidfl.bench.workloads import WORKLOADS, Workload, like_authors
from semidfl.cli import main
from semidfl.config import Config, override
from semidfl.data.sources import load
from semidfl.experiment import prepare
from semidfl.models.stacked import Network
from semidfl.recipes import paper
from semidfl.setup import Setup
from semidfl.topology import build


def setup_of(config: Config) -> Setup:
    from semidfl.data.sources import outline

    return Setup.of(config, outline(config.data.dataset), build(config.graph, config.seed))


def filled(plain: nn.Module, network: Network, row: Tensor) -> nn.Module:
    """A plain network with one client's weights, by name."""
    plain.load_state_dict({name: x[0] for name, x in network.named(row[None]).items()})
    return plain


# --- the plain networks are ours ---------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10"])
def test_plain_networks_have_as_many_parameters(dataset: str) -> None:
    setup = setup_of(paper(dataset))
    with torch.device("meta"):
        nets = plain_classifier(setup.config, setup.space), plain_generator(setup.config, setup.space)
    sizes = [sum(p.numel() for p in net.parameters()) for net in nets]
    assert sizes == [setup.classifier.size, setup.generator.size]


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_the_plain_classifier_answers_as_ours(model: str) -> None:
    setup = setup_of(override(paper("digits"), {"classifier.model": model}))
    row, images = params_of(setup.classifier, 1), random(1, 1, 3, *setup.space.shape)
    plain = filled(plain_classifier(setup.config, setup.space), setup.classifier, row[0])
    assert_close(setup.classifier(row, images)[0], plain(images[0]), 1e-4)


@pytest.mark.parametrize("patch", [1, 2, 3])
def test_the_plain_unet_answers_as_ours(patch: int) -> None:
    setup = setup_of(override(paper("digits"), {"generator.patch": patch}))
    network = next(setup.generator.examples())[0]
    row, noisy = params_of(network, 1), random(1, 1, 3, *setup.space.shape)
    level, labels = torch.tensor([[0, 500, 999]]), random(2, 1, 3, 10).softmax(2)
    plain = filled(plain_generator(setup.config, setup.space), network, row[0])
    assert_close(network(row, noisy, level, labels)[0], plain(noisy[0], level[0], labels[0]), 1e-4)


# --- the reference's round ---------------------------------------------------------------------------------


def test_the_reference_takes_every_step() -> None:
    config = tiny()
    method, cohort = prepare(config, load("digits"))
    reference = Reference.of(method, cohort)
    seen: dict[int, int] = {}
    for client in reference.clients:
        assert client.generator is not None
        client.classifier.register_forward_hook(
            lambda net, x, _: (
                seen.update({id(net): seen.get(id(net), 0) + len(x[0])}) if torch.is_grad_enabled() else None
            )
        )
    reference.round()
    seconds = reference.round(generate=True, test=True)
    assert set(seconds) == {"pseudo-label", "generator", "generate", "classifier", "mix", "test", "round"}
    # LMUU: labels, labels and pseudo-labels, pseudo-labels; in the second round generated samples besides.
    c = config.classifier
    expected = [c.iterations * c.batch * (2 * n + 1) for n in (1, 2, 1, 1)]
    assert [seen[id(client.classifier)] for client in reference.clients] == expected


def test_the_reference_mixes_as_we_do() -> None:
    method, cohort = prepare(tiny(method="dfl-lb"), load("digits"))
    reference = Reference.of(method, cohort)
    for value, client in enumerate(reference.clients):
        for p in client.classifier.parameters():
            nn.init.constant_(p, float(value))
    reference._mix(None)
    means = [next(c.classifier.parameters()).flatten()[0].item() for c in reference.clients]
    near = [[i, *row] for i, row in enumerate(method.setup.graph.neighbours)]
    assert means == pytest.approx([sum(row) / len(row) for row in near])


# --- counting ----------------------------------------------------------------------------------------------


def test_operations_of_the_cnn_by_hand() -> None:
    setup = setup_of(paper("mnist"))
    convolutions = 28 * 28 * 9 * 6 + 14 * 14 * 9 * 6 * 25
    linear = 25 * 7 * 7 * 50 + 50 * 10
    assert one_pass(setup.classifier, setup).flop == 2 * (convolutions + linear)


def test_the_authors_unet_is_matched() -> None:
    config = like_authors(paper("mnist"))
    assert config.generator.iterations == 200
    setup = setup_of(config)
    assert one_pass(setup.generator, setup).flop / 2e9 == pytest.approx(1.37, rel=0.06)


def test_samples_of_a_round() -> None:
    config = tiny()
    method, cohort = prepare(config, load("digits"))
    early, late = (work_of(method, cohort, generated) for generated in (False, True))
    c, g = config.classifier, config.generator
    assert early["classifier"].samples == c.iterations * c.batch * (1 + 2 + 1 + 1)
    assert late["classifier"].samples == c.iterations * c.batch * (2 + 3 + 2 + 2)
    assert early["generator"].samples == g.iterations * g.batch * 5
    assert early["generate"].samples == 4 * (g.samples + g.validation)
    assert early["pseudo-label"].samples == config.pseudo.views * sum(cohort.shards.unlabelled.held)
    assert early["test"].samples == 4 * 360
    one = one_pass(method.setup.generator, method.setup)
    assert early["generate"].flop == one.flop * early["generate"].samples * g.sampler_steps * 2


# --- measuring ---------------------------------------------------------------------------------------------


def record(t: int, seconds: float, generate: float = 0.0, test: float = 0.0) -> dict:
    phases = {"classifier": seconds, "generate": generate} | ({"test": test} if test else {})
    made = {"generated_kept": [1]} if generate else {}
    tested = {"accuracy": [1.0]} if test else {}
    return {"round": t, "seconds": phases | {"round": seconds + generate + test}} | made | tested


def test_a_cell_is_extrapolated_without_its_start_up() -> None:
    config = override(paper("mnist"), {"rounds": 100})  # generates at 50, 60, … 100, tests every 5
    rounds = [record(1, 9.0), record(2, 1.0), record(3, 1.0, test=5.0), record(4, 12.0, generate=30.0)]
    rounds += [record(5, 2.0), record(6, 2.0, generate=4.0), record(7, 2.0, test=0.5)]
    rounds += [record(8, 33.0), record(9, 2.0)]  # something was compiled in the eighth
    found = measuring._typical(config, rounds, prepared=3.0)
    assert found["cell_seconds"] == pytest.approx(49 * 1.0 + 51 * 2.0 + 6 * 4.0 + 20 * 0.5)
    assert found["startup_seconds"] == pytest.approx(3.0 + 8.0 + 10.0 + 26.0 + 4.5)


SMALL = Asked(rounds=3, reference_rounds=1)


@pytest.mark.parametrize("kind", ["cell", "sweep", "rounds"])
def test_every_kind_of_workload_is_measured(kind: str) -> None:
    configs = [tiny(rounds=10)] if kind != "sweep" else [tiny(method="flexmatch", seed=s) for s in (0, 1)]
    if kind == "rounds":
        configs = [tiny(rounds=100, evaluation__every=100, generator__start=1, generator__every=100)]
    workload = Workload(kind, "tiny", lambda: configs)
    found = measure("tiny", workload, configs, replace(SMALL, rounds=8 if kind == "cell" else 3))
    json.dumps(found)
    (one,) = found["results"]
    assert one["ratio"] > 0
    assert one["seconds_per_round"] > 0
    assert one["peak_memory_gib"] > 0
    assert one["clients"] == (8 if kind == "sweep" else 4)
    by_name = {phase["phase"]: phase for phase in one["phases"]}
    assert by_name["classifier"]["samples"] > 0
    assert all(0 < phase["share_of_peak"] < 1.5 for phase in one["phases"] if phase["flop"])
    assert ("generate" in by_name) == (kind == "cell")


def test_a_whole_sweep_runs_to_its_end() -> None:
    configs = [tiny(method="dfl-lb", seed=s) for s in (0, 1)]
    found = measure("tiny", Workload("sweep", "tiny", lambda: configs), configs, Asked(1, whole=True))
    (one,) = found["results"]
    assert len(one["accuracy"]) == 2
    assert one["rounds_measured"] == 5
    assert one["cell_seconds"] + one["startup_seconds"] <= one["wall_seconds"]


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_lists_its_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in WORKLOADS)


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_command_prints_what_it_found(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload("rounds", "tiny", lambda: [tiny(method="dfl-lb", rounds=9, evaluation__every=9)])
    monkeypatch.setitem(WORKLOADS, "tiny", workload)
    assert main(["bench", "tiny", "--rounds", "2", "--format", form, "--classifier.iterations", "2"]) == 0
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out)["results"][0]["rounds_measured"] == 3
    else:
        assert "times as fast" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["bench", "minst"], "did you mean 'mnist'"),
        (["bench", "digits", "--rounds", "0"], "--rounds '0' is not legal"),
        (["bench", "digits", "--format", "xml"], "text or json"),
        (["bench", "clients", "--clients", "7"], "one of 10, 100, 1000"),
        (["bench", "digits", "--widht", "8"], "width"),
        (["bench", "work"], "there is no workload"),
    ],
)
def test_mistakes_get_one_clear_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert line in capsys.readouterr().err
