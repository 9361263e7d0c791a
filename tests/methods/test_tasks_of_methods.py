"""The table of methods and tasks is true: where it says yes a round runs, where it says no `check` says why."""

from __future__ import annotations

from functools import partial

import pytest

from methods import METHODS
from raysim.base.errors import ConfigError
from raysim.engine.pool import SerialPool
from raysim.plan.build import Made, make_server, make_trainer
from raysim.plan.check import check
from raysim.training.tasks import TASKS
from tests.docs.method_tables import options_on
from tests.support.federations import build_shards
from tests.support.method_cases import ATTACKS
from tests.support.task_sets import task_config, write_task_sets

#: Further options that no task may break.
FURTHER = {
    "fedvg-layer": {"fedvg": {"granularity": "layer", "norm": "spectral", "one_axis": "l2"}},
    "fedvg-block": {"fedvg": {"granularity": "block", "val_mode": "eval"}},
    "fedvg-auto": {"fedvg": {"granularity": "auto"}},
    "flfa-direct": {"flfa": {"feedback": "direct"}},
    "flfa-random": {"flfa": {"feedback": "random", "num_layers": 2}},
    "elastic-released": {"elastic": {"as_in": "fl-bench"}},
    "moon-random": {"moon": {"first": "random"}},
    "personal-all": {"personal": {"layers": "all"}},
    "diagnostics-costly": {"diagnostics": {"measures": ["gradient", "weights", "premise", "layer_drift"]}},
}


#: Rules that need more votes than those of two clients.
VOTES = ("trimmed_mean", "krum", "bulyan", "clustering", "clipped_clustering")
FEDERATIONS = {
    "fedbuff": {"partition": {"num_clients": 12}, "cohort": {"size": 10}, "time": {}},
    "fedasync": {"time": {}},
}
FEDERATIONS |= {name: {"partition": {"num_clients": 7}, "cohort": {"size": 7}} for name in (*VOTES, *ATTACKS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task_sets(tmp_path_factory.mktemp("tasks"))


def plan_on(folder, task, spec):
    name = next(iter(spec))
    method = METHODS[name](**spec[name])
    needs, rule = method.needs, ["coordinate_median"] if method.wraps else []
    layer = {"lora": {"rank": 2, "targets": ["1"]}} if "lora" in needs else {}
    groups = FEDERATIONS.get(name, {})
    return check(task_config(folder, task, [spec, *rule], model=layer, rounds=2, **groups), "a test")


def server_after(folder, plan):
    recipe = plan.recipe(Made(str(build_shards(plan.manifest, folder / "shards"))))
    server = make_server(recipe, SerialPool(partial(make_trainer, recipe), plan.keeps_memory))
    start, metrics = server.params.clone(), {}
    for index in range(plan.num_rounds):
        metrics |= server.run_round(index).metrics
    return server, start, metrics


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "backdoor"])  # which needs images, too
def test_cell_of_the_table_is_true(name, task, folder):
    options = options_on(name, task)
    if options is None:
        with pytest.raises(ConfigError, match="needs classes: use a set with one class a row"):
            plan_on(folder, task, {name: {}})
        return
    server, start, metrics = server_after(folder, plan_on(folder, task, {name: dict(options)}))
    assert server.state.isfinite().all()
    assert not server.params.equal(start)
    assert metrics[f"server/{TASKS[task].main}"] >= 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", FURTHER)
def test_options_work_on_every_task(name, task, folder):
    server, start, _ = server_after(folder, plan_on(folder, task, FURTHER[name]))
    assert server.state.isfinite().all()
    assert server.params.equal(start) == (name == "personal-all")
