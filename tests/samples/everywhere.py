"""One process: serial, Ray, serial again, then on a Ray that was there a task and a sweep in a thread: the same bits, Ray left
as it was. A run of the process itself on a Ray that was there: tests/test_api.py.

python -m tests.samples.everywhere DATA_ROOT STORAGE
"""

from __future__ import annotations

import sys
import threading

import ray

import raysim
from raysim.core.method import Method


def by_value() -> Method:
    """FedProx; as this module is the script, no import finds it."""
    return Method("by_value", grads=lambda inner, client: lambda p, b: inner(p, b).add_(p - client.start, alpha=0.1))


SETTINGS = {
    "seed": 3,
    "rounds": 2,
    "methods": [by_value],
    "data": {"root": sys.argv[1]},
    "partition": {"alpha": 0.3, "num_clients": 6},
    "model": {"name": "mlp"},
    "local": {"lr": 0.1, "steps": 2, "batch_size": 16},
    "cohort": {"size": 3},
    "resources": {"backend": "serial"},
    "storage": sys.argv[2],
}
ON_RAY = {"backend": "ray", "trainers": 1, "cpus_per_trainer": 0.5}
METHODS = {"grid_search": {"FedAvg": {"methods": []}, "own": {"methods": [by_value]}}}


def bits(name: str, **more: object) -> object:
    return raysim.run(SETTINGS, name=name, quiet=True, **more).summary["params_sha256"]


def main() -> None:
    found = [bits("serial"), bits("on_ray", resources=ON_RAY)]
    assert not ray.is_initialized(), "a Ray of raysim's own is still there"
    found.append(bits("serial_again"))

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    address = ray.get_runtime_context().gcs_address
    task = ray.remote(num_cpus=0.5)(bits)
    found.append(ray.get(task.remote("in_a_task")))
    found.append(ray.get(task.remote("in_a_task_on_ray", resources=ON_RAY)))  # in the same process
    sweep: list[raysim.Run] = []

    def run_sweep() -> None:
        axes = {"param_space": {"method": METHODS}, "max_concurrent": 1}  # one process for both trials
        sweep.extend(raysim.tune(SETTINGS, tune=axes, name="sweep", quiet=True))

    thread = threading.Thread(target=run_sweep)
    thread.start()
    thread.join()
    fedavg, own = (run.summary["params_sha256"] for run in sweep)
    assert fedavg != own
    assert ray.is_initialized(), "the user's Ray is gone"
    assert ray.get_runtime_context().gcs_address == address
    ray.shutdown()
    assert {*found, own} == {found[0]}, [*found, own]


if __name__ == "__main__":
    main()
    print("the same bits everywhere")
