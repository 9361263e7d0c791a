"""Options for people: each has a meaning, which stands in one place."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from typer.testing import CliRunner

from methods import METHODS
from raysim.base.options import meanings, options_of, text_of
from raysim.cli.main import app
from raysim.models import MODELS

MAKERS = {**METHODS, **{name: architecture.build for name, architecture in MODELS.items()}}


@pytest.mark.parametrize("name", MAKERS)
def test_every_option_of_every_method_and_model_has_a_meaning(name):
    options = options_of(MAKERS[name])
    for option in options:
        assert len(re.findall(r"[A-Za-z]{2,}", option.meaning)) >= 2, f"{name}.{option.name}: {option.meaning!r}"
        assert option.default, option
        assert option.values, option
    assert meanings(MAKERS[name]).keys() <= {option.name for option in options}, "a meaning of what is no option"
    assert "Args:" not in text_of(MAKERS[name])


def test_meanings_of_several_options_and_of_several_lines():
    def make(
        *, mu: float = 0.5, lam: float | None = None, form: Literal["a", "b"] = "a", names: tuple[str, ...] = ("x",)
    ):
        """One line.

        Args:
          mu, lam: strengths,
            >= 0.
          form: "a": the paper's.
          names:
            of layers.
        Raises:
          ValueError: mu < 0.
        """

    assert meanings(make) == {
        "mu": "strengths, >= 0.",
        "lam": "strengths, >= 0.",
        "form": '"a": the paper\'s.',
        "names": "of layers.",
    }
    assert [(o.name, o.values, o.default) for o in options_of(make)] == [
        ("mu", "number", "0.5"),
        ("lam", "number | null", "null"),
        ("form", "a | b", "a"),
        ("names", "list of text", "[x]"),
    ]
    assert text_of(make) == "One line.\n\nRaises:\n  ValueError: mu < 0."


def test_methods_is_a_table_of_names_and_one_liners():
    lines = CliRunner().invoke(app, ["methods"]).output.splitlines()
    for name, make in MAKERS.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.split(maxsplit=1)[1] == text_of(make).partition("\n")[0]


@pytest.mark.parametrize("name", ["livar", "cnn", "uniform"])
def test_a_method_or_a_model_is_shown_with_its_options(name):
    output = CliRunner().invoke(app, ["methods", name]).output
    words = " ".join(output.split())
    for option in options_of(MAKERS[name]):
        assert f"{option.name} = {option.default}" in output
        assert option.meaning in words
    assert "object at 0x" not in output
    assert "FromFile(" not in output
