"""Recipes against the numbers of the paper, transcribed by hand from sections 2 and 6 of PAPER.md."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semidfl import recipes
from semidfl.config import Config, from_toml, leaves, to_toml
from semidfl.errors import ConfigError
from semidfl.methods import find_method
from semidfl.report.levers import ALL, LEVERS, levers

# What the paper's runs on all data sets share.
PAPER = {
    "rounds": 500,
    "variant": "paper",
    "graph.topology": "fig1",
    "graph.clients": 10,
    # 1. neighbourhood pseudo-labelling
    "pseudo.kind": "npl",
    "pseudo.start": 1,
    "pseudo.pool": 0,
    "pseudo.views": 2,
    "pseudo.sharpen": 2.0,
    "pseudo.threshold": 0.95,
    "pseudo.npl_draw": "round",
    "pseudo.threshold_warmup": True,
    "pseudo.adaptive": True,
    "pseudo.labels": "soft",
    "pseudo.prior": 1.0,
    # 2. diffusion
    "generator.kind": "diffusion",
    "generator.iterations": 0,  # E
    "generator.batch": 10,
    "generator.lr": 1e-3,
    "generator.gan_lr": 2e-4,  # of the ablation
    "generator.width": 64,
    "generator.patch": 2,  # a quarter of the pixels, and two downsamplings in all
    "generator.levels": 2,
    "generator.steps": 1000,
    "generator.label_dropout": 0.15,
    "generator.min_snr": 0.0,
    "generator.ema": 0.0,
    # 3. generation
    "generator.start": 50,
    "generator.every": 10,
    "generator.samples": 1000,
    "generator.validation": 100,
    "generator.sampler_steps": 20,
    "generator.guidance": 5.0,
    "generator.keep_agreed": False,
    "generator.fill": False,
    # 4. consensus MixUp
    "mixup.beta": 0.5,
    # 5. classifier
    "classifier.batch": 10,
    "classifier.optimizer": "sgd",
    "classifier.lr": 0.05,
    "classifier.momentum": 0.9,
    "classifier.nesterov": False,
    "classifier.weight_decay": 0.0,
    "classifier.schedule": "constant",
    "classifier.ema": 0.0,
    "classifier.loss": "mean",
    # 6. aggregation
    "aggregation.weights": "adagen",
    "aggregation.robust": "none",
    "aggregation.gossip": 1,
    "aggregation.idle": 1.0,  # all count alike
    # everybody sends everything as it is, and nobody lies
    "exchange.dtype": "fp32",
    "exchange.generator_dtype": "same",
    "exchange.generator_every": 1,
    "attack.kind": "none",
    # score and augmentation
    "evaluation.every": 5,
    "evaluation.last": 10,
    "augment.pad": 4,
    "augment.flip": True,
}
MNIST = {"data.ratio": 0.5, "classifier.model": "cnn", "classifier.iterations": 25}
FASHION = {"data.ratio": 0.5, "classifier.model": "cnn", "classifier.iterations": 50}
CIFAR = {"data.ratio": 5.0, "classifier.model": "resnet18", "classifier.iterations": 50, "generator.levels": 3}
DIGITS = {
    "rounds": 60,
    "classifier.iterations": 10,
    "generator.start": 10,
    "generator.every": 5,
    "generator.samples": 100,
    "generator.validation": 50,
    "generator.lr": 1e-3,
    "generator.patch": 2,
    "data.ratio": 5.0,
}


def differing(config: Config, expected: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not as expected."""
    found = dict(leaves(config))
    return {path: found[path] for path, value in expected.items() if found[path] != value}


@pytest.mark.parametrize(
    ("dataset", "own"),
    [("mnist", MNIST), ("fashion-mnist", FASHION), ("cifar10", CIFAR)],
)
def test_paper_has_the_numbers_of_the_paper(dataset: str, own: dict[str, Any]) -> None:
    config = recipes.paper(dataset)
    assert differing(config, PAPER | own | {"data.dataset": dataset, "data.alpha": 100.0}) == {}


