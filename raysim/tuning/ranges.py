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

from raysim.config import nearest

#: Ray Tune's names of domains, without underscores. The upper bound of integers is exclusive.
DOMAINS = ("uniform", "loguniform", "randint", "lograndint", "choice", "grid_search")


@dataclass(frozen=True)
class Range:
    """Range of a search on an axis.

    Attributes:
      numbers: Optuna's distribution of the numbers, or of the positions of choices.
      choices: empty for numbers.
    """

    numbers: FloatDistribution | IntDistribution
    choices: tuple[object, ...] = ()

    @property
    def ends(self) -> tuple[object, ...]:
        """Return the least and the greatest value that may be drawn, or every choice."""
        return self.choices or (self.at(2.0**-53), self.at(1.0 - 2.0**-53))

    @property
    def distribution(self) -> BaseDistribution:
        """Return the range for Optuna; choices are represented by their positions."""
        return CategoricalDistribution(range(len(self.choices))) if self.choices else self.numbers

    def at(self, share: float) -> object:
        """Return the value below which a share, in [0, 1), of all draws lies.

        Optuna's own samplers of random and Sobol points take seeds of 32 bits and sort axes by name: they would draw other
        trials of the shipped studies.
        """
        numbers, is_integer = self.numbers, isinstance(self.numbers, IntDistribution)
        low, high = numbers.low, numbers.high + is_integer
        begin, end = np.log([low, high]) if numbers.log else (low, high)
        value = begin + share * (end - begin)
        value = float(np.exp(value)) if numbers.log else value
        return self.of(min(numbers.high, low + math.floor(value - low)) if is_integer else value)

    def of(self, value: float) -> object:
        """Return the value itself, or the choice at this position."""
        return self.choices[int(value)] if self.choices else value


@dataclass(frozen=True)
class Tried:
    """A trial as a search sees it. score: None while running, NaN if failed."""

    values: Mapping[str, object]
    score: float | None


def draws(name: str, arguments: object) -> Range:
    """Return the range of a domain: two bounds, or a list of choices.

    Raises:
      ValueError: unknown domain, or invalid arguments.
    """
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}. {nearest(name, DOMAINS)}")
    if name == "choice":
        choices = tuple(arguments) if isinstance(arguments, list | tuple) else (arguments,)
        return Range(IntDistribution(0, len(choices) - 1), choices)
    is_integer = "randint" in name
    bounds = arguments if isinstance(arguments, list | tuple) else ()
    if len(bounds) != 2 or not all(isinstance(each, int if is_integer else int | float) for each in bounds):
        kind = "integers, the upper excluded" if is_integer else "numbers"
        raise ValueError(f"{name} takes two {kind}, [lower, upper], got {arguments!r}")
    low, high = bounds
    if is_integer:
        return Range(IntDistribution(low, high - 1, log="log" in name))
    return Range(FloatDistribution(low, high, log="log" in name))


def suggest(ranges: Mapping[str, Range], tried: Sequence[Tried], *, mode: str, seed: int) -> dict[str, object]:
    """Return axis -> value of the next trial, by Optuna's tree-structured Parzen estimator.

    The arguments alone decide the result: a search that was killed makes the same proposals from the same trials and
    scores.

    Args:
      tried: the trials so far. An axis that did not apply to a trial is missing in the trial's values.
      mode: "max" if larger scores are better, "min" if smaller scores are better.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Every option is set, since defaults differ between versions. group: axes may be missing.
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, multivariate=True, group=True, constant_liar=True)
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize", sampler=sampler)
    study.add_trials([_as_trial(each, ranges) for each in tried])
    chosen = study.ask({axis: each.distribution for axis, each in ranges.items()}).params
    return {axis: each.of(chosen[axis]) for axis, each in ranges.items()}


def _as_trial(tried: Tried, ranges: Mapping[str, Range]) -> FrozenTrial:
    """Return a trial in Optuna's form; choices are their positions."""
    if tried.score is None:
        state = TrialState.RUNNING
    else:  # pruned: ranked below all trials with a score
        state = TrialState.COMPLETE if math.isfinite(tried.score) else TrialState.PRUNED
    choices = {axis: ranges[axis].choices for axis in tried.values}
    return create_trial(
        state=state,
        value=tried.score if state == TrialState.COMPLETE else None,
        params={axis: choices[axis].index(value) if choices[axis] else value for axis, value in tried.values.items()},
        distributions={axis: ranges[axis].distribution for axis in tried.values},
    )
