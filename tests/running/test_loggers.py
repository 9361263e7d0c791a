"""Loggers of the user's own: every round, also over a kill; faults; the examples of docs/loggers.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

import raysim
from raysim.base.errors import ConfigError, RaysimError
from raysim.plan.check import check
from tests.support.federations import SMALL

ROOT = Path(__file__).parents[2]
FOUR_ROUNDS = {**SMALL, "rounds": 4}

MODULE = """
import json, os, signal
from pathlib import Path

class Logger:
    def __init__(self, kill_at, fail_at, fail_in):
        self.kill_at, self.fail_at, self.fail_in = kill_at, fail_at, fail_in
    def note(self, *what):
        with open("told.jsonl", "a") as file:
            file.write(json.dumps(what) + "\\n")
    def start(self, folder, config):
        assert self.fail_in != "start", "no network"
        self.note("start", folder.name, config["rounds"])
    def round(self, record):
        if record["round"] == self.kill_at and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        assert record["round"] != self.fail_at, "no network"
        self.note("round", record["round"], record["server/accuracy"])
    def end(self, summary):
        self.note("end", summary.get("params_sha256"))

def make(*, kill_at: int = -1, fail_at: int = -1, fail_in: str = ""):
    assert fail_in != "make", "no licence"
    return Logger(kill_at, fail_at, fail_in)

def nothing():
    return 3

number = 4
"""


@pytest.fixture
def settings(root: Path, tmp_path: Path, monkeypatch) -> dict[str, object]:
    (tmp_path / "recording.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "recording", raising=False)
    return {
        **FOUR_ROUNDS,
        "data": {"root": str(root)},
        "storage": str(tmp_path / "runs"),
        "loggers": ["recording:make"],
    }


def test_the_same_logger_twice_is_refused(settings):
    settings["loggers"] = ["recording:make", {"recording:make": {"fail_at": 9}}, "recording:make"]
    with pytest.raises(ConfigError, match=r"loggers\[2\]: 'recording:make' is loggers\[0\] again; remove one"):
        check(settings, "a test")
    check({**settings, "loggers": settings["loggers"][:2]}, "a test")


def told(folder: Path) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_logger_is_told_the_start_every_round_once_and_the_end(settings, tmp_path):
    run = raysim.run(settings, name="a", quiet=True)
    start, *rounds, end = told(tmp_path)
    assert start == ["start", "a", 4]
    assert rounds == [["round", i, accuracy] for i, accuracy in enumerate(run.history["server/accuracy"])]
    assert end == ["end", run.summary["params_sha256"]]
    raysim.run(settings, name="a", rounds=6, quiet=True)  # goes on
    assert [entry[1] for entry in told(tmp_path)[6:]] == ["a", 4, 5, told(tmp_path)[-1][1]]
    bare = raysim.run(settings, name="b", loggers=[], quiet=True)
    assert bare.summary["params_sha256"] == run.summary["params_sha256"]


@pytest.mark.slow
def test_over_a_kill_no_round_is_left_out(settings, tmp_path):
    """SIGKILL while the logger is told round 2: what a checkpoint holds is not told again, round 2 is."""
    given = {**settings, "name": "a", "checkpoint": {"every_s": 0.0}, "loggers": [{"recording:make": {"kill_at": 2}}]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(given))
    command = [sys.executable, "-m", "raysim", "run", "a.yaml"]
    assert subprocess.run(command, capture_output=True).returncode == -9
    assert [entry[:2] for entry in told(tmp_path)] == [["start", "a"], ["round", 0], ["round", 1]]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    rounds = [entry[1:] for entry in told(tmp_path) if entry[0] == "round"]
    history = raysim.load(tmp_path / "runs" / "a").history["server/accuracy"]
    assert rounds == [[i, accuracy] for i, accuracy in enumerate(history)]
    assert [entry[0] for entry in told(tmp_path)].count("end") == 1


def test_rounds_since_the_last_checkpoint_are_told_again(settings, tmp_path):

    def fail(record) -> None:
        if record.round_index == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raysim.run(settings, name="a", checkpoint__every_s=1e9, on_round=fail, quiet=True)
    assert [entry[0] for entry in told(tmp_path)] == ["start", *["round"] * 3, "end"]
    assert told(tmp_path)[-1] == ["end", None]
    raysim.run(settings, name="a", quiet=True)
    rounds = [entry[1:] for entry in told(tmp_path) if entry[0] == "round"]
    assert [number for number, _ in rounds] == [0, 1, 2, 0, 1, 2, 3]
    assert rounds[:3] == rounds[3:6]


def test_a_logger_that_fails_is_left_out_with_one_message(settings, tmp_path, capsys):
    spec = {"recording:make": {"fail_at": 2}}
    run = raysim.run(settings, name="a", loggers=[spec], checkpoint={"every_s": 0.0})
    assert run.status.name == "completed"
    error = capsys.readouterr().err
    assert error.count("failed") == 1
    assert re.search(
        r"recording\.py, line \d+, in round: AssertionError: no network, at round 3; the run continues", error
    )
    raysim.run(settings, name="a", rounds=5, loggers=[spec], quiet=True)
    assert [entry[1] for entry in told(tmp_path) if entry[0] == "round"] == [0, 1, 4]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("recording:mak", r"loggers\[0\]: cannot import logger 'recording:mak'"),
        ("wandb", r"loggers\[0\]: unknown logger 'wandb'"),
        ("recording:number", r"'recording:number' must be a function"),
        ({"recording:make": {"kil_at": 2}}, r"loggers\[0\]\.recording:make.*kil_at"),
        (
            "recording:nothing",
            r"recording\.py, line \d+, in nothing returned int, which has no start and no round and no end",
        ),
        ({"recording:make": {"fail_in": "make"}}, r"recording\.py, line \d+, in make: AssertionError: no licence"),
        ({"recording:make": {"fail_in": "start"}}, r"recording\.py, line \d+, in start: AssertionError: no network"),
    ],
)
def test_a_logger_that_cannot_start_ends_the_run_before_its_first_round(settings, spec, message):
    with pytest.raises(ConfigError, match=message):
        raysim.run(settings, name="a", loggers=[spec], quiet=True)


def test_a_function_of_a_notebook_may_make_a_logger(settings):
    seen: list[object] = []
    note = types.SimpleNamespace(start=lambda *_: None, round=seen.append, end=seen.append)
    module = types.ModuleType("in_notebook")
    module.make = lambda: note
    module.make.__module__, module.make.__qualname__ = "in_notebook", "make"
    sys.modules["in_notebook"] = module
    raysim.run(settings, name="a", loggers=[module.make], quiet=True)
    assert len(seen) == 5


@pytest.mark.usefixtures("ray_cluster")
def test_loggers_are_told_once_where_two_trainers_work(settings, tmp_path):
    raysim.run(settings, name="a", resources={"backend": "ray", "trainers": 2}, quiet=True)
    assert [entry[0] for entry in told(tmp_path)] == ["start", *["round"] * 4, "end"]


class Recorded(types.ModuleType):
    """Stands in for a library: notes every call of its functions."""

    def __init__(self, name: str):
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.info = types.SimpleNamespace(run_id="7")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: self.calls.append((name, dict(named, args=args))) or self


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_examples_of_the_documentation(settings, tmp_path, library, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loggers.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if f"import {library}" in block]
    (tmp_path / f"{library}_logger.py").write_text(code)
    stand_in = Recorded(library)
    monkeypatch.setitem(sys.modules, library, stand_in)
    given = {**settings, "name": "a", "loggers": [f"{library}_logger:make"]}
    raysim.run(given, quiet=True)
    raysim.run(given, rounds=5, quiet=True)
    logged = [call for name, call in stand_in.calls if name in ("log", "log_metrics")]
    assert [call["step"] for call in logged] == [0, 1, 2, 3, 4]
    assert all(call["args"][0]["train/loss"] > 0 for call in logged)
    ends = [name for name, _ in stand_in.calls if name in ("finish", "end_run")]
    assert len(ends) == 2
    sys.modules.pop(f"{library}_logger")


HOSTILE = """
import shutil, sys

