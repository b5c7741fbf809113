"""Settings: what is legal, what an error says, and that TOML and the hash lose nothing."""

import math
from dataclasses import FrozenInstanceError
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semidfl.config import (
    ClassifierConfig,
    Config,
    DataConfig,
    config_hash,
    from_toml,
    help_of,
    leaves,
    override,
    to_toml,
)
from semidfl.errors import ConfigError

# Every number: what is legal in words, values just inside, values just outside.
NUMBERS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "seed": ("from 0 to below 2^63", [0, 1, 2**63 - 1], [-1, 2**63]),
    "rounds": ("at least 1", [1, 10**9], [0, -1]),
    "data.ratio": ("above 0 and at most 100", [0.001, 100.0], [0, -1, 100.1]),
    "data.alpha": ("above 0", [1e-6, 1e6], [0, -1]),
    "data.size": ("0, or from 4 to 1024", [0, 4, 1024], [3, -1, 1025]),
    "data.channels": ("0 (found out), 1 (grey) or 3 (colour)", [1, 3], [2, 4, -1]),
    "data.test": ("from 1 to 90", [1.0, 90.0], [0, 100, -1]),
    "data.held_out": ("at least 0", [0, 10_000], [-1]),
    "graph.clients": ("from 1 to 1000000", [1, 10**6], [0, -3, 10**6 + 1]),
    "graph.degree": ("at least 1", [1, 100], [0, -1]),
    "graph.probability": ("from 0 to 1", [0.0, 1.0], [-0.1, 1.1]),
    "augment.pad": ("from 0 to 64", [0, 64], [-1, 65]),
    "augment.strong": ("from 0 to 2", [0.0, 2.0], [-0.1, 2.1]),
    "classifier.turns": ("from 0 to 10", [0.0, 10.0], [-0.1, 10.1]),
    "classifier.iterations": ("at least 1", [1, 1000], [0, -1]),
    "classifier.batch": ("at least 1", [1, 1000], [0, -1]),
    "classifier.lr": ("at least 0", [0.0, 10.0], [-0.1]),
    "classifier.momentum": ("from 0 to below 1", [0.0, 0.999], [-0.1, 1]),
    "classifier.weight_decay": ("at least 0", [0.0, 1.0], [-1e-9]),
    "classifier.grad_clip": ("at least 0", [0.0, 100.0], [-1e-9]),
    "classifier.logit_adjustment": ("from 0 to 10", [0.0, 10.0], [-0.1, 10.1]),
    "classifier.ema": ("from 0 to below 1", [0.0, 0.999], [-0.1, 1]),
    "pseudo.start": ("at least 1", [1, 100], [0]),
    "pseudo.pool": ("at least 0", [0, 100], [-1]),
    "pseudo.prior": ("above 0", [0.01, 50.0], [0, -1.0]),
    "pseudo.views": ("from 1 to 64", [1, 64], [0, 65]),
    "pseudo.sharpen": ("above 0", [0.01, 10.0], [0, -2]),
    "pseudo.threshold": ("from 0 to 1", [0.0, 1.0], [-0.01, 1.01]),
    "generator.iterations": ("at least 0", [0, 200], [-1]),
    "generator.batch": ("at least 1", [1, 1000], [0]),
    "generator.lr": ("at least 0", [0.0, 1.0], [-1e-3]),
    "generator.gan_lr": ("at least 0", [0.0, 1.0], [-1e-3]),
    "generator.width": ("a multiple of 8 from 8 to 4096", [8, 4096], [0, 4, 12, -8, 4104]),
    "generator.patch": ("from 1 to 8", [1, 8], [0, 9]),
    "generator.levels": ("from 1 to 6", [1, 6], [0, 7]),
    "generator.steps": ("from 3 to 10000", [21, 10**4], [2, 10**4 + 1]),  # and above sampler_steps
    "generator.label_dropout": ("from 0 to 1", [0.0, 1.0], [-0.1, 1.1]),
    "generator.min_snr": ("at least 0", [0.0, 5.0], [-1.0]),
    "generator.ema": ("from 0 to below 1", [0.0, 0.999], [-0.1, 1]),
    "generator.start": ("at least 1", [1, 100], [0]),
    "generator.every": ("at least 1", [1, 100], [0]),
    "generator.samples": ("at least 1", [1, 10**5], [0]),
    "generator.validation": ("at least 1", [1, 10**5], [0]),
    "generator.sampler_steps": ("from 2 to 1000", [2, 19], [1, 1001]),
    "generator.guidance": ("at least 0", [0.0, 20.0], [-1]),
    "mixup.beta": ("0, or from 0.01 to 1000", [0.01, 1000.0], [-0.5, 0.001, 1001]),
    "aggregation.gossip": ("from 1 to 100", [2, 100], [0, -1, 101]),
    "aggregation.idle": ("above 0 and at most 1", [0.01, 1.0], [0.0, -0.1, 1.1]),
    "aggregation.clip": ("above 0", [0.01, 100.0], [0, -1]),
    "aggregation.trim": ("at least 1", [1, 100], [0, -1]),
    "exchange.generator_every": ("at least 1", [1, 100], [0, -1]),
    "attack.count": ("at least 1", [1, 100], [0, -1]),
    "attack.strength": ("at least 0", [0.0, 100.0], [-0.1]),
    "evaluation.every": ("at least 1", [1, 100], [0]),
    "evaluation.last": ("at least 1", [1, 100], [0]),
    "compute.chunk": ("at least 0", [0, 100], [-1]),
    "compute.test_every": ("at least 0", [0, 100], [-1]),
    "compute.threads": ("from 0 to 4096", [0, 4096], [-1, 4097]),
    "compute.checkpoint_every": ("at least 0", [0, 100], [-1]),
    "compute.actors": ("from 0 to 100000", [0, 10**5], [-1, 10**5 + 1]),
    "compute.cores": ("from 1 to 4096", [1, 4096], [0, 4097]),
}
TEXTS = {
    "name": "another",
    "method": "dfl-lb",
    "data.dataset": "digits",
    "data.classes": "cat,dog",
    "graph.topology": "ring",
    "graph.roles": "LMU",
    "aggregation.weights": "constant",
    "attack.who": "3,7",
    "compute.device": "cpu",
    "compute.ray_address": "10.0.0.1:6379",
}
PATHS = [path for path, _ in leaves(Config())]


