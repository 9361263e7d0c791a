"""Resources, recipes and phases."""

from __future__ import annotations

import pickle
from functools import partial

import pytest

from raysim.build import make_phases, make_server, make_trainer
from raysim.check import check
from raysim.config import Config
from raysim.core.errors import ConfigError
from raysim.data.sources import prepare, set_path
from raysim.engine.plan import fitting
from raysim.resources import resolve_resources
from tests.support.federations import plan_of, raw_config, recipe_of


def resources(**values):
    return Config.model_validate({"resources": values})


@pytest.mark.parametrize(
    ("asked", "cpus", "gpus", "expected"),
    [
        ({}, 4, 0, (4, 1.0, 0.0)),
        ({"cpus_per_trainer": 2}, 5, 0, (2, 2.0, 0.0)),
        ({}, 16, 1, (4, 1.0, 0.25)),
        ({}, 2, 1, (2, 1.0, 0.5)),
        ({}, 64, 8, (32, 1.0, 0.25)),
        ({"gpus_per_trainer": 0.5}, 16, 2, (4, 1.0, 0.5)),
        ({"gpus_per_trainer": 0.25, "trainers": 2}, 4, 0, (2, 1.0, 0.0)),
        ({"trainers": 3, "cpus_per_trainer": 0.5}, 2, 0, (3, 0.5, 0.0)),
        ({"gpus_per_trainer": 0}, 4, 1, (4, 1.0, 0.0)),
        ({"trainers": 3}, 8, 2, (3, 1.0, 0.5)),
        ({"gpus_per_trainer": 0.4}, 8, 2, (4, 1.0, 0.4)),
        ({}, 8, 0.2, (1, 1.0, 0.2)),
        ({"gpus_per_trainer": 2}, 8, 4, (2, 1.0, 2.0)),
    ],
)
def test_auto_picks_what_fits(asked, cpus, gpus, expected):
    assert resolve_resources(resources(**asked), cpus, gpus) == expected


@pytest.mark.parametrize(
    ("asked", "rooms", "expected"),
    [
        ({}, [(0, 0), (2, 0), (2, 1)], (2, 1.0, 0.5)),  # a head without CPUs; trainers go where GPUs are
        ({}, [(16, 0), (4, 1)], (4, 1.0, 0.25)),
        ({"gpus_per_trainer": 0}, [(0, 0), (2, 0), (2, 1)], (4, 1.0, 0.0)),
        ({"cpus_per_trainer": 2}, [(3, 0), (3, 0)], (2, 2.0, 0.0)),  # no trainer lies on two nodes
        ({}, [(2, 1), (8, 1)], (6, 1.0, 0.25)),
        ({"gpus_per_trainer": 0.4}, [(8, 1), (1, 1)], (3, 1.0, 0.4)),
    ],
)
def test_auto_counts_what_fits_on_each_node(asked, rooms, expected):
    cpus, gpus = (sum(column) for column in zip(*rooms, strict=True))
    assert resolve_resources(resources(**asked), cpus, gpus, rooms) == expected
    trainers, per_cpu, per_gpu = expected
    assert sum(fitting(*room, per_cpu, per_gpu) for room in rooms) == trainers  # so nothing grows by itself


@pytest.mark.parametrize(
    ("asked", "cpus", "gpus", "word"),
    [({"trainers": 5}, 4, 0, "CPUs"), ({"trainers": 4, "gpus_per_trainer": 0.5}, 8, 1, "GPUs")],
)
def test_more_than_there_is_is_refused(asked, cpus, gpus, word):
    with pytest.raises(ConfigError, match=word):
        resolve_resources(resources(**asked), cpus, gpus)


def test_what_crosses_to_actors_is_names_and_numbers(root):
    plan = plan_of(root, ["fedvg"])
    recipe = recipe_of(plan, root)
    for make in (partial(make_trainer, recipe), partial(make_server, recipe)):
        assert len(pickle.dumps(make)) < 4000


def test_a_phase_method_runs_by_itself_after_the_last_round(root):
    plan = plan_of(root, ["fedprox", "ccvr"])
    main, last = make_phases(plan.config, plan.methods)
    assert [m.name for m in main.methods] == ["fedprox"]
    assert (main.rounds, main.cohort_size) == (3, 7)
    assert (last.rounds, last.cohort_size, last.settings.steps) == (1, 12, 0)
    assert plan.num_rounds == 4


def test_an_unknown_figure_is_a_fault_before_the_run(root):
    with pytest.raises(ConfigError, match=r"report\.figures\.1: unknown figure 'pie'\. Did you mean"):
        plan_of(root, report={"figures": ["bars", "pie"]})


def test_batches_of_one_example_are_refused_with_batch_norm(root):
    with pytest.raises(ConfigError, match=r"local\.batch_size: 1 trains nothing: cnn has BatchNorm"):
        plan_of(root, local={"batch_size": 1}, model={"name": "cnn", "norm": "batch"})
    plan_of(root, local={"batch_size": 1}, model={"name": "cnn", "norm": "group"})


def test_a_set_with_one_flipped_bit_is_refused(tmp_path):
    prepare("digits", tmp_path)
    check(raw_config(tmp_path), "a test")
    path = set_path(tmp_path, "digits")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"The file was damaged or changed.*prepare --again"):
        check(raw_config(tmp_path), "a test")
