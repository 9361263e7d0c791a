"""What became of trials: their scores and their ranks."""

from __future__ import annotations

import csv
import math
from types import SimpleNamespace

import pytest

from raysim.base.errors import ConfigError
from raysim.cli.printing import show_sweep
from raysim.config import Config
from raysim.folders.run_folder import RunFolder
from raysim.tuning import trial as trial_module
from raysim.tuning.outcome import Outcome, fill_twins, outcome, ranked, write_results
from tests.support.sweeps import a_sweep


def test_trials_are_compared_by_the_accuracy_at_the_best_validation(root, tmp_path, monkeypatch):
    """By that of the run so far while it runs, by that of the whole run at its end."""
    tune = {"metric": "accuracy_at_best_validation"}
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, tune, rounds=4)
    validation, test = [0.5, 0.7, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]
    metrics = [
        {"server/validation_accuracy": v, "server/accuracy": t, "system/round_s": 1.0}
        for v, t in zip(validation, test, strict=True)
    ]
    folder = sweep.folder / sweep.trials[0].name
    folder.mkdir(parents=True)
    with open(folder / "progress.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["round", *metrics[0]])
        writer.writeheader()
        writer.writerows({"round": index, **row} for index, row in enumerate(metrics))
    found = outcome(sweep, sweep.trials[0])
    assert (found.score, found.best_round) == (0.2, 1)
    told = []
    monkeypatch.setattr(trial_module.tune, "report", lambda result: told.append(result["accuracy_at_best_validation"]))
    reporter = trial_module._Reporter(sweep.base.tune)
    reporter.num_rounds = 4
    for index, row in enumerate(metrics):
        reporter._report(index, row)
        if index == 2:  # the run goes on from a checkpoint after its second round
            reporter.report_again([{"round": "0", "server/accuracy": "0.1"}, {"round": "1", "server/accuracy": "0.2"}])
            reporter._report(2, row)
    reporter.finish()
    assert told == [0.1, 0.2, 0.2, 0.2]
    with pytest.raises(ConfigError, match=r"tune.metric: .* needs a validation set, and trial seed=0 has none"):
        a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, tune, data={"root": str(root), "validation": 0})


def test_trials_without_a_finite_score_rank_last(root, tmp_path):
    space = {"seed": {"grid_search": [0, 1, 2]}}
    for metric, names in (("accuracy", ["seed=2", "seed=1", "seed=0"]), ("loss", ["seed=1", "seed=2", "seed=0"])):
        sweep = a_sweep(root, tmp_path, space, {"metric": f"server/{metric}"})
        scores = dict(zip([trial.name for trial in sweep.trials], (math.nan, 0.25, 0.5), strict=True))
        outcomes = {name: Outcome("completed", {}, score) for name, score in scores.items()}
        assert [trial.name for trial in ranked(sweep, outcomes)] == names


def test_losses_are_better_when_small(root, tmp_path):
    space = {"seed": {"grid_search": [0, 1]}}
    for tune, first in (({"metric": "server/loss"}, "seed=0"), ({"metric": "server/accuracy"}, "seed=1")):
        sweep = a_sweep(root, tmp_path, space, tune)
        outcomes = {trial.name: Outcome("completed", {}, number / 10) for number, trial in enumerate(sweep.trials)}
        assert ranked(sweep, outcomes)[0].name == first


def test_trials_without_the_metric_are_named_and_their_old_ranking_is_gone(root, tmp_path, capsys):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}})
    sweep.folder.mkdir(parents=True)
    ends = {trial.name: Outcome("completed", {"seed": n}, n / 10, 0, 1.0) for n, trial in enumerate(sweep.trials)}
    write_results(sweep, ends)
    assert (sweep.folder / "best.yaml").is_file()
    assert show_sweep(sweep, ends) == 0
    assert "not ranked" not in capsys.readouterr().err
    one = {**ends, "seed=0": Outcome("completed", {"seed": 0}, None, None, 1.0)}
    assert show_sweep(sweep, one) == 0
    assert "recorded no server/accuracy: seed=0\n" in capsys.readouterr().err
    none = {name: Outcome("completed", {}, None, None, 1.0) for name in ends}
    write_results(sweep, none)
    assert not (sweep.folder / "best.yaml").exists()
    assert show_sweep(sweep, none) == 1
    text = capsys.readouterr()
    assert "best trial" not in text.out
    assert "another tune.metric" in text.err


def test_the_last_round_of_a_run_that_ended_early_is_evaluated(root, tmp_path):
    sweep = a_sweep(
        root, tmp_path, {"seed": {"grid_search": [0]}}, {"metric": "accuracy"}, rounds=8, evaluation={"every": 3}
    )
    folder = RunFolder(sweep.folder / sweep.trials[0].name)
    folder.path.mkdir(parents=True)
    rows = [f"{index},{accuracy},1.0" for index, accuracy in enumerate((0.1, 0.2, 0.3, 0.4))]
    folder.progress.write_text("\n".join(["round,server/accuracy,system/round_s", *rows, ""]))
    folder.mark("COMPLETED", "a target was reached")
    assert outcome(sweep, sweep.trials[0]).score == 0.4


@pytest.mark.parametrize("mark", ["COMPLETED", "STOPPED"])
def test_a_duplicate_ends_as_its_original_did(tmp_path, mark):
    trials = [SimpleNamespace(name=name, same_as=first, config=Config()) for name, first in (("a", ""), ("b", "a"))]
    original, duplicate = (RunFolder(tmp_path / trial.name) for trial in trials)
    original.path.mkdir()
    original.mark(mark)
    fill_twins(SimpleNamespace(folder=tmp_path, trials=trials))
    assert duplicate.status.name == original.status.name == mark.lower()
