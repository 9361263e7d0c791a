"""Ranges of a sweep, by Ray Tune's own domains: drawn at random, spread evenly, or chosen by Optuna."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import tune
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.sample import Categorical
from scipy.stats import norm

from raysim.config import nearest

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

DOMAINS = (
    *("uniform", "quniform", "loguniform", "qloguniform", "randn", "qrandn"),
    *("randint", "qrandint", "lograndint", "qlograndint", "choice", "grid_search"),
)

#: The largest share of a range below 1.
LAST = 1.0 - 2.0**-53


@dataclass(frozen=True)
class Range:
    """What a search may choose from on one axis.

    Attributes:
      draw: draws one value with a generator.
      at: the value below which that share, in [0, 1), of all draws lies.
      ends: the least and the greatest value, or every choice.
      domain: Ray Tune's own.
    """

    draw: Callable[[np.random.Generator], object]
    at: Callable[[float], object]
    ends: tuple[object, ...]
    domain: Any


@dataclass(frozen=True)
class Tried:
    """What a search knows of a trial. score: None while it runs, NaN where it failed."""

    values: Mapping[str, object]
    score: float | None


def draws(name: str, arguments: Any) -> Range:
    """The range that a domain of Ray Tune is, for a list or mapping of its arguments.

    Raises:
      ValueError: unknown domain, or arguments that it cannot take.
    """
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}. {nearest(name, DOMAINS)}")
    try:
        domain = tune.choice(list(arguments)) if name == "choice" else _domain(name, arguments)
    except (TypeError, AttributeError, ArithmeticError, ValueError, AssertionError) as error:
        raise ValueError(f"{name} cannot take {arguments!r}: {error}") from error

    def draw(generator: np.random.Generator) -> object:
        value = domain.sample(random_state=generator)
        return value.item() if isinstance(value, np.generic) else value

    def at(share: float) -> object:
        return draw(_Share(share))

    try:
        draw(np.random.default_rng(0))  # Tune looks at some bounds only here
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot take {arguments!r}: {error}") from error
    count = len(domain.categories) if isinstance(domain, Categorical) else 0
    ends = [at((index + 0.5) / count) for index in range(count)] or [at(2.0**-53), at(LAST)]
    return Range(draw, at, tuple(ends), domain)


def _domain(name: str, arguments: object) -> Any:
    """Tune's domain, its arguments looked at first: Tune looks at few, and does not say what to mend. Raises ValueError."""
    make = getattr(tune, name)
    signature = inspect.signature(make)
    takes = ", ".join(each for each in signature.parameters if each != "base")
    try:
        if isinstance(arguments, Mapping):
            named = signature.bind(**arguments).arguments
        else:
            named = signature.bind(*(arguments if isinstance(arguments, list | tuple) else [arguments])).arguments
    except TypeError:
        raise ValueError(f"it takes {takes}") from None
    kind, word = (int, "an integer") if "randint" in name else (int | float, "a number")
    for argument, value in named.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{argument} must be {word}, got {value!r}")
    low, high, step, deviation = (named.get(each) for each in ("lower", "upper", "q", "sd"))
    if step is not None and step <= 0:
        raise ValueError(f"the step q must be above 0, got {step}")
    if deviation is not None and deviation <= 0:
        raise ValueError(f"the standard deviation sd must be above 0, got {deviation}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"lower is {low} and upper {high}; exchange them")
    if low == high and "randint" in name:
        raise ValueError(f"upper is left out, and nothing lies between {low} and {high}; raise it")
    if low is not None and "log" in name and low <= 0:
        raise ValueError(f"lower must be above 0 for a logarithm, got {low}")
    bounds = [] if step is None or "randint" in name else [each for each in (low, high) if each is not None]
    if any(abs(each / step - round(each / step)) > 1e-6 for each in bounds):
        raise ValueError(f"lower and upper must be multiples of the step q, {step}")
    return make(**named)


class _Share(np.random.Generator):
    """What Tune's domains draw from it is the value below which that share of all draws lies, by each domain's own rule."""

    def __init__(self, share: float):
        super().__init__(np.random.PCG64(0))
        self._share = share

    # NumPy's signatures, as far as Tune uses them; it takes nothing but a Generator.

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return np.full(size, low + self._share * (high - low))

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return np.full(size, norm.ppf(self._share, loc, scale))

    def integers(self, low: Any, high: Any = None, size: Any = None, *_: Any, **__: Any) -> Any:
        return np.full(size, low + math.floor(self._share * (high - low)))

    def choice(self, a: Any, size: Any = None, *_: Any, **__: Any) -> Any:
        return np.full(size, a[math.floor(self._share * len(a))])


# --- Optuna -----------------------------------------------------------------------------------------------------------


def optuna_fault(chosen: Range | None = None) -> str:
    """Why Optuna cannot search, or cannot search this range; empty if it can."""
    if find_spec("optuna") is None:
        return "optuna is not installed; install raysim-fl[optuna], or choose random or sobol"
    try:
        if chosen is not None:
            _distribution(chosen)
    except ValueError as error:
        return f"{error}; choose another domain, or tune.search random"
    return ""


def suggest(ranges: Mapping[str, Range], tried: Sequence[Tried], *, mode: str, seed: int) -> dict[str, object]:
    """Axis -> value of the next trial, by Optuna's tree-structured Parzen estimator.

    Nothing but these arguments decides it: a search that was killed goes on as if it had not been, as far as it knows the
    same of the same trials.

    Args:
      tried: what is known of the trials so far. An axis that did not count for a trial is missing in its values.
      mode: whether scores are better the larger ("max") or the smaller ("min") they are.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {axis: _distribution(chosen) for axis, chosen in ranges.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Set one by one, since the defaults are not those of every version. group: axes may be missing.
        sampler = optuna.samplers.TPESampler(seed=seed % 2**32, multivariate=True, group=True, constant_liar=True)
    study = optuna.create_study(direction="maximize" if mode == "max" else "minimize", sampler=sampler)
    study.add_trials([_as_trial(each, ranges, distributions) for each in tried])
    chosen = study.ask(distributions).params
    return {axis: _value(ranges[axis], chosen[axis]) for axis in ranges}


def _distribution(chosen: Range) -> BaseDistribution:
    """What Tune makes of a domain for Optuna; choices go by their number, since Optuna wants plain values."""
    domain = chosen.domain
    if isinstance(domain, Categorical):
        domain = tune.choice(list(range(len(domain.categories))))
    (distribution,) = OptunaSearch.convert_search_space({"axis": domain}).values()
    return distribution


def _value(chosen: Range, value: Any) -> object:
    return chosen.domain.categories[value] if isinstance(chosen.domain, Categorical) else value


def _as_trial(tried: Tried, ranges: Mapping[str, Range], distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    params = {
        axis: ranges[axis].domain.categories.index(value) if isinstance(ranges[axis].domain, Categorical) else value
        for axis, value in tried.values.items()
    }
    if tried.score is None:
        state = TrialState.RUNNING
    else:  # pruned: worse than all that have a score
        state = TrialState.COMPLETE if math.isfinite(tried.score) else TrialState.PRUNED
    value = tried.score if state == TrialState.COMPLETE else None
    counted = {axis: distributions[axis] for axis in params}
    return create_trial(state=state, value=value, params=params, distributions=counted)
