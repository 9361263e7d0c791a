"""Resources, recipes and phases."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from functools import partial

import pytest

import raysim
from raysim.base.errors import ConfigError
from raysim.config import Config
from raysim.data.sources import prepare, set_path
from raysim.plan.build import make_phases, make_server, make_trainer
from raysim.plan.check import check
from raysim.plan.check_data import draw_partition, open_sets
from tests.support.federations import build_shards, plan_of, raw_config, recipe_of


def test_what_crosses_to_actors_is_names_and_numbers(root):
    plan = plan_of(root, ["fedvg"])
    recipe = recipe_of(plan, root)
    for make in (partial(make_trainer, recipe), partial(make_server, recipe)):
        assert len(pickle.dumps(make)) < 4500


def test_a_phase_method_runs_by_itself_after_the_last_round(root):
    plan = plan_of(root, ["fedprox", "ccvr"])
    main, last = make_phases(plan.config, plan.methods)
    assert [m.name for m in main.methods] == ["fedprox"]
    assert (main.rounds, main.cohort_size) == (3, 7)
    assert (last.rounds, last.cohort_size, last.settings.steps) == (1, 12, 0)
    assert plan.num_rounds == 4


def test_an_unknown_figure_is_a_fault_before_the_run(root, tmp_path):
    with pytest.raises(ConfigError, match=r"report\.figures\[1\]: unknown figure 'curve'\. Did you mean 'curves'"):
        raysim.run({"report": {"figures": ["bars", "curve"]}, "storage": str(tmp_path)})


def test_batches_of_one_example_are_refused_with_batch_norm(root):
    with pytest.raises(ConfigError, match=r"local\.batch_size: 1 trains nothing: cnn has BatchNorm"):
        plan_of(root, local={"batch_size": 1}, model={"name": "cnn", "norm": "batch"})
    plan_of(root, local={"batch_size": 1}, model={"name": "cnn", "norm": "group"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": [{"dp": {"noise": 0.0, "delta": 1e-6}}]}, r"dp\.delta: has no effect with noise 0"),
        (
            {"partition": {"scheme": "tests.fuzz.own_code:own_partition", "labels_per_client": 3}},
            r"partition\.labels_per_client: has no effect with partition\.scheme tests\.fuzz",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(root, changes, words):
    with pytest.raises(ConfigError, match=words):
        plan_of(root, **changes)


def test_a_set_with_one_flipped_bit_is_refused(tmp_path):
    prepare("digits", tmp_path)
    check(raw_config(tmp_path), "a test")
    path = set_path(tmp_path, "digits")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"The file was damaged or changed.*prepare .*--again"):
        check(raw_config(tmp_path), "a test")


def first_run(root, later_s):
    """What a run does with its data before its first round, in a process of its own."""
    time.sleep(later_s)
    config = Config.model_validate(raw_config(root))
    manifest = draw_partition(config, open_sets(config))
    return manifest.checksum, build_shards(manifest, root / "shards").name


def slow_replace():
    """Files are put in their places slowly: between the two files of a set others come by."""
    replace = os.replace

    def slow(*paths):
        replace(*paths)
        time.sleep(0.1)

    os.replace = slow


@pytest.mark.slow
def test_runs_started_together_on_an_empty_folder_all_find_the_same_data(tmp_path):
    context = multiprocessing.get_context("forkserver")  # not of this process, which may have the threads of Ray
    context.set_forkserver_preload([__name__])
    with context.Pool(12, initializer=slow_replace) as pool:
        found = pool.starmap(first_run, [(tmp_path, 0.07 * index) for index in range(12)], chunksize=1)
    assert len(set(found)) == 1
    left = [path.name for path in tmp_path.rglob("*.part")]
    assert not left
