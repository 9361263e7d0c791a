"""Small sweeps, run and looked at."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from raysim.base.progress import Listener
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.tuning.driver import run_sweep
from raysim.tuning.outcome import write_results
from raysim.tuning.plan import plan_sweep, read_sweep
from tests.support.federations import raw_config

PROJECT = Path(__file__).parent.parent.parent
METHODS = {"grid_search": {"FedAvg": {"methods": []}, "FedVG": {"methods": ["fedvg"]}}}


def a_sweep(root, tmp_path, space, tune=None, **groups):
    """A planned sweep. One process runs all trials, one after the other, unless `tune` says how many at a time."""
    raw = raw_config(root, [], **{"name": "s", "storage": str(tmp_path / "runs"), **groups})
    raw["tune"] = {"param_space": space, "max_concurrent": 1, **(tune or {})}
    return plan_sweep(raw, "a test")


def run(sweep, watch=lambda: None):
    """(outcomes, lines); watch() is called with each line, for a finished trial while its process is still there."""
    lines = []

    def say(line):
        lines.append(line)
        watch()

    sweep, outcomes = run_sweep(sweep, Listener(say))
    write_results(sweep, outcomes)
    return outcomes, lines


def digest(folder):
    return json.loads((folder / "summary.json").read_text())["params_sha256"]


def digest_of_run(raw, tmp_path, name="twin"):
    """The hash of what a configuration gives serially, whatever its backend: the Ray of the tests has other work."""
    raw = {**raw, "storage": str(tmp_path / "twins"), "name": name}
    raw["resources"] = {**raw.get("resources", {}), "backend": "serial"}
    return execute(check(raw, "a test"), on_start=lambda *_: None, on_round=lambda _: None)["params_sha256"]


def is_all_free(ray):
    """Whether the cluster has all its resources back, apart from what the fixtures of other tests hold."""
    free, total = ray.available_resources(), ray.cluster_resources()
    return all(free.get(name, 0) >= total[name] - (1.5 if name == "CPU" else 0) for name in ("CPU", "GPU"))


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def trial_processes():
    """Titles of processes of the tests' Ray that belong to a trial: descendants of this process, which started Ray."""
    names = ("TrainerActor", "ServerActor", "FileHost", "ImplicitFunc")
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            found += [title] * (title.startswith("ray::") and any(name in title for name in names))
    return found


def start(path, ray, *overrides):
    """`raysim tune` in a process of its own, on the tests' Ray."""
    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, "-m", "raysim", "tune", str(path), *overrides],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_sweep(path, root, tmp_path, name, space, **groups):
    raw = raw_config(root, [], name=name, storage=str(tmp_path / "runs"), **groups)
    raw["tune"] = {"param_space": space, "max_concurrent": 1}
    path.write_text(yaml.safe_dump(raw))
    return plan_sweep(read_sweep(path), str(path))
