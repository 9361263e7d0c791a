"""The house stays readable: functions, classes and folders fit in the head; a name stands for one thing."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict

from packaging.requirements import Requirement

from tests.structure import (
    CLASS_LINES,
    ROOT,
    code_lines,
    full_folders,
    num_keys,
    pointing_words,
    pointing_words_shown,
    shared_file_names,
    shared_functions,
    shown_texts,
    sources,
    too_long,
)

#: Folders that may have any number of files -> why.
ANY_NUMBER = {"methods": "a file for each method is the mechanism: a new one is a file and its name in a group"}

#: Folders that are too full, at their size of today.
FULL_FOLDERS: dict[str, int] = {}

#: Keys of a configuration. A new one takes the place of another, or raises this with a reason; the
#: last: data.fraction, for quick tries on a part of a set, data.scale_targets, without which costs in EUR diverge, and
#: progress, for numbers that a method is for, and resources.device, without which a run cannot be held to one kind of
#: device, on which its bits depend, and local.compile, without which a card waits for Python between small operations.
NUM_KEYS = 150

#: Names of public functions that stand in two files. Verbs and their functions: main, prepare, recipes, report, run, tune.
SAME_FUNCTIONS = {"main", "prepare", "recipes", "report", "run", "tune"}


def test_no_class_is_too_long():
    assert not too_long((ast.ClassDef,), CLASS_LINES)  # of functions ruff counts the branches: C901, PLR0912


def test_no_folder_is_too_full():
    assert {name: count for name, count in full_folders().items() if name not in ANY_NUMBER} == FULL_FOLDERS


def test_the_number_of_keys_is_known():
    assert num_keys() == NUM_KEYS


def test_a_file_name_stands_in_one_room():
    assert not shared_file_names()


def test_the_name_of_a_public_function_stands_once():
    assert shared_functions() == SAME_FUNCTIONS


def test_code_lines_leave_out_blanks_comments_and_docstrings():
    text = '"""One.\n\nTwo."""\n\nx = 1  # why\n\n\ndef f():\n    """Doc."""\n    # no code\n    return """a\nb"""\n'
    assert code_lines(text) == 4


def test_docstrings_name_things_instead_of_pointing_at_them():
    per_100, dense = pointing_words()
    assert per_100 <= 3  # 2.8; the limit of house-style is 4
    assert dense <= 3


def test_messages_keys_and_captions_name_things_too():
    assert pointing_words_shown() <= 3  # 2.8 of 11,800 words; the limit of house-style is 5


def test_shown_texts_leave_out_docstrings_and_short_strings():
    text = '"""A docstring of four words."""\n\nx = f"run {1} is it now"\ny = "two words"\nf("a message of four")\n'
    assert sorted(shown_texts(text)) == ["a message of four", "run {} is it now"]


def test_constraints_min_are_the_floors_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        needed
        for name, extra in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for needed in extra
    ]
    floors = map(Requirement, [*project["dependencies"], *extras])
    minima = map(Requirement, (ROOT / "constraints-min.txt").read_text().splitlines())
    versions = {minimum.name: str(minimum.specifier) for minimum in minima}
    assert {floor.name: str(floor.specifier).replace(">=", "==") for floor in floors}.items() <= versions.items()


def test_the_name_of_a_public_class_stands_once():
    homes = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}
