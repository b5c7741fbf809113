"""The runs that each table and figure of the paper needs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semidfl import recipes
from semidfl.config import config_hash, override
from semidfl.report.levers import levers
from semidfl.report.plans import Options, Plan, make_plan
from semidfl.reproduce import groups_of, options_of


def plan_of(name: str, **options: Any) -> Plan:
    return make_plan(name, Options(**options))


def test_main_table_has_every_cell_and_the_upper_bound_once_an_alpha() -> None:
    plan = plan_of("table-main")
    assert len(plan.cells) == 6 * 2 * 6
    # DFL-UB: 3 data sets, 2 alphas; the others: 6 columns, 2 alphas; all with 3 seeds.
    assert len(plan.runs()) == 3 * (3 * 2 + 5 * 6 * 2)
    (cell,) = (c for c in plan.cells if (c.what, c.dataset, c.ratio, c.alpha) == ("flexmatch", "cifar10", 1, 0.1))
    assert cell.row == ("FlexMatch", "0.1")
    assert cell.column == "CIFAR-10, r = 1 %"
    assert [c.seed for c in cell.configs] == [0, 1, 2]
    expected = recipes.paper("cifar10", 1.0, 0.1, "fig1", "flexmatch", seed=1)
    assert config_hash(cell.configs[1]) == config_hash(expected)
    upper = [c for c in plan.cells if c.what == "dfl-ub" and c.dataset == "mnist" and c.alpha == 100]
    assert [c.ratio for c in upper] == [0.5, 0.1]
    assert upper[0].configs == upper[1].configs


def test_digits_have_their_own_ratios() -> None:
    plan = plan_of("table-main", datasets=("digits",), seeds=2)
    assert {(c.ratio, c.alpha) for c in plan.cells} == {(5, 100), (2, 100), (5, 0.1), (2, 0.1)}
    assert len(plan.cells) == 24
    assert len(plan.runs()) == 44


def test_first_seeds_of_all_cells_come_first() -> None:
    seeds = [config.seed for config in plan_of("table-main", datasets=("digits",)).runs().values()]
    assert seeds == sorted(seeds)


def test_topology_table_gives_each_data_set_its_graph() -> None:
    plan = plan_of("table-topology", seeds=1)
    graphs = {(c.dataset, c.configs[0].graph.topology) for c in plan.cells}
    assert graphs == {("mnist", "topology1"), ("fashion-mnist", "topology2"), ("cifar10", "topology3")}
    digits = plan_of("table-topology", datasets=("digits",), seeds=1)
    assert len(digits.cells) == 3 * 24
    assert {c.configs[0].graph.topology for c in digits.cells} == {"topology1", "topology2", "topology3"}


@pytest.mark.parametrize(
    ("name", "dataset", "path", "values"),
    [
        ("table-pseudo-labels", "cifar10", "pseudo.kind", ["vanilla", "apl", "npl"]),
        ("table-mixup", "mnist", "generator.kind", ["none", "gan", "diffusion"]),
        ("table-aggregation", "fashion-mnist", "aggregation.weights", ["constant", "adatest", "adagen"]),
    ],
)
def test_ablations_differ_in_one_switch(name: str, dataset: str, path: str, values: list[str]) -> None:
    plan = plan_of(name, seeds=1)
    assert len(plan.cells) == 4 * 3
    assert {c.dataset for c in plan.cells} == {dataset}
    for start in range(0, 12, 3):
        three = plan.cells[start : start + 3]
        assert [c.what for c in three] == values
        plain = recipes.paper(dataset, three[0].ratio, three[0].alpha)
        assert [config_hash(c.configs[0]) for c in three] == [config_hash(override(plain, {path: v})) for v in values]
    # Ours, the last, is a cell of the main table too: the run is shared.
    main_runs = plan_of("table-main", datasets=(dataset,), seeds=1).runs()
    assert {config_hash(c.configs[0]) for c in plan.cells if c.what == values[-1]} <= set(main_runs)


def test_figures_have_the_papers_grids() -> None:
    alpha, ratio = plan_of("figure-alpha", seeds=1), plan_of("figure-ratio", seeds=1)
    assert {(c.dataset, c.ratio) for c in alpha.cells} == {("fashion-mnist", 0.5), ("cifar10", 5)}
    assert {c.alpha for c in alpha.cells} == {100, 10, 1, 0.1, 0.01}
    assert {c.alpha for c in ratio.cells} == {100}
    assert [c.ratio for c in ratio.cells if c.what == "semidfl" and c.dataset == "cifar10"] == [5, 4, 3, 2, 1]
    assert {c.ratio for c in ratio.cells if c.dataset == "fashion-mnist"} == {0.5, 0.4, 0.3, 0.2, 0.1}


def test_overrides_reach_every_run() -> None:
    plan = plan_of("table-mixup", datasets=("digits",), values={"rounds": "7", "classifier.lr": "0.1"})
    assert {(c.rounds, c.classifier.lr) for c in plan.runs().values()} == {(7, 0.1)}


def test_lists_may_be_repeated_or_parted_by_commas() -> None:
    pairs = [("dataset", "digits,mnist"), ("dataset", "digits"), ("data.ratio", "5"), ("ratio", "2"), ("rounds", "9")]
    options = options_of([*pairs, ("seeds", "4"), ("out", "there")])
    assert options.datasets == ("digits", "mnist")
    assert options.ratios == (5.0, 2.0)
    assert (options.seeds, options.values, options.out) == (4, {"rounds": "9"}, Path("there"))


def test_the_recipe_is_the_one_asked_for() -> None:
    for name in ("paper", "tuned"):
        runs = plan_of("table-main", recipe=name, datasets=("digits",), seeds=1).runs().values()
        assert {c.name.split("-")[0] for c in runs} == {name}
        assert {c.variant for c in runs} == {name}


def test_levers_are_taken_back_one_by_one() -> None:
    cells = plan_of("table-levers", datasets=("mnist",), ratios=(0.1,), seeds=2).cells
    whole, *others = cells
    assert whole.configs == tuple(recipes.tuned("mnist", 0.1, 0.1, seed=seed) for seed in range(2))
    for cell in others:
        back = dict(levers("mnist"))[cell.what]
        for ours, config in zip(whole.configs, cell.configs, strict=True):
            assert config == override(replace(ours, name=config.name), back)
            assert config.name.startswith(f"{ours.name}-without-")
    assert len({c.configs[0].name for c in cells}) == len(cells)


@pytest.mark.parametrize(("dataset", "device", "sizes"), [("mnist", "cuda", [6, 12]), ("mnist", "cpu", [1] * 18)])
def test_on_a_gpu_small_networks_train_as_one(dataset: str, device: str, sizes: list[int], tmp_path: Path) -> None:
    plan = plan_of("table-main", datasets=(dataset,), methods=("dfl-ub", "dfl-lb"))
    groups = groups_of(list(plan.runs().values()), tmp_path, device)
    assert sorted(map(len, groups)) == sizes


def test_a_resnet_fills_a_gpu_by_itself(tmp_path: Path) -> None:
    plan = plan_of("table-main", datasets=("cifar10",), methods=("dfl-lb",))
    groups = groups_of(list(plan.runs().values()), tmp_path, "cuda")
    assert [len(group) for group in groups] == [1] * 12