def test_what_the_paper_does_not_name_is_off() -> None:
    """Levers that were added since must not change the paper's runs."""
    named = {*PAPER, *CIFAR, "name", "method", "data.dataset", "data.alpha", "graph.degree", "graph.probability"}
    named |= {"aggregation.clip", "aggregation.trim", "exchange.feedback", "attack.count", "attack.strength"}
    named.add("data.test")  # of folders only
    levers = {path: value for path, value in leaves(recipes.paper()) if path not in named and "compute." not in path}
    assert {path: value for path, value in levers.items() if value} == {}


def test_the_defaults_are_the_paper_on_mnist() -> None:
    assert differing(recipes.paper(), dict(leaves(Config())) | {"name": recipes.paper().name}) == {}


def test_digits_are_the_stand_in() -> None:
    assert differing(recipes.paper("digits"), DIGITS) == {}


@pytest.mark.parametrize("dataset", ["mnist", "digits"])
def test_a_recipe_passes_its_arguments_on(dataset: str) -> None:
    config = recipes.paper(dataset, ratio=0.1, alpha=0.01, topology="topology3", method="dfl-ub", seed=7)
    assert (config.data.ratio, config.data.alpha, config.graph.topology) == (0.1, 0.01, "topology3")
    assert (config.method, config.seed) == ("dfl-ub", 7)
    assert all(word in config.name for word in (dataset, "r0.1", "a0.01", "topology3", "dfl-ub", "s7"))


def test_a_file_of_ones_own_is_run_like_mnist() -> None:
    mine = recipes.paper("/data/my.npz", ratio=2)
    assert differing(mine, PAPER | MNIST | {"data.dataset": "/data/my.npz", "data.ratio": 2.0}) == {}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "paper-mnist-r0.5-a100-fig1-semidfl-s0"),
        ({"dataset": "../data/my digits.npz"}, "paper-my digits-r0.5-a100-fig1-semidfl-s0"),
        ({"topology": "./graphs/edges.txt"}, "paper-mnist-r0.5-a100-edges-semidfl-s0"),
        ({"method": "mine.methods:Best"}, "paper-mnist-r0.5-a100-fig1-Best-s0"),
        ({"dataset": "cifar10", "seed": 3}, "paper-cifar10-r5-a100-fig1-semidfl-s3"),
    ],
)
def test_a_run_is_named_after_its_arguments(arguments: dict[str, Any], name: str) -> None:
    assert recipes.paper(**arguments).name == name


@given(*(st.text(st.characters(exclude_categories=["C", "Z"])) for _ in range(3)))
def test_any_path_makes_a_legal_name(dataset: str, topology: str, method: str) -> None:
    config = recipes.paper(dataset, topology=topology, method=method)  # a name that is no folder's is refused
    assert from_toml(to_toml(config)) == config


def test_a_method_by_its_module_makes_a_legal_name() -> None:
    for make in (recipes.demo, recipes.paper):
        config = make(method="semidfl.methods.semidfl:SemiDFL")
        assert "/" not in config.name
        assert find_method(config.method) is find_method("semidfl")


BUDGET = ("rounds", "classifier.iterations", "classifier.batch", "generator.batch")


