"""`python -m pytest -p tests.support.costs --costs FILE ...`: seconds and CPU seconds of each test, a JSON line each.

`python -m tests.support.costs FILE` prints them by file, the dearest first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="file to which each test's seconds are appended")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A fixture is part of the first test that asks for it; of a child process, what it took until somebody waited for it."""
    began, wall = os.times(), time.monotonic()
    try:
        return (yield)
    finally:
        cpu = sum(os.times()[:4]) - sum(began[:4])
        line = json.dumps([item.nodeid, round(time.monotonic() - wall, 3), round(cpu, 3)])
        if (path := item.config.getoption("costs")) is not None:
            with open(path, "a") as file:  # workers of xdist append to the same
                file.write(line + "\n")


def main() -> None:
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, wall, cpu = json.loads(line)
        for place, value in enumerate((1, wall, cpu)):
            files[name.partition("::")[0]][place] += value
    print(f"{'tests':>6} {'wall':>8} {'CPU':>8}  file")
    for name, (tests, wall, cpu) in sorted(files.items(), key=lambda entry: -entry[1][2]):
        print(f"{tests:6.0f} {wall:8.1f} {cpu:8.1f}  {name}")
    print(*(f"{sum(values):.0f}" for values in zip(*files.values(), strict=True)), "in all")


if __name__ == "__main__":
    main()
