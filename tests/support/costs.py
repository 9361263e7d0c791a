"""`python -m pytest -p tests.support.costs --costs FILE ...`: seconds and CPU seconds of each test, a JSON line each.

With `--lines` the line holds the lines of raysim and methods that the test executed in this process, too; that needs
coverage.py, which the project does not install. `python -m tests.support.costs FILE` prints the costs by file, the dearest
first.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

#: Where lines are counted.
SOURCES = [str(PROJECT / "raysim"), str(PROJECT / "methods")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="file to which each test's seconds are appended")
    parser.addoption("--lines", action="store_true", help="and the lines that it executed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A fixture is part of the first test that asks for it; of a child process, what it took until somebody waited for it."""
    coverage = None
    if item.config.getoption("lines"):
        coverage = importlib.import_module("coverage").Coverage(data_file=None, config_file=False, source=SOURCES)
        coverage.set_option("run:disable_warnings", ["no-data-collected"])  # pytest would make it an error
        coverage.start()
    began, wall = os.times(), time.monotonic()
    try:
        return (yield)
    finally:
        record = [item.nodeid, round(time.monotonic() - wall, 3), round(sum(os.times()[:4]) - sum(began[:4]), 3)]
        if coverage is not None:
            coverage.stop()
            data = coverage.get_data()
            record.append(
                {
                    os.path.relpath(file, PROJECT): lines
                    for file in data.measured_files()
                    if (lines := sorted(data.lines(file) or ()))
                }
            )
        if (path := item.config.getoption("costs")) is not None:
            with open(path, "a") as file:  # workers of xdist append to the same
                file.write(json.dumps(record) + "\n")


def main() -> None:
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for line in Path(sys.argv[1]).read_text().splitlines():
        name, wall, cpu = json.loads(line)[:3]
        for place, value in enumerate((1, wall, cpu)):
            files[name.partition("::")[0]][place] += value
    print(f"{'tests':>6} {'wall':>8} {'CPU':>8}  file")
    for name, (tests, wall, cpu) in sorted(files.items(), key=lambda entry: -entry[1][2]):
        print(f"{tests:6.0f} {wall:8.1f} {cpu:8.1f}  {name}")
    print(*(f"{sum(values):.0f}" for values in zip(*files.values(), strict=True)), "in all")


if __name__ == "__main__":
    main()
