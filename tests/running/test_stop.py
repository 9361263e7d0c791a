"""Stop conditions: what ends a run early, what is refused, sweeps, the command, a kill. More of them in test_api.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import yaml
from typer.testing import CliRunner

import raysim
from raysim.base.errors import ConfigError, RaysimError, RunExists
from raysim.cli.main import app
from raysim.config import StopGroup
from raysim.running.record import judged, reason_to_stop


@pytest.fixture
def settings(settings: dict[str, object]) -> dict[str, object]:
    return {**settings, "rounds": 6}


def test_a_run_ends_at_the_first_evaluation_after_its_simulated_time():
    table = [{**row, "time/simulated_s": str(2.5 * number)} for number, row in enumerate(rows(0.1, 0.2, 0.3), 1)]
    assert not reason_to_stop(StopGroup(simulated_s=5.0), table[:1], 1)
    assert reason_to_stop(StopGroup(simulated_s=5.0), table[:2], 1) == "5 s of simulated time: 5 were asked for"
    assert not reason_to_stop(StopGroup(simulated_s=5.0), table, 2)  # between two evaluations


def test_nan_is_never_best():
    """A first score that is no number neither stays the best one nor keeps patience and targets from being met."""
    table = rows(float("nan"), 0.3, 0.2, float("nan"))
    scores = judged(table, 4)
    assert (scores["best_accuracy"], scores["best_round"]) == (0.3, 1)
    assert reason_to_stop(StopGroup(score=0.25), table, 1) == "accuracy 0.3000 in round 2: 0.25 was asked for"
    assert reason_to_stop(StopGroup(patience=2), table, 1) == "no better accuracy than 0.3000 for 2 rounds"
    assert judged(rows(float("nan"), float("nan")), 2)["best_accuracy"] is None
    assert reason_to_stop(StopGroup(patience=2), rows(*[float("nan")] * 3), 1) == "no number for 2 rounds"


def rows(*scores: float | None) -> list[dict[str, str]]:
    return [
        {"round": str(i), "server/accuracy": "" if score is None else str(score), "system/round_s": "2.0"}
        for i, score in enumerate(scores)
    ]


def test_reasons():
    assert reason_to_stop(StopGroup(score=0.5), rows(0.4, 0.5), 1).startswith("accuracy 0.5000 in round 2")
    assert not reason_to_stop(StopGroup(score=0.5), rows(0.4, 0.4999), 1)
    assert reason_to_stop(StopGroup(patience=2), rows(0.4, 0.4, 0.3), 1).startswith(
        "no better accuracy than 0.4000 for 2"
    )
    assert not reason_to_stop(StopGroup(patience=2), rows(0.4, 0.5, 0.3), 1)
    assert not reason_to_stop(StopGroup(), rows(0.4), 1)
    # Every third round is evaluated: the run ends in such a round, or with evaluation.every 0 in any.
    assert not reason_to_stop(StopGroup(patience=1, score=0.1), rows(None, None, 0.4, None), 3)
    assert reason_to_stop(StopGroup(patience=1), rows(None, None, 0.4, None, None, 0.3), 3)


def test_reasons_of_a_task_without_accuracy_are_those_of_a_resumed_run():
    """In this process the rows are what was measured: the first one, which was not scored, lacks the column."""
    times, scored = {"system/round_s": "2.0"}, {"server/rmse": "0.1", "server/loss": "0.01"}
    fresh = [{"round": str(index), **times, **(scored if index % 2 else {})} for index in range(4)]
    again = [{"server/rmse": "", "server/loss": "", **row} for row in fresh]
    for stop in (StopGroup(score=0.5), StopGroup(patience=1)):
        reasons = {reason_to_stop(stop, known, 2) for known in (fresh, again)}
        assert len(reasons) == 1
        assert "rmse" in reasons.pop()


@pytest.mark.slow
def test_a_run_that_ends_early_was_evaluated_last_and_says_why(settings, tmp_path):
    path = tmp_path / "a.yaml"
    given = {**settings, "name": "a", "evaluation": {"every": 2}, "stop": {"score": 0}}
    path.write_text(yaml.safe_dump(given))
    result = CliRunner().invoke(app, ["run", str(path)])
    assert result.exit_code == 0, result.output
    assert "ended early: accuracy 0." in result.output
    run = raysim.load(tmp_path / "runs" / "a")
    assert run.summary["rounds"] == 2
    assert run.summary["mean_last_10pct_accuracy"] == run.accuracy
    assert run.status.message == run.summary["stopped_by"]
    assert (run.folder / "confusion.png").is_file()
    assert run.summary["params_sha256"] == raysim.run(settings, name="b", rounds=2, quiet=True).summary["params_sha256"]


def test_on_round_may_end_a_run_between_two_evaluations(settings, tmp_path, capsys):
    stop = lambda record: "stop" if record.round_index == 3 else None  # noqa: E731
    run = raysim.run(settings, name="a", rounds=9, evaluation={"every": 3}, on_round=stop)
    assert (run.summary["rounds"], run.summary["stopped_by"]) == (4, "on_round returned stop")
    assert run.summary["mean_last_10pct_accuracy"] is None


def test_conditions_that_cannot_be_met_are_faults(settings):
    for given, message in (
        ({"stop": {"score": 0.9}, "evaluation": {"every": 0}}, r"stop\.score: looks at evaluations"),
        ({"stop": {"patience": 3}, "data": {"test": 0.0}}, r"stop\.patience: needs test examples"),
        ({"stop": {"score": 0.9}, "methods": ["ccvr"]}, "stop: ccvr works after the last round"),
        ({"stop": {"loss": 1.5}}, r"stop\.loss"),
    ):
        with pytest.raises(ConfigError, match=message):
            raysim.run(settings, given, name="a", quiet=True)
    stop = lambda record: "stop" if record.round_index == 1 else None  # noqa: E731
    with pytest.raises(RaysimError, match="ccvr works after the last round in round 2"):
        raysim.run(settings, name="b", methods=["ccvr"], on_round=stop, quiet=True)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_another_condition_lets_it(settings):
    through = raysim.run(settings, name="through", local__schedule="cosine", quiet=True)
    given = {"local__schedule": "cosine", "quiet": True, "name": "a"}
    assert raysim.run(settings, stop__score=0, **given).summary["rounds"] == 1
    with pytest.raises(RunExists):
        raysim.run(settings, stop__score=0.001, **given)
    on = raysim.run(settings, **given)  # the schedule goes by `rounds`, which are the same
    assert on.summary["params_sha256"] == through.summary["params_sha256"]
    assert (on.summary["stopped_by"], on.status.message) == ("", "")
    with pytest.raises(RunExists):  # nothing is left to do
        raysim.run(settings, stop__score=2, **given)
    with pytest.raises(ConfigError, match=r"local\.lr: is 0\.3, but the finished run in"):  # it says what differs
        raysim.run(settings, local__lr=0.3, **given)


def test_a_run_that_goes_on_has_no_summary_until_it_is_complete(settings):
    run = raysim.run(settings, name="a", rounds=2, quiet=True)

    def fail(record: object) -> None:
        assert not (run.folder / "summary.json").exists()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raysim.run(settings, name="a", rounds=4, on_round=fail, quiet=True)
    assert raysim.load(run.folder).summary == {}


@pytest.mark.usefixtures("ray_cluster")
def test_trials_that_differ_in_their_end_are_two_and_are_judged_over_their_own_rounds(settings):
    axes = {"stop.score": {"grid_search": [0, 2]}}
    tune = {"param_space": axes, "metric": "mean_last_10pct_accuracy", "max_concurrent": 1}
    runs = raysim.tune(settings, name="ends", tune=tune, quiet=True)
    assert [run.summary["rounds"] for run in runs] == [1, 6]
    results = (runs.folder / "results.csv").read_text().splitlines()
    assert len(results) == 3
    assert f"{runs[0].summary['mean_last_10pct_accuracy']}" in results[1]
    assert raysim.tune(settings, name="ends", tune=tune, quiet=True)[0].summary["rounds"] == 1


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_round(settings, tmp_path):
    """Who trains does not matter: the process that was killed looks at the conditions, with Ray and without."""
    given = {**settings, "rounds": 60, "stop": {"patience": 3}, "checkpoint": {"every_s": 0.0}}
    whole = raysim.run(given, name="whole", quiet=True)
    assert 3 < whole.summary["rounds"] < 60
    path = tmp_path / "cut.yaml"
    path.write_text(yaml.safe_dump({**given, "name": "cut"}))
    command = [sys.executable, "-m", "raysim", "run", str(path)]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **quiet)
    folder, begun = tmp_path / "runs" / "cut", time.monotonic()
    while not list(folder.glob("checkpoints/round-*/checkpoint.json")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() - begun < 120
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "COMPLETED").exists()
    again = subprocess.run(command, **quiet)
    assert again.returncode == 0, again.stdout
    assert "resuming at round" in again.stdout
    assert "ended early: no better accuracy" in again.stdout
    cut = raysim.load(folder)
    assert cut.summary["rounds"] == whole.summary["rounds"]
    assert cut.summary["params_sha256"] == whole.summary["params_sha256"]
