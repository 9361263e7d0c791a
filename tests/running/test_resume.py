"""What a run does with what it finds, row by row."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from raysim.base.errors import ConfigError, RunExists
from raysim.config import Config
from raysim.folders.run_folder import RunFolder
from raysim.running.resume import next_step

#: What is found and asked for, beside a run of four rounds that is asked for again.
NO_CONFIG = {"config": False}
FINISHED = {"is_finished": True}
LR = {"lr": 0.2}
FEWER = {"rounds": 3}
MORE = {"rounds": 6}
OTHER_STOP = {"stop": {"score": 0.9}}
GOES_ON = {"rows": 2}  # ended by another condition before its last round
DATA = {"checksum": "other"}
WEIGHTS = {"weights": "other"}
DAMAGE = {"partition": {}}

ROWS = [
    (NO_CONFIG, "begin"),
    ({**NO_CONFIG, **FINISHED}, "RunExists: run 'a' is finished"),
    ({"is_sweep": True}, "RunExists: 'a' is a sweep, not a run"),
    ({}, "resume"),
    (MORE, "resume"),
    (OTHER_STOP, "resume"),
    ({**OTHER_STOP, **GOES_ON}, "resume"),
    (FEWER, "ConfigError: rounds: is 3, but the unfinished run in runs/a has 4"),
    (LR, "ConfigError: local.lr: is 0.2, but the unfinished run in runs/a has 0.1"),
    ({**LR, **MORE}, "ConfigError: local.lr: is 0.2"),
    (DAMAGE, "RunExists: run 'a' cannot be resumed: config.yaml or partition.json is damaged"),
    (DATA, "ConfigError: data: the set changed"),
    (WEIGHTS, "ConfigError: model.pretrained: the weights in no file changed"),
    ({**DATA, **WEIGHTS}, "ConfigError: data: the set changed"),
    ({**DATA, **LR}, "ConfigError: local.lr: is 0.2"),
    ({**MORE, "depends_on_length": "local.schedule"}, "ConfigError: rounds: the unfinished run in runs/a has 4 rounds"),
    (FINISHED, "show"),
    ({**FINISHED, **MORE}, "resume"),
    ({**FINISHED, **FEWER}, "RunExists: run 'a' is finished"),
    ({**FINISHED, **OTHER_STOP, **GOES_ON}, "resume"),
    ({**FINISHED, **OTHER_STOP}, "RunExists: run 'a' is finished"),
    ({**FINISHED, **LR}, "ConfigError: local.lr: is 0.2, but the finished run in runs/a has 0.1"),
    ({**FINISHED, **DATA}, "ConfigError: data: the set changed"),
    ({**FINISHED, **DAMAGE}, "RunExists: run 'a' is finished"),
    (
        {**FINISHED, **MORE, "depends_on_length": "fedacg"},
        "ConfigError: rounds: the finished run in runs/a has 4 rounds",
    ),
]


def answer(path, facts):
    folder = RunFolder(path / "a")
    folder.path.mkdir(parents=True)
    if facts.get("is_sweep"):
        (folder.path / "sweep.yaml").touch()
    if facts.get("config", True):
        folder.write_config(Config(rounds=4, local={"lr": 0.1}).model_dump(mode="json"))
        folder.write_json(folder.partition, facts.get("partition", {"checksum": "same"}))
        folder.weights.write_text("same")
        rows = [{"round": str(index), "system/round_s": "1.0"} for index in range(facts.get("rows", 4))]
        folder.write_progress(rows, ["round", "system/round_s"])
    if facts.get("is_finished"):
        folder.mark("COMPLETED")
    plan = SimpleNamespace(
        config=Config(rounds=facts.get("rounds", 4), local={"lr": facts.get("lr", 0.1)}, stop=facts.get("stop", {})),
        manifest=SimpleNamespace(checksum=facts.get("checksum", "same")),
        weights_sha256=facts.get("weights", "same"),
        depends_on_length=facts.get("depends_on_length", ""),
    )
    try:
        return next_step(plan, folder, "runs/a")
    except ConfigError as error:
        return f"ConfigError: {error.faults[0]}"
    except RunExists as error:
        return f"RunExists: {error}"


@pytest.mark.parametrize(("facts", "expected"), ROWS)
def test_row_of_the_table(facts, expected, tmp_path):
    got = answer(tmp_path, facts)
    assert got == expected if expected in ("begin", "resume", "show") else got.startswith(expected)


def test_nothing_is_begun_over_a_run_and_nothing_finished_goes_on_unasked(tmp_path):
    """Every combination of a few facts: what is there is never overwritten."""
    choices = ([{}, FINISHED], [{}, MORE, FEWER], [{}, OTHER_STOP], [{}, GOES_ON], [{}, LR], [{}, DATA])
    for number, chosen in enumerate(itertools.product(*choices)):
        facts = {key: value for fact in chosen for key, value in fact.items()}
        got = answer(tmp_path / str(number), facts)
        assert got != "begin"
        if facts.get("is_finished") and got in ("resume", "resume"):
            assert facts.get("rounds", 4) > 4 or "stop" in facts
