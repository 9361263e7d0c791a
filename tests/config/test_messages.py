"""What messages say: keys, near names, and each name once."""

from __future__ import annotations

import math
import re

from raysim.base.errors import did_you_mean
from raysim.config import nearest, parse_config
from raysim.plan.find import build_methods


def test_positions_in_lists_are_written_in_one_way():
    raw = {"data": {"test_sets": ["a", 1]}, "evaluation": {"metrics": ["auroc", 3]}, "partition": {"alpha": [math.inf]}}
    raw |= {"report": {"columns": ["x", 2]}, "tune": {"callbacks": [1]}}
    _, faults = parse_config(raw)
    keys = {fault.key for fault in faults}
    assert {"data.test_sets[1]", "evaluation.metrics[1]", "report.columns[1]", "partition.alpha[0]"} <= keys
    assert "tune.callbacks[0]" in {key[: len("tune.callbacks[0]")] for key in keys}
    assert not [key for key in keys if re.search(r"\.\d", key)]


def test_a_near_name_is_offered_once_and_only_if_it_is_near():
    assert did_you_mean("resnet18x", ["resnet18", "resnet18", "vit"], most=3) == "Did you mean 'resnet18'? "
    assert "Did you mean" not in nearest("foo", ["form", "file", "seed"])
    assert nearest("fedporx", ["fedprox", "fedvg"]) == "Did you mean 'fedprox'? Known: fedprox, fedvg"


def test_a_fault_of_a_method_names_it_once():
    _, faults = build_methods([{"fedvg": {"eps": -1.0}}])
    assert [str(fault) for fault in faults] == [
        "methods[0].fedvg.eps: must be greater than or equal to 0, got -1.0 (default 1e-08)"
    ]
