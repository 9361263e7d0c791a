"""Estimates of whether a setting fits into memory, before anything is allocated."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Files in which Linux has the memory limit of a container: cgroup v2 and v1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@cache
def memory_bytes() -> int:
    """Return the memory of this machine, or of the process's container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in LIMITS:
        with suppress(OSError, ValueError):  # "max"
            sizes.append(int(limit.read_text()))
    return min(sizes)


def memory_fault(num_bytes: int) -> str:
    """Return why so many bytes, a lower bound, do not fit into memory; "" if they fit."""
    there = memory_bytes()
    if num_bytes <= there:
        return ""
    return f"would take at least {_text(num_bytes)} of memory; the machine has {_text(there)}"


def _text(num_bytes: int) -> str:
    """Return a number of bytes in the largest fitting unit."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:,.1f} {unit}"
    return f"{num_bytes:,} bytes"
