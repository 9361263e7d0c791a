"""The list of method cases is whole, and no case is there twice."""

from __future__ import annotations

import json

import pytest

from methods import METHODS
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES, MEASURES, names_of


def test_every_method_is_in_a_list_of_cases():
    listed = set().union(*(names_of(methods) for cases in (CNN_CASES, ADAPTER_CASES) for methods in cases.values()))
    assert {name for name in listed if ":" not in name} | MEASURES == set(METHODS)


@pytest.mark.parametrize("cases", [CNN_CASES, ADAPTER_CASES], ids=["cnn", "adapters"])
def test_no_case_is_listed_twice(cases):
    assert len({json.dumps(methods, sort_keys=True) for methods in cases.values()}) == len(cases)