def get(config: Config, path: str) -> Any:
    return dict(leaves(config))[path]


def kind(path: str) -> Any:
    """The type of a field."""
    section, _, name = path.rpartition(".")
    return get_type_hints(type(getattr(Config(), section)) if section else Config)[name]


def is_choice(path: str) -> bool:
    return get_origin(kind(path)) is Literal


def others(path: str) -> list[Any]:
    """Legal values of a field that are not the default."""
    if kind(path) is bool:
        legal = [True, False]
    elif is_choice(path):
        legal = list(get_args(kind(path)))
    else:
        legal = NUMBERS[path][1] if path in NUMBERS else [TEXTS[path]]
    return [value for value in legal if value != get(Config(), path)]


def refusal(values: dict[str, Any]) -> str:
    """What the error says."""
    with pytest.raises(ConfigError) as caught:
        override(Config(), values)
    return str(caught.value)


def toml(path: str, value: str) -> str:
    section, _, name = path.rpartition(".")
    return (f"[{section}]\n" if section else "") + f"{name} = {value}\n"


# --- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_is_known_here() -> None:
    """A new field needs a row in the tables above, or none of the tests below sees it."""
    assert {p for p in PATHS if kind(p) in (int, float)} == set(NUMBERS)
    assert {p for p in PATHS if kind(p) is str} == set(TEXTS)


@pytest.mark.parametrize("path", PATHS)
def test_every_field_has_a_line_of_help(path: str) -> None:
    assert len(help_of()[path]) > 5
    assert "\n" not in help_of()[path]


def test_help_has_the_fields_and_nothing_else() -> None:
    assert list(help_of()) == PATHS


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().rounds = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Config().data.ratio = 3  # type: ignore[misc]


# --- legal and illegal values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_legal_values_are_taken_as_numbers_and_as_words(path: str) -> None:
    for value in others(path):
        assert get(override(Config(), {path: value}), path) == value
        from_words = get(override(Config(), {path: str(value)}), path)
        assert from_words == value
        assert type(from_words) is type(get(Config(), path))


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_out_of_range_is_refused(path: str) -> None:
    words, _, wrong = NUMBERS[path]
    for value in [*wrong, *map(str, wrong)]:  # from TOML, and from the command line
        message = refusal({path: value})
        assert f"{path} = {kind(path)(value)!r} is not legal" in message
        assert words in message


@pytest.mark.parametrize("path", [p for p in NUMBERS if kind(p) is int])
def test_what_is_no_whole_number_is_refused(path: str) -> None:
    for value in ("many", "1.5", "", 1.5, True, [1], {"a": 1}, None, math.nan, "nan", "inf"):
        assert f"{path} = {value!r} is not legal: it must be a whole number" in refusal({path: value})


@pytest.mark.parametrize("value", [math.inf, -math.inf, "9" * 400])
def test_a_whole_number_without_end_is_refused(value: Any) -> None:
    assert "rounds = " in refusal({"rounds": value})


