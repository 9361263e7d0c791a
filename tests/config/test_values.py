"""Values that no key takes are refused where they are read, in one sentence with their place."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from pydantic import BaseModel

from methods import METHODS
from raysim.base.errors import ConfigError
from raysim.config import parse_config, parse_overrides, read_config, sound_config
from raysim.config.faults import options_model, validated
from raysim.config.schema import Config
from raysim.config.yaml_text import load_yaml
from raysim.plan.check import check
from raysim.tuning.plan import plan_sweep
from tests.support.federations import raw_config


def faults_of(raw):
    return {fault.key: fault.message for fault in parse_config(raw)[1]}


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(text):
    value = load_yaml(text)
    raw = {
        "methods": [{"univarfl": {"lam": value}}],
        "local": {"epochs": value},
        "tune": {"settings": {"a": {"b": {"c": value}}}},
    }
    assert set(faults_of(raw)) == {"methods[0].univarfl.lam", "local.epochs", "tune.settings.a.b.c"}


def test_momentum_of_an_optimiser_that_has_its_own_is_refused():
    local = {"optimizer": "adamw", "momentum": 0.9}
    assert faults_of({"local": local}) == {
        "local.momentum": "has no effect with local.optimizer adamw (applies with local.optimizer sgd); "
        "remove the key, or change local.optimizer"
    }
    assert faults_of({"local": {**local, "optimizer": "sgd"}}) == faults_of({"local": {**local, "momentum": 0}}) == {}


def test_a_group_that_is_no_mapping_is_told_in_plain_words():
    faults = faults_of({"data": None, "local": 3})
    assert faults["data"].startswith("must be a mapping of keys, got None (")
    assert faults["local"].startswith("must be a mapping of keys, got 3 (")
    assert "default" not in faults["data"].partition(";")[0]
    assert "Undefined" not in "".join(faults.values())


def test_every_key_and_option_refuses_values_in_plain_words():
    """None is in the words of the library that checks types."""
    values = ("x", 1.5, -1, [1], {"a": 1}, True, None, float("inf"))
    refused = [
        (fault.key, str(value), fault.message)
        for model, path in [*keys_of(Config), *((options_model(make), (name,)) for make, name in all_options())]
        for value in values
        for fault in validated(model, nested(path, value))[1]
    ]
    assert len(refused) > 1500
    assert [
        each for each in refused if not re.match(r"must (not )?be |unknown key|is missing|has the wrong form", each[2])
    ] == []
    assert [each for each in refused if re.search(r"\[(?!\d+\])", each[0])] == []  # positions alone stand in brackets


def all_options():
    return [(make, name) for make in METHODS.values() for name in options_model(make).model_fields]


def keys_of(model, path=()):
    """(the configuration, path) of every key, those of groups within groups included."""
    for name, field in model.model_fields.items():
        yield Config, (*path, name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys_of(inner, (*path, name))


def nested(path, value):
    return {path[0]: nested(path[1:], value)} if path else value


@pytest.mark.parametrize(
    ("raw", "key", "words"),
    [
        ({"resources": {"trainers": "x"}}, "resources.trainers", "must be a valid integer, unable to parse"),
        ({"resources": {"trainers": 1.5}}, "resources.trainers", "must be a valid integer, got a number with a fract"),
        (
            {"resources": {"trainers": {"min": 2}}},
            "resources.trainers",
            "has no max; write {min: 4, max: 40}, got {'min': 2}",
        ),
        (
            {"resources": {"trainers": {"min": 3, "max": 2}}},
            "resources.trainers",
            "has min 3 above max 2; exchange them",
        ),
        ({"resources": {"gpus_per_trainer": "x"}}, "resources.gpus_per_trainer", "must be a valid number, unable"),
        ({"partition": {"scheme": {"a": 1}}}, "partition.scheme.a", "has the wrong form, got 'a'"),
        ({"data": {"augment": {"a": 1}}}, "data.augment", "must be a name or {name: {option: value}}, got {'a': 1} ("),
        ({"methods": ["fedavg", {}]}, "methods[1]", "must be a name or {name: {option: value}}, got {}"),
        ({"data": {"channels": 4}}, "data.channels", "must be 3, got 4 (3: grey"),
        ({"name": "a b"}, "name", "has the wrong form, got 'a b' (run name: letters, digits"),
        ({"rounds": "many"}, "rounds", "must be a valid integer, unable to parse string"),
    ],
)
def test_a_value_of_another_kind_is_told_what_the_key_takes(raw, key, words):
    assert faults_of(raw)[key].startswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", r"key 'a' appears twice; keep one \(line 3, column 1\)"),
        ("local: {lr: 1, lr: 2}", "key 'lr' appears twice"),
        ("[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: [1", r"is not valid YAML: .* \(line \d"),
    ],
)
def test_yaml_that_means_two_things_or_nothing(tmp_path, text, words):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(path)


def test_a_merged_key_may_be_set_again():
    assert load_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 0\)"):
        read_config(path)
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_config(tmp_path / name)


def test_aliases_of_aliases_are_counted_and_not_written_out():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert faults_of(load_yaml("\n".join(lines)))["file"].startswith("holds more than 100,000 values")


def test_paths_that_no_system_takes():
    raw = {"storage": "~nosuchuser/x", "name": "a" * 201, "data": {"root": "/x/" + "c" * 300}}
    faults = faults_of(raw)
    assert "names the home of an unknown user" in faults["storage"]
    assert faults["name"].startswith("must have at most 200 bytes in a folder's name, got 201")
    assert "a name of more than 200 bytes" in faults["data.root"]
    assert faults_of({"data": {"name": "b\0"}})["data.name"].startswith("must not hold the character NUL")


def test_faults_of_types_and_contradictions_come_at_once(root):
    raw = raw_config(root, local={"lr": -1}, data={"test": 0.9, "validation": 0.2}, methods=[{"fedprox": {"mu": "x"}}])
    with pytest.raises(ConfigError) as caught:
        check({**raw, "cohort": {"size": 5, "fraction": 0.5}}, "a test")
    keys = [fault.key for fault in caught.value.faults]
    assert sorted(keys) == ["cohort", "data", "local.lr", "methods[0].fedprox.mu"]


def test_a_function_that_leaves_the_program_is_a_fault(root):
    with pytest.raises(ConfigError, match="SystemExit"):
        check(raw_config(root, methods=["sys:exit"]), "a test")


def test_a_skip_rate_of_two_is_refused(root):
    model = {"name": "vit", "dim": 8, "depth": 1, "heads": 2, "patch": 4, "drop_path": 2}
    with pytest.raises(ConfigError, match=r"model\.drop_path: must be less than 1, got 2"):
        check(raw_config(root, model=model), "a test")


# --- sweeps -----------------------------------------------------------------------------------------------------------


def refused(root, tune):
    with pytest.raises(ConfigError) as caught:
        plan_sweep({**raw_config(root), "tune": tune}, "sweep")
    return {fault.key: fault.message for fault in caught.value.faults}


@pytest.mark.parametrize("axis", ["name", "storage", "tune.metric", "report.rows"])
def test_what_belongs_to_the_sweep_is_no_axis(root, axis):
    key = axis.partition(".")[0]
    faults = refused(root, {"param_space": {axis: {"grid_search": ["a", "b"]}}})
    assert faults[f"tune.param_space.{axis}"].startswith(f"{key} belongs to the sweep")
    faults = refused(root, {"param_space": {"m": {"grid_search": {"A": {axis: "a"}}}}})
    assert f"A sets {axis}" in faults["tune.param_space.m"]


def test_an_axis_is_not_called_labels(root):
    faults = refused(root, {"param_space": {"labels": {"grid_search": {"A": {"local.lr": 0.1}}}}})
    assert "give the axis another name" in faults["tune.param_space.labels"]


@pytest.mark.parametrize("metric", ["", "foo", "server/acuracy", "fedvg/norms"])
def test_a_metric_that_no_run_has(root, metric):
    tune = {"param_space": {"seed": {"grid_search": [0]}}, "metric": metric}
    assert refused(root, tune)["tune.metric"].startswith(f"no run here has {metric!r}")


def test_a_metric_of_a_method_that_a_trial_has(root):
    space = {"m": {"grid_search": {"A": {"methods": [{"dp": {"clip": 1.0, "noise": 1.0}}]}, "B": {}}}}
    tune = {"param_space": space, "metric": "dp/epsilon"}
    assert len(plan_sweep({**raw_config(root), "tune": tune}, "sweep").trials) == 2


def test_sweeps_have_a_bound(root):
    space = {"local.lr": {"uniform": [0.1, 1.0]}}
    assert (
        "makes 1,000,000,000 trials" in refused(root, {"param_space": space, "num_samples": 10**9})["tune.param_space"]
    )
    grid = {f"local.{key}": {"grid_search": list(range(100))} for key in ("lr", "momentum", "weight_decay")}
    assert "makes 1,000,000 trials" in refused(root, {"param_space": grid})["tune.param_space"]


def test_trials_keep_their_settings_whatever_they_are_called(root):
    """A name made to tell two trials apart may be the name of a third."""
    settings = {"a b": {"local.lr": 0.1}, "a-b": {"local.lr": 0.2}, "a-b_2": {"local.lr": 0.3}}
    tune = {"param_space": {"m": {"grid_search": settings}}}
    trials = plan_sweep({**raw_config(root), "tune": tune}, "sweep").trials
    assert sorted(trial.config.local.lr for trial in trials) == [0.1, 0.2, 0.3]
    assert len({trial.config.name for trial in trials}) == 3


def test_overrides_say_where():
    with pytest.raises(ConfigError, match=r"local\.lr: value '\[1' is not valid YAML"):
        parse_overrides(["local.lr=[1"])


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({}, (1.0, None)),
        ({"epochs": 5}, (5.0, None)),
        ({"steps": 3}, (None, 3)),
        ({"epochs": None, "steps": 3}, (None, 3)),
        ({"epochs": None}, (1.0, None)),
    ],
)
def test_local_work_is_counted_in_epochs_or_in_steps(given, counts):
    config, faults = parse_config({"local": given})
    assert (config.local.epochs, config.local.steps, faults) == (*counts, [])
    again, faults = parse_config(config.model_dump(mode="json"))  # what --print-config and config.yaml hold is taken
    assert (again, faults) == (config, [])


def test_epochs_and_steps_both_written_are_a_clash_even_at_the_default():
    (fault,) = parse_config({"local": {"epochs": 1, "steps": 3}})[1]
    assert (
        str(fault)
        == "local: steps and epochs are both set; keep one, and set the second to null if a base file has both"
    )


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_is_no_run_of_the_defaults(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    (tmp_path / "above.yaml").write_text("base: c.yaml\n")
    for name in ("c.yaml", "above.yaml"):
        with pytest.raises(ConfigError, match="file: is empty; write at least one setting"):
            read_config(tmp_path / name)


@pytest.mark.parametrize("scheme", [{}, {"a:b": {}, "c:d": {}}])
def test_a_scheme_without_or_with_two_names_is_one_fault(scheme):
    with pytest.raises(ConfigError, match=r"partition\.scheme: must be 'dirichlet', "):
        sound_config({"partition": {"scheme": scheme}}, "a test")
