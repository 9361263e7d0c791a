"""Fixtures: prepared digits, and one Ray for the whole session, with a logical GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


#: Fixtures that start Ray.
RAY_FIXTURES = {"ray_cluster", "ray_pools", "swap_pools"}


#: The files that take longest, in this order: they come first, or one process would end with them while the others are idle.
LONG_FILES = (
    *("test_jobs", "test_bits", "test_driver", "test_nodes", "test_notebook", "test_recipes", "test_trainers"),
    *(
        "test_compiled",
        "test_own_forms",
        "test_unused_options",
        "test_tasks_of_methods",
        "test_precedence",
        "test_sweep",
    ),
    *("test_partition_file", "test_api", "test_checkpoint", "test_own_code", "test_unscaled", "test_run"),
    *("test_search", "test_held", "test_pages", "test_calibrate", "test_cli", "test_outgoing", "test_report"),
    *("test_baselines_against_reference", "test_library", "test_restarts", "test_models", "test_training"),
    *("test_personal", "test_loggers", "test_cost", "test_stop", "test_local_references", "test_reuse"),
    *("test_against_reference", "test_names"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start Ray, and the long ones: `make test` leaves those out. The longest files come first."""
    for item in items:
        if RAY_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("ray")
        if not item.get_closest_marker("essential") and any(map(item.get_closest_marker, ("slow", "ray"))):
            item.add_marker("long")
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


class NamedAtOnce:
    """A test that fails is named when it does, with the reason: pytest does so at the end, which a run that is cut off never
    sees.
    """

    def __init__(self, config: pytest.Config):
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "").partition("\n")[0]
            self._config.get_terminal_writer().line(f"\nFAILED {report.nodeid} ({report.when})\n  {reason:.200}")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind the & of a script; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(NamedAtOnce(config))


#: A white pixel, as a PNG file.
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)


@pytest.fixture(scope="session", autouse=True)
def no_waiting():
    """In this process files are not forced to the disk, and a run's pictures are made but not painted: see `painted`."""
    import raysim.running.record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # only a power cut would show it
        patch.setattr(raysim.running.record, "png", lambda _: (PIXEL, (1, 1)))
        yield


@pytest.fixture
def painted(monkeypatch):
    """Pictures of runs are painted, for tests that look at them."""
    import raysim.running.record
    from raysim.running.pictures import png

    monkeypatch.setattr(raysim.running.record, "png", png)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A data root with the bundled digits."""
    from raysim.data.sources import prepare

    folder = tmp_path_factory.mktemp("data")
    prepare("digits", folder)
    return folder


@pytest.fixture
def nobody_comes(monkeypatch):
    """Cohorts without a client, as Poisson sampling draws them now and then."""
    monkeypatch.setattr("raysim.engine.schedule.choose_cohort", lambda *_, **__: np.zeros(0, np.int64))


@pytest.fixture
def settings(root: Path, tmp_path: Path) -> dict[str, object]:
    """A small run for `raysim.run`; its directory lies below tmp_path/runs."""
    from tests.support.federations import SMALL

    return {**SMALL, "data": {"root": str(root)}, "storage": str(tmp_path / "runs")}


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """A local Ray of four CPUs and one logical GPU, as a user might have started it."""
    import ray

    os.environ.setdefault("RAYSIM_CACHE", str(tmp_path_factory.mktemp("cache")))  # of the workers
    from raysim.engine.ray.session import end_ray, few_processes

    with few_processes():
        ray.init(
            address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="error"
        )
    yield ray
    end_ray()


@pytest.fixture(scope="session")
def swap_pools(ray_cluster):
    """Pools of 1, 2 and 3 trainer actors, whose trainers can be exchanged between tests.

    The actors live as long as the cluster, and take no CPU: a later test's run may ask for all of them.
    """
    from raysim.engine.ray.slots import TrainerActor

    class Swappable(TrainerActor):
        def __init__(self):
            super().__init__(None)

        def become(self, make_trainer):
            self._make_trainer = make_trainer

    actor = ray_cluster.remote(Swappable).options(num_cpus=0, max_restarts=-1, max_task_retries=3)
    return [actor.remote() for _ in range(3)]


@pytest.fixture
def ray_pools(swap_pools, root):
    """pools(plan) -> RayPools of 1, 2 and 3 trainers for a plan."""
    from functools import partial

    import ray

    from raysim.engine.ray.pool import RayPool
    from raysim.engine.ray.slots import TrainerSlots
    from raysim.plan.build import make_trainer
    from tests.support.federations import recipe_of

    def pools(plan):
        recipe = recipe_of(plan, root)
        ray.get([actor.become.remote(partial(make_trainer, recipe)) for actor in swap_pools])
        return [RayPool(TrainerSlots(swap_pools.__getitem__, count), plan.keeps_memory) for count in (1, 2, 3)]

    return pools