@pytest.mark.parametrize("path", [p for p in NUMBERS if kind(p) is float])
def test_what_is_no_number_is_refused(path: str) -> None:
    for value in ("much", "", False, [1.0], None, math.nan, math.inf, "nan", "-inf"):
        assert f"{path} = {value!r} is not legal: it must be a number" in refusal({path: value})


@pytest.mark.parametrize("path", [p for p in PATHS if kind(p) is bool])
def test_switches(path: str) -> None:
    for word, meant in {"true": True, "on": True, "Yes": True, "1": True, "false": False, "off": False}.items():
        assert get(override(Config(), {path: word}), path) is meant
    for wrong in ("maybe", "", 2, 0.5, None):
        assert f"{path} = {wrong!r} is not legal: true or false" in refusal({path: wrong})


@pytest.mark.parametrize("path", [p for p in PATHS if is_choice(p)])
def test_a_word_that_is_no_choice_is_refused_with_the_legal_ones(path: str) -> None:
    legal = get_args(kind(path))
    for wrong in (legal[0] + "x", "", 3, ["a"]):
        assert f"{path} = {wrong!r} is not legal: one of {', '.join(legal)}" in refusal({path: wrong})
    assert f"did you mean '{legal[-1]}'" in refusal({path: legal[-1] + "x"})


@pytest.mark.parametrize("path", TEXTS)
def test_text_must_be_text(path: str) -> None:
    for value in (3, 0.5, True, ["a"], None):
        assert f"{path} = {value!r} is not legal: it must be text" in refusal({path: value})


@pytest.mark.parametrize("name", ["", "a/b", "/tmp", "a/", "."])
def test_a_name_must_be_a_folder_name(name: str) -> None:
    assert f"name = {name!r} is not legal: it names a folder" in refusal({"name": name})


def test_a_name_must_not_lead_upwards() -> None:
    assert "name = '..' is not legal" in refusal({"name": ".."})


def test_roles_have_three_letters() -> None:
    assert "graph.roles holds ['l']: legal letters are L, M and U" in refusal({"roles": "LMUl"})


def test_sections_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"data\.ratio = 0 is not legal: .*above 0"):
        Config(data=DataConfig(ratio=0))
    with pytest.raises(ConfigError, match="rounds = nan"):
        Config(rounds=math.nan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"classifier": ClassifierConfig(model="resnet")},  # type: ignore[arg-type]  # trains the CNN, in silence
        {"rounds": "5"},
        {"rounds": 2.5},
        {"data": DataConfig(alpha=math.inf)},  # is written as TOML that cannot be read back
    ],
)
def test_types_made_in_python_are_checked_too(values: Any) -> None:
    with pytest.raises(ConfigError):
        Config(**values)


@pytest.mark.parametrize(
    ("path", "value"),
    [("classifier.momentum", 0.99999), ("data.ratio", 1e-10), ("pseudo.sharpen", 1e-7), ("mixup.beta", 0.0)],
)
def test_what_the_words_allow_is_legal(path: str, value: float) -> None:
    assert get(override(Config(), {path: value}), path) == value


def test_a_sampler_needs_more_noise_levels_than_steps() -> None:
    words = "generator.sampler_steps = 20 is not legal: it must be below generator.steps = 20"
    assert words in refusal({"sampler_steps": 20, "steps": 20})
    together = override(Config(), {"steps": 10, "sampler_steps": 9})  # although 10 alone is not legal
    assert (together.generator.steps, together.generator.sampler_steps) == (10, 9)


@pytest.mark.parametrize("space", ["\u00a0", "\u3000"])
def test_a_space_of_another_script_is_no_control_character(space: str) -> None:
    assert override(Config(), {"dataset": f"a{space}b.npz"}).data.dataset == f"a{space}b.npz"


# --- names of fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_last_name_is_enough_where_it_occurs_once(path: str) -> None:
    last = path.rsplit(".", 1)[-1]
    ends = [p for p in PATHS if p.rsplit(".", 1)[-1] == last]
    value = others(path)[0]
    if len(ends) == 1 or last in PATHS:
        assert override(Config(), {last: value}) == override(Config(), {path: value})
    else:
        assert f"{last!r} could be {' or '.join(ends)}: name the section too" in refusal({last: value})


@pytest.mark.parametrize("path", PATHS)
def test_a_misspelt_path_is_answered_with_the_nearest(path: str) -> None:
    assert f"there is no field '{path}x' (did you mean '{path}'?)" in refusal({path + "x": 1})
    with pytest.raises(ConfigError, match=f"there is no field .*did you mean '{path}'"):
        from_toml(toml(path + "x", "1"))