class Logger:
    def __init__(self, where, act):
        self.where, self.act = where, act
    def do(self, where):
        if where == self.where:
            if self.act == "exit":
                sys.exit(3)
            if self.act == "interrupt":
                raise KeyboardInterrupt
            shutil.rmtree(self.folder, ignore_errors=True)
    def start(self, folder, config):
        self.folder = folder
        self.do("start")
    def round(self, record):
        self.do("round")
    def end(self, summary):
        self.do("end")

def make(*, where: str, act: str):
    return Logger(where, act)

def leave():
    sys.exit(4)
"""


def hostile(settings, where: str, act: str) -> raysim.Run:
    Path("hostile.py").write_text(HOSTILE)
    spec = {"hostile:make": {"where": where, "act": act}}
    return raysim.run({**settings, "rounds": 2}, loggers=[spec], checkpoint={"every_s": 0}, name=where)


@pytest.mark.slow
def test_a_loggers_exit_is_a_fault_of_that_logger_and_no_signal(settings, capsys):
    with pytest.raises(
        ConfigError, match=r"loggers\[0\]: .*hostile\.py, line \d+, in do: SystemExit: 3; correct or remove"
    ):
        hostile(settings, "start", "exit")
    with pytest.raises(ConfigError, match=r"hostile\.py, line \d+, in leave: SystemExit: 4"):
        raysim.run(settings, loggers=["hostile:leave"], name="b", quiet=True)
    for where in ("round", "end"):
        assert hostile(settings, where, "exit").status.name == "completed"
        assert "in do: SystemExit: 3, at" in " ".join(capsys.readouterr().err.split())


# TensorBoard's writer is a thread, which may meet the missing file first.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["start", "round", "end"])
def test_a_logger_that_deletes_the_run_directory_is_named(where, settings):
    with pytest.raises(RaysimError, match=r"run directory or its config\.yaml is missing after .*hostile\.py.* at "):
        hostile(settings, where, "delete")


def test_an_interrupt_that_a_logger_raises_ends_the_run_as_ctrl_c_does(settings):
    with pytest.raises(KeyboardInterrupt, match="resumes"):
        hostile(settings, "round", "interrupt")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtins:print", "print returned NoneType, which has no start"),
        ("builtins:object", "object returned object, which has no start"),
        ("builtins:dict", "takes no options that could be read"),
        ("time:sleep", "takes no options that could be read"),
    ],
)
def test_a_built_in_is_no_logger(name, message, settings):
    with pytest.raises(ConfigError, match=message):
        raysim.run(settings, loggers=[name], name="a", quiet=True)
