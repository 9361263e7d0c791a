"""What the shell offers behind the verbs, as bash and zsh ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from methods import METHODS
from raysim.cli.completion import completions, known_methods

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "incomplete", "offered"),
    [
        ([], "paper:fedvg/table_A3", ["paper:fedvg/table_A3"]),  # zsh and fish do not end a word at a colon
        (["paper", ":"], "fedvg/table_A3", ["fedvg/table_A3"]),  # bash does
        (["paper:fedvg/table_A3"], "partition.f", ["partition.form=", "partition.file="]),
        (["paper:fedvg/table_A3"], "local.opt", ["local.optimizer=sgd", "local.optimizer=adamw"]),
        (["paper:fedvg/table_A3"], "local.schedule=co", ["local.schedule=constant", "local.schedule=cosine"]),
        (["paper", ":", "fedvg/table_A3", "local.schedule", "="], "co", ["constant", "cosine"]),
        (["mine.yaml", "local.schedule"], "=", ["constant", "exponential", "cosine"]),
        (["mine.yaml", "local.schedule"], "", ["constant", "exponential", "cosine"]),  # as typer hands it on
        (
            ["mine.yaml"],
            "data.split_within_clients=",
            [f"data.split_within_clients={word}" for word in ("true", "false")],
        ),
        (["mine.yaml"], "model.lora.r", ["model.lora.rank="]),
        (["mine.yaml"], "methods=[fedpr", ["methods=[fedproto]", "methods=[fedprox]"]),
        (["mine.yaml"], "methods=[fedprox,fedpr", ["methods=[fedprox,fedproto]"]),
        (["mine.yaml", "methods", "="], "[fedv", ["[fedvg]", "[fedvg_cosine]", "[fedvg_loss]"]),
        (["mine.yaml", "rounds=3"], "nothing", []),
        (["mine.yaml"], "rounds=", []),
    ],
)
def test_words_are_completed_however_the_shell_divides_them(before, incomplete, offered):
    assert completions(before, incomplete) == offered


def test_first_come_recipes_then_files_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("example.yaml", "exam.txt", "extra.yml", ".example.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "experiments").mkdir()
    assert completions([], "ex") == [
        "example:diabetes",
        "example:quickstart",
        "example:shapes",
        "example.yaml",
        "extra.yml",
        "experiments/",
    ]
    assert completions(["example"], ":") == ["diabetes", "quickstart", "shapes"]
    assert completions([], "experiments/") == []  # left to the shell


def test_names_of_methods_are_those_of_their_package():
    assert set(known_methods()) == set(METHODS)


@pytest.mark.parametrize("verb", ["run", "tune", "partition", "calibrate", "submit"])
def test_bash_gets_them_behind_each_verb_without_pytorch(verb):
    code = """if True:
        import atexit, sys
        from raysim.cli.main import app
        atexit.register(lambda: print("loaded:", *({"torch", "ray", "methods"} & sys.modules.keys())))
        app(prog_name="raysim")
    """

    def said(*words: str) -> list[str]:
        asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), "_RAYSIM_COMPLETE": "complete_bash"}
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=PROJECT, env={**os.environ, **asked}, capture_output=True, text=True
        )
        return ended.stdout.split()

    assert said("raysim", verb, "example", ":", "quickstart", "local.l") == ["local.lr=", "local.lr_decay=", "loaded:"]
