"""Options without effect are refused; settings of a lower layer that lose their effect are left out with a note."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import raysim
from raysim.base.errors import ConfigError, DataError, SettingIgnored
from raysim.base.progress import Listener
from raysim.cli.main import app
from raysim.config import parse_config, parse_options, read_config
from raysim.config.sweep import grid
from raysim.data.arrow import write_set
from raysim.data.sources import prepare, set_path
from raysim.launch import finished_run, settings_of
from raysim.models import find_architecture
from raysim.plan.check import check, check_partition
from raysim.plan.find import build_methods
from raysim.plan.splitting import rows_line, uses_validation
from raysim.tuning.outcome import _as_run
from raysim.tuning.plan import plan_sweep
from raysim.tuning.trial import point_of
from tests.support.federations import raw_config


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        *(
            ({"partition": {"scheme": scheme, "alpha": 0.5}}, "partition.alpha")
            for scheme in ("iid", "shards", "joint")
        ),
        ({"partition": {"scheme": "file", "file": "a.csv", "alpha": 0.5}}, "partition.alpha"),
        *(
            ({"partition": {"scheme": scheme, "domains_per_client": 2}}, "partition.domains_per_client")
            for scheme in ("dirichlet", "iid", "shards", "quantity", "natural", "nine_plus_one", "joint")
        ),
        ({"partition": {"scheme": "nine_plus_one", "min_samples": 5}}, "partition.min_samples"),
        ({"data": {"interpolation": "bicubic"}}, "data.interpolation"),
        ({"data": {"split": "official", "test": 0.3}}, "data.test"),
        ({"cohort": {"straggler_work": 0.5}}, "cohort.straggler_work"),
        ({"rounds": 5, "stop": {"patience": 5}}, "stop.patience"),
        ({"tune": {"grace_rounds": 3}}, "tune.grace_rounds"),
        ({"partition": {"scheme": "joint"}, "cohort": {"size": 1, "dropout": 0.5}}, "cohort"),
        ({"report": {"metric": "best_accuracy", "metrics": {"seen": {"last": "accuracy"}}}}, "report.metric"),
    ],
)
def test_a_key_that_does_not_count_is_refused(raw, key):
    (fault,) = parse_config(raw)[1]
    assert fault.key == key
    assert fault.message.startswith("has no effect with ")
    assert "remove the key, or change " in fault.message


@pytest.mark.parametrize("dp", ["dp", {"dp": {"clip": 1.0}}])
def test_a_privacy_budget_applies_with_dp_with_and_without_options(dp):
    assert parse_config({"methods": ["fedprox", dp], "stop": {"epsilon": 3.0}})[1] == []


def test_a_refusal_names_the_cause_the_condition_and_the_remedy():
    (fault,) = parse_config({"partition": {"scheme": "iid", "alpha": 0.5}})[1]
    assert str(fault) == (
        "partition.alpha: has no effect with partition.scheme iid (applies with partition.scheme dirichlet, quantity "
        "or nine_plus_one); remove the key, or change partition.scheme"
    )


def test_defaults_count_as_not_given_so_that_the_complete_configuration_of_a_run_is_one():
    config, faults = parse_config({"partition": {"scheme": "iid"}})
    assert not faults
    assert parse_config(config.model_dump(mode="json"))[1] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"univarfl": {"uniformity": "kernel", "form": "literal"}}, "form: has no effect with uniformity kernel"),
        ({"fedavgm": {"as_in": "fl-bench", "form": "damped"}}, "form: has no effect with as_in fl-bench"),
        ({"feddyn": {"as_in": "fl-bench", "weights": "examples"}}, "weights: has no effect with as_in fl-bench"),
        ({"scaffold": {"as_in": "fl-bench", "option": "i"}}, "option: has no effect with as_in fl-bench"),
        ({"fedproto": {"as_in": "fed-mammoth", "share": "nothing"}}, "share: has no effect with as_in fed-mammoth"),
        ({"flfa": {"feedback": "direct", "scale": "none"}}, "scale: has no effect with feedback direct"),
        ({"flfa": {"seed": 3}}, "seed: has no effect with feedback round"),
    ],
)
def test_an_option_of_a_method_that_does_not_count_is_refused(spec, words):
    assert words in "".join(map(str, build_methods([spec])[1]))


def test_groups_without_group_norm_are_refused():
    _, faults = parse_options(find_architecture("cnn").build, {"norm": "none", "groups": 4}, "model")
    assert [fault.key for fault in faults] == ["model.groups"]
    assert parse_options(find_architecture("cnn").build, {"norm": "group", "groups": 4}, "model")[1] == []


def test_groups_and_metrics_of_other_verbs(settings):
    for more, words in (
        ({"tune": {"num_samples": 3}}, "tune: has no effect in a run, only with .*raysim tune`; remove the group"),
        ({"calibrate": {"trees": 3}}, "calibrate: has no effect in a run"),
        ({"report": {"metric": "nosuch"}}, "report.metric: no run here has 'nosuch'"),
    ):
        raw, source = settings_of(settings, more, {})
        with pytest.raises(ConfigError, match=words):
            finished_run(raw, source, Listener())


def test_files_for_a_set_that_reads_none_are_refused(tmp_path):
    with pytest.raises(DataError, match="digits is made here and reads no files"):
        prepare("digits", tmp_path, tmp_path / "nonexistent")


# --- layers -----------------------------------------------------------------------------------------------------------


def test_the_command_line_drops_settings_of_the_file_that_it_makes_unused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("partition: {scheme: dirichlet, alpha: 0.5}\n")
    with pytest.warns(SettingIgnored, match="left out: partition.alpha has no effect with partition.scheme iid"):
        raw = read_config(file, ["partition.scheme=iid"])
    assert raw == {"partition": {"scheme": "iid"}}
    (tmp_path / "b.yaml").write_text("base: a.yaml\npartition: {scheme: shards}\n")
    with pytest.warns(SettingIgnored, match="partition.scheme shards"):
        assert read_config(tmp_path / "b.yaml") == raw | {"partition": {"scheme": "shards"}}


def test_what_the_command_line_itself_gives_without_effect_stays_to_be_refused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("partition: {scheme: iid}\n")
    raw = read_config(file, ["partition.alpha=0.5"])
    assert [fault.key for fault in parse_config(raw)[1]] == ["partition.alpha"]


SCHEMES = {"Dirichlet": {"partition.scheme": "dirichlet"}, "even": {"partition.scheme": "iid"}}


def test_a_trial_drops_settings_that_its_labels_make_unused():
    axes = {"skew": {"grid_search": SCHEMES}}
    raw = {"partition": {"alpha": 0.5}, "tune": {"param_space": axes}}
    first, second = grid(raw, "a sweep")
    assert first.raw["partition"] == {"alpha": 0.5, "scheme": "dirichlet"}
    assert second.raw["partition"] == {"scheme": "iid"}
    assert set(second.unused) == {"partition.alpha"}


def test_a_label_that_contradicts_itself_is_refused():
    label = {"partition.scheme": "iid", "partition.alpha": 0.5}
    (trial,) = grid({"tune": {"param_space": {"skew": {"grid_search": {"even": label}}}}}, "a sweep")
    assert [fault.key for fault in parse_config(trial.raw)[1]] == ["partition.alpha"]


def test_a_setting_that_counts_in_no_trial_is_told(root):
    def planned(labels):
        raw = raw_config(root, partition={"alpha": 0.5})
        return plan_sweep({**raw, "tune": {"param_space": {"skew": {"grid_search": labels}}}}, "sweep")

    with pytest.warns(SettingIgnored, match="left out of every trial: partition.alpha"):
        planned({"even": SCHEMES["even"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingIgnored)
        assert len(planned(SCHEMES).trials) == 2


# --- data.split -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """A folder with two sets of 200 rows: `split` has 150 training and 50 test rows, `three` 20 for validation, too."""
    folder = tmp_path_factory.mktemp("official")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (200, 8, 8, 1), np.uint8), np.arange(200) % 4
    for name, counts in (("split", (150, 0, 50)), ("three", (130, 20, 50))):
        splits = np.repeat([0, 1, 2], counts)
        write_set(set_path(folder, name), name, "abcd", [(images, labels, None, splits)])
    return folder


@pytest.mark.parametrize(
    ("data", "methods", "rows"),
    [
        ({}, [], (150, 0, 50)),
        ({}, ["fedvg"], (135, 15, 50)),
        ({"validation": 0.2}, [], (120, 30, 50)),
        ({"validation_set": {"subset": 0.6}}, [], (135, 9, 50)),
        ({"test": 0.1}, [], (180, 0, 20)),
        ({"test": 0.1}, ["fedvg"], (160, 20, 20)),
        ({"split": "fraction"}, [], (150, 0, 50)),
        ({"split": "fraction"}, ["fedvg"], (130, 20, 50)),
        ({"split": "fraction", "validation": 0.1}, [], (130, 20, 50)),
        ({"split": "fraction", "validation_set": {"subset": 0.6}}, [], (130, 12, 50)),
        ({"split_within_clients": True}, [], (152, 0, 48)),
        ({"split_within_clients": True}, ["fedvg"], (134, 18, 48)),
        ({"name": "three"}, [], (130, 0, 50)),
        ({"name": "three"}, ["fedvg"], (130, 20, 50)),
    ],
)
def test_rows_validate_only_where_they_are_used_and_an_official_split_is_the_default(official, data, methods, rows):
    raw = {"data": {"name": "split", "root": str(official), **data}, "methods": methods}
    _, manifest = check_partition({**raw, "partition": {"scheme": "iid", "num_clients": 3}}, "a test")
    found = (int(manifest.sizes.sum()), len(manifest.validation), len(manifest.test))
    assert found == rows


def planned(data_root, domain, axis="m", data=(), **tune):
    raw = raw_config(data_root, partition={"scheme": "iid", "num_clients": 3}, cohort={"size": 2})
    del raw["methods"]
    raw["data"] = {"root": str(data_root), **data}
    return plan_sweep({**raw, "tune": {"param_space": {axis: domain}, **tune}}, "sweep").trials


@pytest.mark.parametrize("split", ["official", "fraction"])
@pytest.mark.parametrize(
    ("axis", "choices"),
    [("m", {"FedAvg": {"methods": []}, "FedVG": {"methods": ["fedvg"]}}), ("methods", [[], ["fedvg"]])],
)
def test_trials_of_a_sweep_have_the_same_rows_whichever_method_uses_validation(official, split, axis, choices):
    trials = planned(official, {"grid_search": choices}, axis, {"name": "split", "split": split})
    assert [trial.config.data.validation for trial in trials] == [0.1, 0.1]
    assert len({trial.partition_sha256 for trial in trials}) == 1


@pytest.mark.parametrize(("second", "uses"), [("server/validation_accuracy", True), ("server/loss", False)])
def test_a_metric_of_a_report_decides_whether_rows_validate(second, uses):
    assert uses_validation({"report": {"metrics": {"on": {"test": "server/accuracy", "other": second}}}}) == uses


@pytest.mark.parametrize(("metric", "share"), [("best_accuracy", 0.0), ("accuracy_at_best_validation", 0.1)])
def test_the_metric_of_a_sweep_decides_whether_rows_validate(official, metric, share):
    trials = planned(official, {"grid_search": [0, 1]}, "seed", {"name": "split", "split": "fraction"}, metric=metric)
    assert [trial.config.data.validation for trial in trials] == [share, share]


@pytest.mark.parametrize("name", ["split", "three"])
@pytest.mark.parametrize(
    "choices", [{"FedAvg": {"methods": []}}, {"FedAvg": {"methods": []}, "FedVG": {"methods": ["fedvg"]}}]
)
@pytest.mark.parametrize("split", ["auto", "fraction"])
def test_a_trial_sent_to_a_process_or_run_from_best_yaml_has_the_rows_of_its_plan(official, name, choices, split):
    for trial in planned(official, {"grid_search": choices}, "m", {"name": name, "split": split}):
        alone = {"storage": "runs", "name": "alone"}
        for raw in (json.loads(point_of(trial)["settings"]), {**_as_run(trial), **alone}):
            assert check(raw, "a test").manifest.checksum == trial.partition_sha256


def test_a_printed_configuration_is_that_run(official, tmp_path):
    raw = raw_config(official, partition={"scheme": "iid", "num_clients": 3}, cohort={"size": 2})
    raw["data"] = {"root": str(official), "name": "split"}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    printed = CliRunner().invoke(app, ["run", str(tmp_path / "a.yaml"), "--print-config"]).stdout
    first, again = (check(each, "a test").manifest for each in (raw, yaml.safe_load(printed)))
    assert first.checksum == again.checksum
    assert len(first.test) == 50


def test_a_fraction_beside_validation_rows_of_the_set_is_refused(official):
    raw = {"data": {"name": "three", "root": str(official), "validation": 0.3}}
    with pytest.raises(
        ConfigError, match=r"data\.validation: 0.3 has no effect: three has 20 validation rows of its own"
    ):
        check_partition(raw, "a test")


def test_the_start_says_how_many_rows_do_what_and_by_which_rule(official, root, capsys, settings):
    plan = check({**raw_config(root, partition={"scheme": "iid"}), "data": {"root": str(root)}}, "a test")
    assert rows_line(plan.config, plan.manifest) == (
        "1,348 rows train, 0 validate, 449 test: random fractions, data.test and data.validation"
    )
    raysim.run(settings, {"data": {"name": "split", "root": str(official)}}, rounds=1)
    assert "150 rows train, 0 validate, 50 test: the set's own split" in capsys.readouterr().out


def test_the_split_of_a_partition_file_goes_before_fractions_with_a_word(settings, tmp_path):
    drawn = raysim.run(settings, name="drawn", rounds=1, quiet=True)
    part = {"scheme": "file", "file": str(drawn.folder / "examples.csv"), "num_clients": 6}
    raw = {"data": {**settings["data"], "test": 0.4}, "partition": part}
    with pytest.warns(SettingIgnored, match=r"left out: data\.test; .*examples\.csv says which rows are held out"):
        _, manifest = check_partition(raw, "a test")
    assert manifest.checksum == drawn.summary["partition_sha256"]


def test_a_run_of_an_older_version_that_held_out_rows_unasked_is_not_continued_without_them(settings):
    held_out = {"data": {**settings["data"], "validation": 0.1}}
    before = raysim.run(settings, held_out, name="old", rounds=1, quiet=True)
    for rounds in (1, 2):
        with pytest.raises(ConfigError, match=r"data\.validation: is 0\.0, but the finished run in .* has 0\.1"):
            raysim.run(settings, name="old", rounds=rounds, quiet=True)
    after = raysim.run(settings, held_out, name="old", rounds=2, quiet=True)
    assert after.summary["partition_sha256"] == before.summary["partition_sha256"]
