"""The examples in docstrings of the numeric core run and print what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from raysim.core import conflicts, layout, method, stack, weights
from raysim.training import aggregate

#: Module -> what has to have an example.
EXAMPLES = {
    conflicts: {"conflicts"},
    layout: {"Layout"},
    method: {"Method"},
    stack: {"Stack"},
    weights: {"RightMap", "take", "normalised"},
    aggregate: {"fold", "rounding_constants"},
}
CASES = [
    pytest.param(module, example, id=example.name.removeprefix("raysim."))
    for module in EXAMPLES
    for example in doctest.DocTestFinder(exclude_empty=True).find(module)
    if example.examples
]


@pytest.mark.parametrize(("module", "example"), CASES)
def test_the_example_prints_what_it_says(module: ModuleType, example: doctest.DocTest):
    said: list[str] = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_everything_that_needs_an_example_has_one(module: ModuleType):
    have = {example.name.rpartition(".")[2] for owner, example in (case.values for case in CASES) if owner is module}
    assert have >= EXAMPLES[module]
