"""A search that learns: past proposals, stored in the sweep's folder, and the next proposal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from raysim.base.errors import ConfigError, Fault
from raysim.base.untrusted import read_json
from raysim.config import Config, sweep
from raysim.core.seeding import derive_seed
from raysim.folders.files import write_file
from raysim.folders.storage import Copy
from raysim.tuning.planner import Planner, SweepTrial
from raysim.tuning.ranges import Range, Tried, suggest

FILE = "search.json"


class Search:
    """Optuna's choices for a sweep.

    Each proposal is stored before its trial starts, and scores are read from run directories, so a kill loses nothing.

    Args:
      place: folder or URI of the sweep; raw: the sweep's whole configuration; base: see `Sweep`.
      ends: trials at the ends of the ranges, checked and never run.
    Attributes:
      points: trial -> axis -> value, in the order in which they were chosen.
    Raises:
      ConfigError: the folder holds a search in another space.
    """

    def __init__(
        self,
        place: str,
        raw: sweep.Raw,
        base: Config,
        ranges: Mapping[str, Range],
        planner: Planner,
        ends: tuple[SweepTrial, ...],
    ):
        self.ends = ends
        self._raw, self._base, self._ranges, self._planner = raw, base, ranges, planner
        self._copy = Copy(place)
        self._file = self._copy.folder / FILE
        self._space = json.loads(json.dumps(sweep.axes(raw, place), default=str))
        self.points = self._read()

    @property
    def num_left(self) -> int:
        """Number of trials still to choose."""
        return max(0, self._base.tune.num_samples - len(self.points))

    def choose(
        self, scores: Mapping[str, float | None]
    ) -> tuple[Sequence[SweepTrial], Mapping[str, tuple[Fault, ...]]]:
        """Propose another trial; return the trial, or the faults of a refused trial by name.

        Args:
          scores: trial -> score, NaN if the trial failed, None if not known yet; refused trials are missing.
        """
        number, settings = len(self.points), self._base.tune
        tried = [Tried(values, scores.get(name, math.nan)) for name, values in self.points.items()]
        seed = derive_seed(self._base.seed, "tune.optuna", number)
        values = counting(self._raw, suggest(self._ranges, tried, mode=settings.direction, seed=seed))
        name = self._planner.free_name(values)
        self.points[name] = values
        content = {"space": self._space, "trials": self.points}
        write_file(self._file, (json.dumps(content, indent=1) + "\n").encode())
        self._copy.send()
        return self._planner.plan_all([(name, values)])

    def _read(self) -> dict[str, dict[str, object]]:
        self._copy.fetch()
        if not self._file.exists():
            return {}
        try:
            content = read_json(self._file)
            if not isinstance(content, dict):
                raise ValueError(f"it holds {type(content).__name__}")
            space, points = content["space"], {str(name): dict(values) for name, values in content["trials"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{self._file} is damaged ({error}); delete the file to start a new search"
            raise ConfigError([Fault("tune.search", text)], self._file.parent.name) from error
        if space != self._space:
            text = f"is {self._space}, but the search in {self._file.parent} has {space}"
            raise ConfigError([Fault(sweep.SPACE, f"{text}; set it back, or choose another name")], "the sweep")
        return points


def end_points(raw: sweep.Raw, ranges: Mapping[str, Range]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield ("", values): the middle of all ranges, and each range's ends with all other ranges at their middle."""
    middle = {axis: chosen.at(0.5) for axis, chosen in ranges.items()}
    yield "", counting(raw, middle)
    for axis, chosen in ranges.items():
        for end in chosen.ends:
            yield "", counting(raw, {**middle, axis: end})


def counting(raw: sweep.Raw, values: Mapping[str, object]) -> dict[str, object]:
    """Drop values of axes that `tune.only` excludes beside the other values."""
    (point,) = sweep.combinations(raw, {axis: [value] for axis, value in values.items()})
    return point
