"""A Ray on which another job has all CPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import placement_group, remove_placement_group


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


@contextmanager
def no_cpu_left() -> Iterator[None]:
    """Less than one CPU is free inside; other fixtures of the session may hold parts of some. Afterwards they are free again."""
    held, before, deadline = [], free_cpus(), time.monotonic() + 60
    try:
        while (free := int(free_cpus())) and time.monotonic() < deadline:
            held.append(placement_group([{"CPU": 1}] * free))
            assert held[-1].wait(60)
            time.sleep(0.5)  # Ray says a moment later what is left
        assert free_cpus() < 1
        yield
    finally:
        for group in held:
            remove_placement_group(group)
        while free_cpus() < before and time.monotonic() < deadline + 60:
            time.sleep(0.1)