@pytest.mark.parametrize("typo", ["ratoi", "apha", "leves", "vews"])
def test_a_misspelt_last_name_is_answered_with_the_nearest(typo: str) -> None:
    assert "did you mean" in refusal({typo: 1})


def test_a_name_like_no_other_is_refused_without_a_guess() -> None:
    assert "there is no field 'zzz'; `semidfl run --help` lists them all" in refusal({"zzz": 1})


# --- TOML -------------------------------------------------------------------------------------------------------------


def legal_values(path: str) -> st.SearchStrategy[Any]:
    if kind(path) is bool:
        return st.booleans()
    if is_choice(path):
        return st.sampled_from(get_args(kind(path)))
    if path in NUMBERS:
        low, high = min(NUMBERS[path][1]), max(NUMBERS[path][1])
        if path == "generator.width":
            return st.integers(low // 8, high // 8).map(lambda n: 8 * n)
        if path in ("data.size", "data.channels"):
            return st.sampled_from(NUMBERS[path][1])
        return st.integers(low, high) if kind(path) is int else st.floats(low, high)
    if path == "graph.roles":
        return st.text("LMU")
    # Quotes, backslashes, other scripts; no control characters.
    text = st.text(st.characters(exclude_categories=["C", "Z"]))
    return text.map(lambda s: "n" + s.replace("/", "")) if path == "name" else text


@settings(max_examples=50)
@given(st.fixed_dictionaries({}, optional={path: legal_values(path) for path in PATHS}))
def test_toml_gives_back_the_same_config(values: dict[str, Any]) -> None:
    config = override(Config(), values)
    assert from_toml(to_toml(config)) == config


@pytest.mark.parametrize("letter", ["\n", "\r", "\x00", "\x7f"])
def test_toml_gives_back_control_characters_or_refuses_them(letter: str) -> None:
    try:
        config = override(Config(), {"name": f"a{letter}b", "data.dataset": f"a{letter}b.npz"})
    except ConfigError:
        return
    assert from_toml(to_toml(config)) == config


def test_toml_stands_on_its_own_or_on_a_base() -> None:
    base = override(Config(), {"rounds": 7, "ratio": 2})
    config = from_toml("[data]\nratio = 3\n", base)
    assert (config.rounds, config.data.ratio) == (7, 3.0)
    assert from_toml("") == Config()


@pytest.mark.parametrize("text", ["rounds =", "rounds = 5 5", "[data", '"', "rounds = 1\nrounds = 2", "name = 'a\x00'"])
def test_broken_toml_is_named_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not valid TOML: .*"):
        from_toml(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('rounds = "many"', "rounds = 'many' is not legal: it must be a whole number"),
        ("rounds = [5]", "rounds = [5] is not legal: it must be a whole number"),
        ("rounds = true", "rounds = True is not legal: it must be a whole number"),
        ("[data]\nratio = 1979-05-27", "data.ratio = datetime.date(1979, 5, 27) is not legal: it must be a number"),
        ("[data]\ndataset = 3", "data.dataset = 3 is not legal: it must be text"),
        ("[pseudo]\nkind = 3", "pseudo.kind = 3 is not legal: one of vanilla, apl, npl"),
        ("data = 3", "there is no field 'data'"),
        ("[data.ratio]\nx = 1", "data.ratio = {'x': 1} is not legal: it must be a number"),
        ("[[data]]\nratio = 1", "there is no field 'data'"),
        ("[dat]\nratio = 1", "there is no field 'dat.ratio' (did you mean 'data.ratio'?)"),
        ("ratio = 1", "there is no field 'ratio'"),
    ],
)
def test_toml_of_the_wrong_shape_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_toml(text)
    assert words in str(caught.value)


# --- hash -------------------------------------------------------------------------------------------------------------

WHERE = {path for path in PATHS if path.startswith("compute.")} - {"compute.deterministic"} | {"name"}


@pytest.mark.parametrize("path", PATHS)
def test_the_hash_tells_what_is_computed_not_where(path: str) -> None:
    for value in others(path):
        same = config_hash(override(Config(), {path: value})) == config_hash(Config())
        assert same == (path in WHERE), value


def test_the_hash_is_twelve_hex_digits_for_ever() -> None:
    assert len(config_hash(Config())) == 12
    int(config_hash(Config()), 16)
    assert config_hash(from_toml(to_toml(Config()))) == config_hash(Config())


def test_a_younger_field_does_not_rename_older_runs() -> None:
    """What `reproduce` has computed is found by this name."""
    assert config_hash(Config()) == "1fe696097c98"
