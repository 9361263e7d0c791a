"""Ranges of a sweep as Optuna's distributions: drawn at random, spread evenly, or chosen by Optuna."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from raysim.base.settings import Settings
from raysim.config import nearest

#: Domain -> its arguments: Ray Tune's names without underscores. The upper bound of integers is left out, but for qrandint.
DOMAINS = {
    **dict.fromkeys(("uniform", "loguniform", "randint", "lograndint"), ("lower", "upper")),
    **dict.fromkeys(("quniform", "qrandint"), ("lower", "upper", "q")),
    "choice": (),
    "grid_search": (),
}


@dataclass(frozen=True)
class Range:
    """Range of a search on an axis.

    Attributes:
      numbers: Optuna's distribution; of choices, that of their positions.
      choices: empty for numbers.
    """

    numbers: FloatDistribution | IntDistribution
    choices: tuple[object, ...] = ()

    @property
    def ends(self) -> tuple[object, ...]:
        """The least and the greatest value that may be drawn, or every choice."""
        return self.choices or (self.at(2.0**-53), self.at(1.0 - 2.0**-53))

    @property
    def distribution(self) -> BaseDistribution:
        """A range for Optuna; choices are represented by their positions."""
        return CategoricalDistribution(range(len(self.choices))) if self.choices else self.numbers

    def at(self, share: float) -> object:
        """The value below which that share, in [0, 1), of all draws lies.

        Optuna's own samplers of random and Sobol points take seeds of 32 bits and sort axes by name: they would draw other
        trials of the shipped studies.
        """
        numbers, step = self.numbers, self.numbers.step or 0
        low, high = numbers.low, numbers.high + (step if isinstance(numbers, IntDistribution) else 0)
        begin, end = np.log([low, high]) if numbers.log else (low, high)
        value = begin + share * (end - begin)
        value = float(np.exp(value)) if numbers.log else value
        if isinstance(numbers, IntDistribution):
            value = min(numbers.high, low + math.floor((value - low) / step) * step)
        elif step:
            value = low + round((value - low) / step) * step
        return self.of(value)

    def of(self, value: float) -> object:
        """The value itself, or the choice at that position."""
        return self.choices[int(value)] if self.choices else value

    def param(self, value: object) -> object:
        """Return Optuna's representation of a value. Raises ValueError: outside of the range."""
        if self.choices:
            return self.choices.index(value)
        if not isinstance(value, int | float):
            raise ValueError(f"{value!r} is no number")
        return value


@dataclass(frozen=True)
class Tried:
    """A trial as a search sees it. score: None while running, NaN if failed."""

    values: Mapping[str, object]
    score: float | None


def draws(name: str, arguments: object) -> Range:
    """Return the range of a domain, from a list or mapping of arguments.

    Raises:
      ValueError: unknown domain, or arguments that it cannot take.
    """
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}. {nearest(name, list(DOMAINS))}")
    if name == "choice":
        choices = tuple(arguments) if isinstance(arguments, list | tuple) else (arguments,)
        return Range(IntDistribution(0, len(choices) - 1), choices)
    takes, is_integer = DOMAINS[name], "randint" in name
    listed = list(arguments) if isinstance(arguments, list | tuple) else [arguments]
    given: Settings = dict(arguments if isinstance(arguments, Mapping) else zip(takes, listed, strict=False))
    if set(given) != set(takes) or (len(listed) != len(takes) and not isinstance(arguments, Mapping)):
        raise ValueError(f"{name} cannot take {arguments!r}: it takes {', '.join(takes)}")
    for key, value in given.items():
        if not isinstance(value, int if is_integer else int | float) or isinstance(value, bool):
            text = f"{key} must be {'an integer' if is_integer else 'a number'}, got {value!r}"
            raise ValueError(f"{name} cannot take {arguments!r}: {text}")
    low, high, step = given["lower"], given["upper"], given.get("q")
    if text := _bounds_fault(name, low, high, step):
        raise ValueError(f"{name} cannot take {arguments!r}: {text}")
    if is_integer:
        last = high if step else high - 1
        return Range(IntDistribution(low, last, log="log" in name, step=step or 1))
    return Range(FloatDistribution(low, high, log="log" in name, step=step))


def _bounds_fault(name: str, low: float, high: float, step: float | None) -> str:
    """Return the fault of a range's bounds; empty for valid bounds."""
    if low > high:
        return f"lower is {low} and upper {high}; exchange them"
    if low <= 0 and "log" in name:
        return f"lower must be above 0 for a logarithm, got {low}"
    if low == high and "randint" in name and step is None:
        return f"upper is left out, and nothing lies between {low} and {high}; raise it"
    if step is not None and step <= 0:
        return f"the step q must be above 0, got {step}"
    if step is not None and abs((high - low) / step - round((high - low) / step)) > 1e-6:
        return f"upper must be lower plus a multiple of the step q, {step}"
    return ""


def suggest(ranges: Mapping[str, Range], tried: Sequence[Tried], *, mode: str, seed: int) -> dict[str, object]:
    """Axis -> value of the next trial, by Optuna's tree-structured Parzen estimator.

    Nothing but these arguments decides it: a search that was killed proposes what it would have proposed, as far as it knows
    the same of the same trials.

    Args:
      tried: what is known of the trials so far. An axis that did not apply to a trial is missing in its values.
      mode: whether scores are better the larger ("max") or the smaller ("min") they are.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Set one by one, since the defaults are not those of every version. group: axes may be missing.
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, multivariate=True, group=True, constant_liar=True)
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize", sampler=sampler)
    study.add_trials([as_trial(each, ranges) for each in tried])
    chosen = study.ask({axis: each.distribution for axis, each in ranges.items()}).params
    return {axis: each.of(chosen[axis]) for axis, each in ranges.items()}


def as_trial(tried: Tried, ranges: Mapping[str, Range]) -> FrozenTrial:
    """Return a trial in Optuna's form. Raises ValueError: a value outside of the range."""
    if tried.score is None:
        state = TrialState.RUNNING
    else:  # pruned: worse than all that have a score
        state = TrialState.COMPLETE if math.isfinite(tried.score) else TrialState.PRUNED
    return create_trial(
        state=state,
        value=tried.score if state == TrialState.COMPLETE else None,
        params={axis: ranges[axis].param(value) for axis, value in tried.values.items()},
        distributions={axis: ranges[axis].distribution for axis in tried.values},
    )
