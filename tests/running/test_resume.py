"""What a run does with what it finds, row by row."""

from __future__ import annotations

import itertools

import pytest

from raysim.base.errors import ConfigError, Fault, RunExists
from raysim.running.resume import RunState, next_step

HERE = RunState("a", "runs/a", rounds_before=4, rounds=4)
FINISHED = {"is_finished": True}
LR = {"changes": (("local.lr", 0.1, 0.2),)}
FEWER = {"rounds": 3, "changes": (("rounds", 4, 3),)}
MORE = {"rounds": 6, "changes": (("rounds", 4, 6),)}
OTHER_STOP = {"has_other_stop": True}
DATA = {"other_data": Fault("data", "the set changed")}

ROWS = [
    ({"has_config": False}, "begin"),
    ({"has_config": False, **FINISHED}, "RunExists: run 'a' is finished"),
    ({"is_sweep": True}, "RunExists: 'a' is a sweep, not a run"),
    ({}, "resume"),
    (MORE, "extend"),
    (OTHER_STOP, "extend"),
    ({**OTHER_STOP, "goes_on": True}, "extend"),
    (FEWER, "ConfigError: rounds: is 3, but the unfinished run in runs/a has 4"),
    (LR, "ConfigError: local.lr: is 0.2, but the unfinished run in runs/a has 0.1"),
    ({**LR, **MORE, "changes": (*LR["changes"], *MORE["changes"])}, "ConfigError: local.lr: is 0.2"),
    ({"damage": "no such key"}, "RunExists: run 'a' cannot be resumed: config.yaml or partition.json is damaged"),
    (DATA, "ConfigError: data: the set changed"),
    ({**DATA, **LR}, "ConfigError: local.lr: is 0.2"),
    ({**MORE, "depends_on_length": "local.schedule"}, "ConfigError: rounds: the unfinished run in runs/a has 4 rounds"),
    (FINISHED, "show"),
    ({**FINISHED, **MORE}, "extend"),
    ({**FINISHED, **FEWER}, "RunExists: run 'a' is finished"),
    ({**FINISHED, **OTHER_STOP, "goes_on": True}, "extend"),
    ({**FINISHED, **OTHER_STOP}, "RunExists: run 'a' is finished"),
    ({**FINISHED, **LR}, "ConfigError: local.lr: is 0.2, but the finished run in runs/a has 0.1"),
    ({**FINISHED, **DATA}, "ConfigError: data: the set changed"),
    ({**FINISHED, "damage": "no such key"}, "RunExists: run 'a' is finished"),
    (
        {**FINISHED, **MORE, "depends_on_length": "fedacg"},
        "ConfigError: rounds: the finished run in runs/a has 4 rounds",
    ),
]


def answer(state: RunState) -> str:
    try:
        return next_step(state)
    except ConfigError as error:
        return f"ConfigError: {error.faults[0]}"
    except RunExists as error:
        return f"RunExists: {error}"


@pytest.mark.parametrize(("found", "expected"), ROWS)
def test_row_of_the_table(found, expected):
    got = answer(RunState(**{**vars(HERE), **found}))
    assert got == expected if expected in ("begin", "resume", "extend", "show") else got.startswith(expected)


def test_nothing_is_begun_over_a_run_and_nothing_finished_goes_on_unasked():
    """Every combination of a few facts: what is there is never overwritten."""
    facts = ([{}, FINISHED], [{}, MORE, FEWER], [{}, OTHER_STOP], [{}, {"goes_on": True}], [{}, LR], [{}, DATA])
    for chosen in itertools.product(*facts):
        found = {key: value for fact in chosen for key, value in fact.items()}
        got = answer(RunState(**{**vars(HERE), **found}))
        assert got != "begin"
        if found.get("is_finished") and got in ("resume", "extend"):
            assert found.get("rounds", 4) > 4 or found.get("has_other_stop")
