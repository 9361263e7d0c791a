"""Old spellings of methods run under the new ones, with a word."""

from __future__ import annotations

import warnings

import pytest
import yaml
from typer.testing import CliRunner

import raysim
from raysim.base.errors import SettingRenamed
from raysim.cli.main import app
from raysim.config import parse_config
from raysim.config.method_lists import renamed
from raysim.plan.find import build_methods


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"fedvg": {"score": "gradient"}}, "fedvg"),
        ({"fedvg": {"score": "gradient", "norm": "l2"}}, {"fedvg": {"norm": "l2"}}),
        ({"fedvg": {"score": "loss", "norm": "l1", "buffers": "uniform"}}, "fedvg_loss"),
        ({"fedvg": {"score": "loss", "every": 2}}, {"fedvg_loss": {"every": 2}}),
        ({"fedvg": {"score": "cosine", "every": 1, "eps": 0.1}}, "fedvg_cosine"),
        ({"fedvg": {"score": "cosine", "granularity": "layer"}}, {"fedvg_cosine": {"granularity": "layer"}}),
    ],
)
def test_a_score_of_fedvg_is_a_method_of_its_own_now(old, new):
    name = new if isinstance(new, str) else next(iter(new))
    with pytest.warns(SettingRenamed, match=f"is now called {name}; "):
        config, faults = parse_config({"methods": ["fedprox", old]})
    assert not faults
    assert config.methods == ["fedprox", new]
    methods, faults = build_methods([old])
    assert (methods[0].name, faults) == (name, [])


@pytest.mark.parametrize(
    ("old", "new", "options"),
    [
        ({"fedvg": {"layers": "tensor"}}, "fedvg", "layers"),
        ({"fedvg": {"buffers": "layer", "norm": "l2"}}, {"fedvg": {"norm": "l2"}}, "buffers"),
    ],
)
def test_an_option_that_went_is_left_out_where_it_said_what_is_done(old, new, options):
    with pytest.warns(SettingRenamed, match=f"fedvg has no {options} any more"):
        config, faults = parse_config({"methods": [old]})
    assert not faults
    assert config.methods == [new]


@pytest.mark.parametrize(("option", "value"), [("layers", "module"), ("buffers", "uniform")])
def test_an_option_that_went_is_refused_where_its_effect_is_gone(option, value):
    methods, faults = build_methods([{"fedvg": {option: value}}])
    assert not methods
    assert f"fedvg's {option} is gone: " in str(faults[0])


@pytest.mark.parametrize(
    "spec", ["fedvg", {"fedvg": {"norm": "l2"}}, {"fedvg": {"score": 3}}, {"other": {"score": "loss"}}, 4]
)
def test_other_entries_stay_without_a_word(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingRenamed)
        assert renamed(spec) is spec


def test_what_was_refused_beside_a_score_still_is():
    for old in ({"score": "loss", "granularity": "layer"}, {"score": "cosine", "norm": "l2"}):
        assert build_methods([{"fedvg": old}])[1]


def test_a_run_that_was_begun_with_the_old_spelling_goes_on(settings):
    run = raysim.run(settings, name="old", rounds=1, methods=["fedvg_loss"], quiet=True)
    file = run.folder / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    assert saved["methods"] == ["fedvg_loss"]
    file.write_text(yaml.safe_dump({**saved, "methods": [{"fedvg": {"score": "loss"}}]}))
    with pytest.warns(SettingRenamed):
        longer = raysim.run(settings, name="old", rounds=2, methods=[{"fedvg": {"score": "loss"}}], quiet=True)
    assert len(longer.history) == 2
    assert yaml.safe_load(file.read_text())["methods"] == ["fedvg_loss"]


def test_a_note_is_told_once_by_every_command(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("methods: [{fedvg: {score: loss}}]\nresources: {backend: serial}\n")
    result = CliRunner().invoke(app, ["run", str(path), "rounds=1", "--print-config"])
    assert result.stderr.count("note: fedvg with score: loss is now called fedvg_loss") == 1, result.output
