"""Shards and weights of a sweep, made before its trials start."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from raysim.base.errors import ConfigError
from raysim.data import federation
from raysim.models import build_model
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.tuning.ready import make_ready, ready_for
from tests.support.sweeps import a_sweep, digest_of_run, run

pytestmark = pytest.mark.ray


def test_twelve_trials_over_three_partitions_need_no_set_after_three_shard_sets_were_built_at_once(
    root, tmp_path, ray_cluster, monkeypatch
):
    place = tmp_path / "place"
    (place / "digits").mkdir(parents=True)
    for path in (root / "digits").iterdir():
        (place / "digits" / path.name).write_bytes(path.read_bytes())
    space = {
        "partition.seed": {"grid_search": [0, 1, 2]},
        "local.lr": {"grid_search": [0.1, 0.2]},
        "local.momentum": {"grid_search": [0.0, 0.5]},
    }
    spec = check(raw_of(place), "a test").spec
    save_file(build_model(spec, seed=77).state_dict(), tmp_path / "start.safetensors")
    sweep = a_sweep(place, tmp_path, space, rounds=1, model={"pretrained": str(tmp_path / "start.safetensors")})
    assert len({trial.partition_sha256 for trial in sweep.trials}) == 3
    builds = []
    build = federation._build
    monkeypatch.setattr(
        federation, "_build", lambda missing, *rest: builds.append(len(missing)) or build(missing, *rest)
    )
    made = make_ready([trial.config for trial in sweep.trials], print)
    assert builds == [3]
    trial = sweep.trials[-1]
    expected = digest_of_run({**trial.raw, "name": "x"}, tmp_path)
    (place / "digits").rename(tmp_path / "away")
    raw = {**trial.config.model_dump(mode="json"), "name": "again"}
    with pytest.raises(ConfigError, match="data"):
        check({**raw, "data": {**raw["data"], "name": "gone"}}, "a test")
    plan = check(raw, "a test", ready=ready_for(trial.config, made))
    assert execute(plan)["params_sha256"] == expected
    assert builds == [3]
    assert ready_for(trial.config.model_copy(update={"seed": 99, "partition": sweep.base.partition}), made) is None


def raw_of(place):
    from tests.support.federations import raw_config

    return raw_config(place)


@pytest.mark.slow
def test_trials_use_what_was_made_for_them(root, tmp_path, ray_cluster):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, rounds=1)
    before = set((root / "shards").iterdir()) if (root / "shards").exists() else set()
    outcomes, _ = run(sweep)
    assert {end.status for end in outcomes.values()} == {"completed"}
    made = {path.name for path in set((root / "shards").iterdir()) - before if path.is_dir()}
    assert made <= {trial.partition_sha256[:24] for trial in sweep.trials}
