"""How many trainers there are and what each gets, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from raysim.base.errors import ConfigError
from raysim.config import CohortGroup, Config
from raysim.engine.device import accelerator
from raysim.engine.schedule import fitting
from raysim.plan.resources import check_resources, resolve_resources, share_of

PAGE = Path(__file__).parents[2] / "docs" / "placement.md"


def resources(**values):
    return Config.model_validate({"resources": values})


def ten_clusters():
    """(nodes, settings, what is decided) of each row of the table in docs/placement.md, under its first column."""
    lines = PAGE.read_text().partition("| GPUs each |\n")[2].splitlines()[1:11]
    for line in lines:
        name, nodes, asked, *decided = [cell.strip(" `") for cell in line.strip("|").split("|")]
        yield pytest.param(yaml.safe_load(nodes), yaml.safe_load(asked), tuple(map(float, decided)), id=name)


def decided(asked, rooms):
    """What is decided, which must fit, and leave no room where the number of trainers is auto."""
    config = resources(**asked)
    taken = resolve_resources(config, rooms)
    places = [room for room in rooms if room.get("GPU") or not taken.gpus_per_trainer]
    room = sum(fitting(place, share_of(taken, config)) for place in places)
    is_auto = config.resources.trainers == "auto"
    assert room == taken.trainers if is_auto else room >= taken.trainers  # so nothing grows by itself
    return taken


@pytest.mark.parametrize(("nodes", "asked", "expected"), ten_clusters())
def test_table_of_ten_clusters_is_what_auto_decides(nodes, asked, expected):
    assert decided(asked, nodes) == expected


@pytest.mark.parametrize(
    ("asked", "rooms", "expected"),
    [
        ({"cpus_per_trainer": 2}, [(5, 0)], (2, 2.0, 0.0)),
        ({}, [(2, 1)], (2, 1.0, 0.5)),
        ({"gpus_per_trainer": 0.5}, [(16, 2)], (4, 1.0, 0.5)),
        ({"gpus_per_trainer": 0.25, "trainers": 2}, [(4, 0)], (2, 1.0, 0.0)),
        ({"trainers": 3, "cpus_per_trainer": 0.5}, [(2, 0)], (3, 0.5, 0.0)),
        ({"trainers": 3}, [(8, 2)], (3, 1.0, 0.5)),
        ({"trainers": 6}, [(8, 1)], (6, 1.0, 0.1666)),
        ({"gpus_per_trainer": 0.4}, [(8, 2)], (4, 1.0, 0.4)),
        ({}, [(8, 0.2)], (1, 1.0, 0.2)),  # a bundle of a sweep's trial
        ({}, [(16, 0), (4, 1)], (4, 1.0, 0.25)),
        ({"cpus_per_trainer": 2}, [(3, 0), (3, 0)], (2, 2.0, 0.0)),  # no trainer lies on two nodes
        ({}, [(2, 1), (8, 1)], (6, 1.0, 0.25)),
        ({"gpus_per_trainer": 0.4}, [(8, 1), (1, 1)], (3, 1.0, 0.4)),
        ({"trainers": 5}, [(16, 1), (2, 4)], (5, 1.0, 0.3333)),
    ],
)
def test_auto_picks_what_fits(asked, rooms, expected):
    assert decided(asked, [{"CPU": cpus, "GPU": gpus} for cpus, gpus in rooms]) == expected


@pytest.mark.parametrize(
    ("asked", "nodes", "text"),
    [
        (
            {"trainers": 5},
            [{"CPU": 4}],
            r"resources\.trainers: 5 trainers with \{CPU: 1\} each were asked for, .* room for 4 \(",
        ),
        (
            {"trainers": 4, "gpus_per_trainer": 0.5},
            [{"CPU": 8, "GPU": 1}],
            r"4 trainers with \{CPU: 1, GPU: 0.5\} .* for 2",
        ),
        ({"trainers": 3, "cpus_per_trainer": 2}, [{"CPU": 3}] * 2, r"have room for 2 \(\{CPU: 3\}; \{CPU: 3\}\)"),
        ({"custom": {"mig": 1}}, [{"CPU": 2, "big": 1, "memory": 9, "node:a": 1}], "no node has 'mig'; there are big"),
        ({"custom": {"mig": 1}}, [{"CPU": 2}], "start the nodes with `ray start --resources`"),
        ({"custom": {"mig": 2}, "trainers": 2}, [{"CPU": 2, "mig": 3}], r"2 trainers with \{CPU: 1, mig: 2\} each"),
        (
            {"custom": {"accelerator_type:A100": 0.001}},
            [{"CPU": 2, "accelerator_type:T4": 1}],
            "no node has 'accelerator_type:A100'; there are accelerator_type:T4",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_what_there_is(asked, nodes, text):
    with pytest.raises(ConfigError, match=text):
        resolve_resources(resources(**asked), nodes)


@pytest.mark.parametrize(
    ("asked", "nodes", "expected"),
    [
        ({"trainers": 40}, [{"CPU": 4}], (40, 1, 0)),
        ({"trainers": {"min": 2, "max": 40}}, [{"CPU": 4}], (4, 1, 0)),
        ({"trainers": {"min": 2, "max": 3}}, [{"CPU": 4}], (3, 1, 0)),
        ({"trainers": {"min": 6, "max": 40}}, [{"CPU": 4}], (6, 1, 0)),
        ({}, [{}], (1, 1, 0)),
        ({"trainers": 8, "gpus_per_trainer": 0.5}, [{"CPU": 4}], (8, 1, 0.5)),  # GPUs are asked for by a number
        ({"trainers": 8}, [{"CPU": 4}], (8, 1, 0)),
        ({"trainers": 40}, [{"CPU": 4, "GPU": 1}], (40, 1, 0.25)),  # not a fortieth of the one that is there
        ({"trainers": 6}, [{"CPU": 6, "GPU": 1}], (6, 1, 0.1666)),
        ({"custom": {"accelerator_type:A100": 0.001}, "gpus_per_trainer": 1}, [{"CPU": 4}], (1, 1, 1)),
        ({"custom": {"mig": 1}}, [{"CPU": 4}], (1, 1, 0)),
    ],
)
def test_what_an_autoscaler_may_bring_is_not_refused(asked, nodes, expected):
    assert resolve_resources(resources(**asked), nodes, may_grow=True) == expected


def test_a_run_begins_with_what_there_is_between_min_and_max():
    config = resources(trainers={"min": 2, "max": 5})
    assert [resolve_resources(config, [{"CPU": cpus}]).trainers for cpus in (2, 4, 8)] == [2, 4, 5]
    assert resolve_resources(config, [{"CPU": 8, "GPU": 1}]) == (4, 1, 0.25)
    with pytest.raises(ConfigError, match="have room for 1"):
        resolve_resources(config, [{"CPU": 1}])


def test_shares_that_no_node_could_give_are_refused_before_ray_starts():
    faults = check_resources(resources(gpus_per_trainer=1.5, custom={"GPU": 1, "node:a": 1, "mig": 1}))
    assert [str(fault).partition(";")[0] for fault in faults] == [
        "resources.gpus_per_trainer: 1.5 is neither a fraction of a GPU nor a whole number of GPUs",
        "resources.custom: GPU, node:a is Ray's own",
    ]


@pytest.mark.parametrize("gpus", [0.5, 1, 2])
def test_a_fraction_of_a_gpu_and_whole_gpus_are_no_fault(gpus):
    assert check_resources(resources(gpus_per_trainer=gpus)) == []


def test_share_has_the_names_of_ray():
    config = resources(custom={"mig": 1, "accelerator_type:T4": 0.001}, trainers=1)
    taken = resolve_resources(config, [{"CPU": 2, "GPU": 1, "mig": 1, "accelerator_type:T4": 1}])
    assert share_of(taken, config) == {"CPU": 1.0, "GPU": 1.0, "mig": 1, "accelerator_type:T4": 0.001}


@pytest.mark.parametrize(
    ("asked", "cohort", "cores", "cluster", "expected"),
    [
        ({}, 10, 4, "", False),
        ({}, 10, 1, "", True),  # one core
        ({"cpus_per_trainer": 4}, 10, 4, "", True),  # room for one trainer
        ({}, 1, 4, "", True),  # one client a round
        ({"trainers": 1}, 10, 4, "", True),
        ({"trainers": {"min": 1, "max": 4}}, 10, 4, "", False),
        ({"trainers": 2}, 10, 1, "", False),  # more than there is room for is refused, not ignored
        ({"trainers": 1}, 10, 4, "head:6379", False),
        ({"backend": "ray", "trainers": 1}, 1, 1, "", False),
        ({"backend": "serial", "trainers": 4}, 10, 4, "head:6379", True),
    ],
)
def test_auto_is_serial_where_one_trainer_would_do_all_the_work(asked, cohort, cores, cluster, expected, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    config = resources(**asked).model_copy(update={"cohort": CohortGroup(size=cohort)})
    assert config.is_serial() is expected


def test_a_trial_with_one_trainer_is_serial_even_on_a_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert [resources(trainers=count).is_serial(in_sweep=True) for count in ("auto", 1, 2)] == [True, True, False]
    assert not resources(backend="ray").is_serial(in_sweep=True)


def test_a_device_that_is_asked_for_is_taken_or_refused(monkeypatch):
    assert decided({"device": "cpu"}, [{"CPU": 4, "GPU": 1}]) == (4, 1, 0)
    assert decided({"device": "cuda"}, [{"CPU": 4, "GPU": 1}]) == (4, 1, 0.25)
    with pytest.raises(ConfigError, match=r"resources.device: xpu was asked for, and no node has a GPU"):
        resolve_resources(resources(device="xpu"), [{"CPU": 4}])
    (fault,) = check_resources(resources(device="cuda", gpus_per_trainer=0))
    assert str(fault).startswith("resources.device: cuda has no part in a run with gpus_per_trainer 0")
    for there, wanted, taken in [
        ("cuda", "auto", "cuda"),
        ("cuda", "cpu", "cpu"),
        ("xpu", "xpu", "xpu"),
        ("mps", "auto", "cpu"),
        ("mps", "mps", "mps"),
    ]:
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda there=there: torch.device(there))
        assert accelerator(wanted) == taken
    with pytest.raises(ConfigError, match=r"resources.device: PyTorch has no cuda on this machine, only mps"):
        accelerator("cuda")
