"""Sweeps whose storage is a URI."""

from __future__ import annotations

import shutil

import raysim
from tests.support.sweeps import a_sweep, digest, digest_of_run, run


def test_sweep_at_a_uri_is_read_and_gone_on_with_from_another_machine(root, tmp_path, ray_cluster, monkeypatch):
    """The driver has other local folders than the trials' processes, as where these are on other nodes."""
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "driver"))
    place = f"file://{tmp_path}/there"
    cases = {"a": {"cohort": {"size": 12}}, "b": {"cohort": {"fraction": 1.0, "size": None}}}  # everybody, both times
    space = {"seed": {"grid_search": [0, 1]}, "case": {"grid_search": cases}}

    def sweep():
        return a_sweep(root, tmp_path, space, storage=place, model={"name": "mlp"}, rounds=2)

    planned = sweep()
    outcomes, _ = run(planned)
    assert {found.status for found in outcomes.values()} == {"completed"}
    assert digest(planned.folder / planned.trials[0].name) == digest_of_run(planned.trials[0].raw, tmp_path)
    there = tmp_path / "there" / "s"
    assert {"results.csv", "best.yaml", "sweep.yaml"} < {path.name for path in there.iterdir()}
    for trial in planned.trials:  # two of them only repeat the others
        assert (there / trial.name / "COMPLETED").is_file()
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "other"))
    lost = next(trial.name for trial in planned.trials[1:] if not trial.same_as)
    shutil.rmtree(there / lost)
    again, lines = run(sweep())
    assert lines[0].startswith(f"1 of {len(planned.trials)} trials to run")
    assert (there / lost / "COMPLETED").is_file()
    assert {found.status for found in again.values()} == {"completed"}
    assert len(raysim.load(f"{place}/s")) == len(planned.trials)
