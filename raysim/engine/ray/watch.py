"""Detection of silent trainers; a silent trainer is killed and then handled as a lost trainer."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.base.errors import RaysimError
from raysim.base.user_places import is_user_file
from raysim.engine.ray.session import Actor, Ref, going_nodes

Answer = TypeVar("Answer")

#: Seconds between two checks for silent trainers; or a quarter of the limit, if this is less.
LOOK_S = 5.0

#: Seconds of silence after which CPU time is checked, and seconds without CPU time after which a trainer is killed.
IDLE_S = 30.0

#: The automatic limit: TIMES the longest time that a trainer took for an answer, at least LEAST_S seconds.
TIMES, LEAST_S = 20.0, 60.0


class Process(NamedTuple):
    """Process of a trainer. stack: file descriptor to which SIGUSR1 dumps the Python stack; -1 if there is none."""

    node: str
    pid: int
    stack: int

    @staticmethod
    def own() -> Process:
        """Return this process, prepared to dump its stack on a signal."""
        stack = os.memfd_create("raysim-stack") if hasattr(os, "memfd_create") else -1
        if stack >= 0:
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        return Process(ray.get_runtime_context().get_node_id(), os.getpid(), stack)


class Watched(NamedTuple):
    """A trainer that was called. what: description of the call."""

    actor: Actor
    process: Process
    what: str


@dataclass
class Watch:
    """Waits for answers of trainers, and kills the process of a silent trainer.

    The silence of a trainer begins when it is called or answers. A trainer is killed when its silence exceeds the
    limit, or when its process has used no CPU time for IDLE_S seconds, for example because the process was stopped.

    Attributes:
      timeout_s: the limit; None: TIMES the longest silence before an answer so far; no limit before the first answer.
      notes: lines for the user, such as one for each killed trainer.
      ended: killed trainer -> (fault, place, remedy).
    """

    timeout_s: float | None = None
    notes: list[str] = field(default_factory=list)
    ended: dict[Actor, tuple[str, str, str]] = field(default_factory=dict)
    _longest_s: float = 0.0
    _heard: dict[Actor, float] = field(default_factory=dict)
    _computed: dict[Actor, tuple[float, float]] = field(default_factory=dict)  # (time of last progress, CPU seconds)

    @property
    def limit_s(self) -> float:
        if self.timeout_s is not None:
            return self.timeout_s
        return max(LEAST_S, TIMES * self._longest_s) if self._longest_s else float("inf")

    def asked(self, actor: Actor) -> None:
        """Note that a trainer was called: its silence begins now."""
        self._heard[actor] = time.monotonic()

    def first(self, asked: Mapping[Ref, Watched], also: Sequence[Ref] = ()) -> Ref:
        """Return the first reference of `asked` or `also` that is ready or lost."""
        while True:
            # Not fetched: some answers are arguments for other trainers.
            pause_s = min(LOOK_S, self.limit_s / 4)
            done, _ = ray.wait([*asked, *also], num_returns=1, timeout=pause_s, fetch_local=False)
            if done:
                if done[0] in asked:
                    self._note_answer(asked[done[0]].actor)
                return done[0]
            self._end_silent(asked.values())

    def all(self, asked: Mapping[Ref, Watched]) -> None:
        """Return when every trainer has answered or is lost."""
        missing = dict(asked)
        for one in missing.values():
            self.asked(one.actor)
        while missing:
            del missing[self.first(missing)]

    def _note_answer(self, actor: Actor) -> None:
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._heard.get(actor, now))
        self._heard[actor] = now
        self._computed.pop(actor, None)

    def _end_silent(self, asked: Iterable[Watched]) -> None:
        now = time.monotonic()
        for one in {one.actor: one for one in reversed([*asked])}.values():  # the first call of each trainer
            silent_s = now - self._heard.setdefault(one.actor, now)
            if silent_s > self.limit_s:
                self._end(one, silent_s, "raise resources.client_timeout_s if clients may take that long")
            elif silent_s > IDLE_S and self._is_idle(one, now):
                self._end(one, silent_s, f"the process stood still for {IDLE_S:g} s: check the machine")

    def _is_idle(self, one: Watched, now: float) -> bool:
        """Return whether a process is known to have used no CPU time for IDLE_S seconds."""
        spent = _on_node(one.process.node, _cpu_seconds, one.process.pid)
        if spent is None:
            return False
        since, before = self._computed.get(one.actor, (now, -1.0))
        if spent > before:
            since = now
        self._computed[one.actor] = since, spent
        return now - since >= IDLE_S

    def _end(self, one: Watched, silent_s: float, mend: str) -> None:
        place = _on_node(one.process.node, _end_process, *one.process[1:])
        if place is None:  # the node does not answer; if the node is lost, Ray reports the loss soon
            return
        self._heard.pop(one.actor, None)
        self._computed.pop(one.actor, None)
        fault = (
            f"a trainer gave no answer for {silent_s:.0f} s and was ended: {one.what}{place}",
            f"process {one.process.pid} on node {one.process.node[:8]}",
            mend,
        )
        self.ended[one.actor] = fault
        self.notes.append(f"{RaysimError(*fault)} The remaining trainers take over.")


def _on_node(node: str, function: Callable[..., Answer], *values: int) -> Answer | None:
    """Return function(*values), called in a process on a node; None if the node does not answer within 20 s."""
    if node in going_nodes():  # Ray starts nothing there
        return None
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Actor = ray.remote(function)
    try:
        answer: Answer = ray.get(task.options(num_cpus=0, scheduling_strategy=here).remote(*values), timeout=20)
        return answer
    except RayError:  # a timeout, too
        return None


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _end_process(pid: int, stack: int) -> str:
    """Kill a process of this machine; return the place of its Python code, " in FILE, line N, in NAME", or ""."""
    place = ""
    with contextlib.suppress(OSError):
        if stack >= 0:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            place = _innermost(Path(f"/proc/{pid}/fd/{stack}").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return place


def _innermost(stack: str) -> str:
    """Return the innermost frame in the user's code, else the innermost frame, in the form of `place_in`."""
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)
    chosen = ([frame for frame in frames if is_user_file(frame[0])] or frames)[:1]
    return "".join(f" in {file}, line {line}, in {name}" for file, line, name in chosen)
