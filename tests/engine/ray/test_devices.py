"""`resources.device` with trainers on Ray, one logical GPU, and the device of tests/device/other.py in their processes."""

from __future__ import annotations

import json

import pytest

from raysim.base.errors import RaysimError
from raysim.running.runner import execute
from tests.support.federations import plan_of, run
from tests.support.runs import a_plan, quietly

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TWO = {"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5}


@pytest.mark.parametrize(
    ("device", "is_everywhere", "taken", "gpus"),
    [
        ("auto", True, {"other"}, 0.5),
        ("auto", False, {"other", "cpu"}, 0.5),  # each trainer has the accelerator of its own machine
        ("cpu", True, {"cpu"}, 0.0),
    ],
)
def test_trainers_take_the_device_of_their_process_unless_cpu_is_asked_for(
    device, is_everywhere, taken, gpus, root, tmp_path
):
    toy = {"tests.support.toys:accelerated": {"folder": str(tmp_path), "is_everywhere": is_everywhere}}
    plan = a_plan(root, tmp_path, ["scaffold", toy], rounds=2, resources={**TWO, "device": device})
    assert quietly(plan)["params_sha256"] == run(plan_of(root, ["scaffold"], rounds=2), root).params_sha256()
    assert {path.name.removeprefix("on-") for path in tmp_path.glob("on-*")} == taken
    facts = json.loads((tmp_path / "a" / "env.json").read_text())["resources"]
    assert (facts["device"], facts["gpus_per_trainer"]) == ("cpu" if device == "cpu" else "gpu", gpus)


def test_a_device_that_no_node_has_is_refused_before_the_shards(root, tmp_path, monkeypatch):
    monkeypatch.setattr("raysim.engine.ray.session.placements", lambda: [{"CPU": 2.0}])
    steps = []
    with pytest.raises(RaysimError, match=r"resources\.device: cuda was asked for, and no node has a GPU"):
        execute(a_plan(root, tmp_path, resources={**TWO, "device": "cuda"}), on_step=steps.append)
    assert "looking for the shards" not in steps


def test_a_node_that_offers_a_gpu_without_cuda_is_named(root, tmp_path):
    with pytest.raises(RaysimError, match=r"resources\.device: PyTorch has no cuda on this machine, only cpu"):
        quietly(a_plan(root, tmp_path, resources={**TWO, "device": "cuda"}))