@pytest.mark.parametrize("method", ["semidfl", "dfl-ub", "dfl-lb", "mixmatch", "flexmatch", "cbafed"])
@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10"])
def test_tuned_spends_no_more_than_the_paper(dataset: str, method: str) -> None:
    """Same data, graph, models, rounds, steps, batches and messages; what is trained, not how much, may differ."""
    paper, tuned = (make(dataset, 0.1, 0.1, "topology2", method, 3) for make in (recipes.paper, recipes.tuned))
    theirs = dict(leaves(paper))
    same = (*BUDGET, "seed", "method", "classifier.model")
    changed = differing(tuned, theirs)
    assert not [x for x in changed if x in same or x.split(".")[0] in ("data", "graph", "exchange", "evaluation")]
    assert tuned.generator.iterations <= paper.classifier.iterations  # as many as the paper's generator, too
    assert tuned.generator.samples <= paper.generator.samples
    assert tuned.generator.every >= paper.generator.every
    assert tuned.name == paper.name.replace("paper", "tuned")
    assert tuned.variant == "tuned"


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist", "cifar10", "digits"])
def test_all_that_tuned_changes_is_a_lever_that_can_be_taken_back(dataset: str) -> None:
    theirs = dict(leaves(recipes.paper(dataset)))
    changed = {path for path, value in leaves(recipes.tuned(dataset)) if value != theirs[path]}
    back = dict(levers(dataset))
    fields = [path for lever, one in back.items() if lever != "the generator" for path in one]
    assert sorted(fields) == sorted(changed - {"name", "variant", "rounds", "evaluation.every", "evaluation.last"})
    assert all(theirs[path] == value for lever in LEVERS for path, value in back.get(lever, {}).items())
    assert back[ALL] == {}
    if dataset == "cifar10":
        assert back["no generator"] == {"generator.kind": "diffusion"}
        assert "the generator" not in back
    else:
        assert back["the generator"] == {"generator.kind": "none"}


def test_gradients_are_cut_where_runs_come_apart() -> None:
    """On grey images only without MixUp, on CIFAR-10 always; digits keep the numbers that the front page shows."""
    everyone = ("semidfl", "mixmatch", "dfl-ub", "dfl-lb", "flexmatch", "cbafed")
    cut = {d: {m: recipes.tuned(d, method=m).classifier.grad_clip for m in everyone} for d in ("mnist", "digits")}
    assert cut["mnist"] == dict(zip(everyone, (0.0, 0.0, 5.0, 5.0, 5.0, 5.0), strict=True))
    assert set(cut["digits"].values()) == {0.0}
    assert {recipes.tuned("cifar10", method=m).classifier.grad_clip for m in everyone} == {3.0}


def test_baselines_mix_with_equal_weights() -> None:
    expected = {"semidfl": 0.2, "my:Own": 0.2, "flexmatch": 1.0, "dfl-lb": 1.0}
    assert {m: recipes.tuned("cifar10", method=m).aggregation.idle for m in expected} == expected


def test_bounds_learn_from_labels_alone() -> None:
    """Turned images need no labels; all methods that use unlabelled ones get them."""
    everyone = ("semidfl", "mixmatch", "dfl-ub", "dfl-lb")
    found = {m: recipes.tuned("cifar10", method=m).classifier.turns for m in everyone}
    assert found == {"semidfl": 0.5, "mixmatch": 0.5, "dfl-ub": 0.0, "dfl-lb": 0.0}


def test_the_demo_is_digits_on_fig1_with_few_labels() -> None:
    config = recipes.demo()
    assert (config.data.dataset, config.data.ratio, config.data.alpha) == ("digits", 5.0, 0.1)
    assert (config.graph.topology, config.graph.clients, config.method) == ("fig1", 10, "semidfl")


def test_the_demos_two_runs_share_data_graph_and_seed() -> None:
    one, two = recipes.demo("dfl-lb", seed=2), recipes.demo("semidfl", seed=2)
    assert (one.data, one.graph, one.seed) == (two.data, two.graph, two.seed)
    assert (one.method, two.method) == ("dfl-lb", "semidfl")
    assert one.name != two.name


def test_recipes_are_found_by_name() -> None:
    make, arguments = recipes.find_recipe("paper")
    assert make is recipes.paper
    assert list(arguments) == ["dataset", "ratio", "alpha", "topology", "method", "seed"]
    with pytest.raises(
        ConfigError, match=r"no recipe 'papper' \(did you mean 'paper'\?\): legal are demo, paper, tuned"
    ):
        recipes.find_recipe("papper")
