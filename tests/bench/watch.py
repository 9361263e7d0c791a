"""A command as its user sees it: when it printed that it runs, when each round was over, when it ended, what it held."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

PROJECT = Path(__file__).parent.parent.parent


@dataclass
class Watched:
    """Seconds since the command was given, megabytes of proportional set size (shared pages counted once, in parts).

    Attributes:
      start_s: until the first round began; round_s: of each round; end_s: from the last round to the end of the process.
      cpu_s: CPU time of all its processes between the first round's end and the last one's: less disturbed by neighbours.
      memory_mb: the most that all its processes held together, by kind of process; empty where it was not sampled.
      memory_after: the same after some rounds, counted from 1.
    """

    start_s: float = 0.0
    round_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    total_s: float = 0.0
    cpu_s: float = 0.0
    memory_mb: dict[str, float] = field(default_factory=dict)
    memory_after: dict[int, dict[str, float]] = field(default_factory=dict)
    output: str = ""

    @property
    def facts(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if key != "output"}


def watch(
    command: Sequence[object], *, samples_memory: bool = False, memory_after: Collection[int] = (), cwd: Path = PROJECT
) -> Watched:
    """Run a command that prints `running ...` before its first round and `round n/N ...` after each.

    Raises:
      RuntimeError: it failed.
    """
    seen, lines, began = Watched(), [], time.perf_counter()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])),
    }
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=environment
    ) as process:
        assert process.stdout is not None
        sampler = Sampler(process.pid) if samples_memory else None
        before, used = began, []
        for line in process.stdout:
            now = time.perf_counter()
            lines.append(line)
            if line.startswith("running "):
                seen.start_s, before = now - began, now
            elif match := re.match(r"round +(\d+)/(\d+)", line):
                seen.round_s.append(now - before)
                before = now
                if match[1] in ("1", match[2]):
                    used.append(cpu_of(process.pid))
                if int(match[1]) in memory_after:
                    seen.memory_after[int(match[1])] = memory_of(process.pid)
        process.wait()
        seen.total_s = time.perf_counter() - began
        seen.end_s = seen.total_s - (before - began)
        seen.cpu_s = used[-1] - used[0] if used else 0.0
        seen.memory_mb = sampler.stop() if sampler else {}
    seen.output = "".join(lines)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{seen.output[-4000:]}")
    return seen


class Sampler:
    """Looks every half second at the memory of a process and all below it, and keeps the largest total.

    Reading the page tables of all processes costs time, so runs whose rounds are timed are not sampled.
    """

    def __init__(self, pid: int):
        self._pid, self._most = pid, {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.5):
            now = memory_of(self._pid)
            if sum(now.values()) > sum(self._most.values()):
                self._most = now

    def stop(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        return self._most


def memory_of(pid: int) -> dict[str, float]:
    """MB (proportional set size) of a process and all below it, by kind of process."""
    found: dict[str, float] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                kind = kind_of(process) if process.pid != pid else "driver"
                found[kind] = found.get(kind, 0.0) + process.memory_full_info().pss / 1e6
    return found


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all below it so far."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def kind_of(process: psutil.Process) -> str:
    """ "TrainerActor", "ServerActor" and the like for Ray's actors; "Ray" for its own processes; "worker" for others."""
    line = " ".join(process.cmdline()[:4])
    if match := re.match(r"ray::(\w+)", line):
        return match[1]
    return "Ray" if re.search(r"site-packages/ray/|/ray/core/", line) else "worker"


def raysim_command(config: Path, name: str, *settings: str) -> list[object]:
    """`raysim run` as its user gives it."""
    return [sys.executable, "-m", "raysim", "run", config, f"name={name}", *settings]
