"""The next step of a run, by the state of its folder: begin, resume, extend, show, or refuse.

`next_step` is the whole table: a pure function of a `RunState`, which `runner.py` reads from the folder and the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raysim.base.errors import Fault, RunExists, refuse

#: begin: nothing of the run is there. resume: from its checkpoint. extend: the same, with more rounds or another `stop`.
#: show: it is finished, and just this run was asked for.
Step = Literal["begin", "resume", "extend", "show"]

OTHER = "choose another name, or delete the folder"


@dataclass(frozen=True)
class RunState:
    """A run's folder, beside what is asked for.

    Attributes:
      where: the folder, or the URI that it stands for.
      has_config: config.yaml is there; is_sweep: so is sweep.yaml.
      damage: why its config.yaml or partition.json cannot be read; empty: they can.
      rounds_before, rounds: of the run that is there, and asked for.
      has_other_stop: the conditions of `stop` differ; goes_on: under those asked for, the run would not have ended yet.
      changes: (key, value before, value asked for) of all other settings that differ, and of `rounds`.
      depends_on_length: what in the plan depends on the number of rounds from the first one on, in words.
      other_data: the fault where the data or the pretrained weights are not those of before.
    """

    name: str
    where: str
    has_config: bool = True
    is_sweep: bool = False
    is_finished: bool = False
    damage: str = ""
    rounds_before: int = 0
    rounds: int = 0
    has_other_stop: bool = False
    goes_on: bool = False
    changes: tuple[tuple[str, object, object], ...] = ()
    depends_on_length: str = ""
    other_data: Fault | None = None

    @property
    def kind(self) -> str:
        """Return a name for the existing run."""
        return f"the {'finished' if self.is_finished else 'unfinished'} run in {self.where}"

    @property
    def is_longer(self) -> bool:
        return self.rounds > self.rounds_before


def next_step(state: RunState) -> Step:
    """What to do.

    Raises:
      RunExists: a sweep; another finished run, or one that already has more rounds; an unfinished one with a
        damaged configuration.
      ConfigError: a run with another configuration or other data, or more rounds where the length of the run decides its
        earlier rounds.
    """
    if state.is_sweep:
        raise RunExists(f"{state.name!r} is a sweep, not a run", state.where, "choose another name")
    if state.is_finished and (state.damage or not state.has_config):
        raise RunExists(f"run {state.name!r} is finished", state.where, OTHER)
    if not state.has_config:
        return "begin"
    if state.damage:
        what = f"run {state.name!r} cannot be resumed: config.yaml or partition.json is damaged ({state.damage})"
        raise RunExists(what, state.where, OTHER)
    is_wanted = state.is_longer or (state.has_other_stop and state.goes_on)
    changed = [key for key, _, _ in state.changes if key != "rounds" or not state.is_longer]
    is_same = not changed and not state.has_other_stop
    if state.is_finished and not is_wanted and not is_same and {*changed} <= {"rounds"}:
        what = f"run {state.name!r} is finished"
        raise RunExists(what, state.where, f"raise rounds to continue the run, {OTHER}")
    refuse(_faults(state), f"resuming {state.name!r}")
    if state.is_finished and not is_wanted:
        return "show"
    return "extend" if state.is_longer or state.has_other_stop else "resume"


def _faults(state: RunState) -> list[Fault]:
    """Return faults where the existing run differs from the requested run. Data are compared if the settings agree."""
    faults = [
        Fault(key, f"is {new!r}, but {state.kind} has {old!r}; set it back, or choose another name")
        for key, old, new in state.changes
        if key != "rounds" or not state.is_longer
    ]
    if state.is_longer and state.depends_on_length:
        text = f"{state.kind} has {state.rounds_before} rounds, and {state.depends_on_length} depends on the number"
        faults.append(Fault("rounds", f"{text}; choose another name"))
    return faults or [fault for fault in (state.other_data,) if fault is not None]
