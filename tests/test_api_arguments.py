"""What the functions of `import raysim` are given wrongly is one sentence."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest

import raysim
from methods import METHODS
from raysim.base.errors import ConfigError, DataError, UserCodeError

SELF: dict[str, object] = {}
SELF["group"] = SELF


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda settings: raysim.run(3), "config: must be of type str or Path or Mapping or None, got int"),
        (lambda settings: raysim.run(settings, 3), "overrides: must be of type Mapping or None, got int"),
        (lambda settings: raysim.run(settings, {3: 4}), "3: must be text; write keys such as local.lr"),
        (lambda settings: raysim.run(settings, on_round=3), "on_round: must be of type Callable or None, got int"),
        (
            lambda settings: raysim.run(settings, on_round=lambda: None),
            r"on_round: is called with the record of a round alone; see .*test_api_arguments",
        ),
        (
            lambda settings: raysim.run(settings, on_round=lambda record, other: None),
            r"on_round: is called with the record of a round alone; see .*test_api_arguments",
        ),
        (lambda settings: raysim.run(settings, scale=IMAGES), "scale: must be True or False, got ndarray"),
        (lambda settings: raysim.run(SELF), "in a group that contains itself"),
        (lambda settings: raysim.run({**settings, "methods": [SELF]}), "in a group that contains itself"),
        (lambda settings: raysim.run(settings, {"labels": SELF}), "in a group that contains itself"),
        (lambda settings: raysim.run(settings, labels=SELF), "in a group that contains itself"),
        (lambda settings: raysim.run({**settings, (1, 2): 4}), "keys should be strings"),
        (
            lambda settings: raysim.run({**settings, "rounds": 10**5000}),
            "rounds: must be a number of at most 1000 bits",
        ),
        (lambda settings: raysim.tune(3), "config: must be of type"),
        (lambda settings: raysim.tune(settings, callbacks=3), "callbacks: must be of type Sequence, got int"),
        (lambda settings: raysim.run(10**5000), "config: must be of type .*, got int"),
        (lambda settings: raysim.report(3), "runs: must be of type Iterable, got int"),
        (lambda settings: raysim.report([3]), r"runs\[0\]: must be of type Run or Runs or str or Path, got int"),
        (lambda settings: raysim.report("runs", out=3), "out: must be of type str or Path or None, got int"),
    ],
)
def test_arguments_that_python_alone_can_give_are_one_sentence(call, words, settings):
    with pytest.raises(ConfigError, match=words):
        call(settings)


IMAGES = np.zeros((2, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inputs": [[1, 2], [3]]}, "arrays that are not rectangular"),
        ({"targets": [[0], [1, 2]]}, "arrays that are not rectangular"),
        ({"domains": [[0], [1, 2]]}, "arrays that are not rectangular"),
        ({"inputs": None}, "no inputs in"),
        ({"domains": ["a", "b"]}, "domains of shape .* and type <U1 for 2 rows"),
        ({"domains": [0, 0, 0]}, r"domains of shape \(3,\)"),
        ({"domains": [0.0, np.nan]}, "domains of shape .* and type float64"),
        ({"classes": 3}, "classes are int"),
        ({"name": 3}, "name: must be of type str, got int"),
        ({"root": 3}, "root: must be of type str or Path, got int"),
    ],
)
def test_arrays_that_are_no_set_are_one_sentence(given, words, tmp_path):
    with pytest.raises((ConfigError, DataError), match=words):
        raysim.arrays(**{"inputs": IMAGES, "targets": [0, 1], "name": "a", "root": tmp_path, **given})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda record: "halt", "on_round returned 'halt' in round 1"),
        (lambda record: True, "on_round returned True in round 1"),
        (lambda record: np.zeros(2), "on_round returned array"),
        (lambda record: sys.exit(1), "SystemExit: 1"),
    ],
)
def test_what_on_round_may_not_return_ends_the_run_with_a_sentence(answer, words, settings):
    with pytest.raises(UserCodeError, match=words):
        raysim.run(settings, on_round=answer, name="a", quiet=True)


def test_loading_what_is_no_path_is_one_sentence():
    for place in (3, None, 10**5000, ["runs"]):
        with pytest.raises(DataError, match=r"expected a folder, got .*Give a path, or a URI"):
            raysim.load(place)


@pytest.mark.parametrize("scale", [3, "rounds", [1]])
def test_a_scale_group_that_is_no_group_is_one_sentence(scale, settings):
    for call in (
        lambda: raysim.run({**settings, "tune": None, "scale": scale}, quiet=True),
        lambda: raysim.run({**settings, "scale": scale}, scale=True, quiet=True),
        lambda: raysim.tune({**settings, "scale": scale}, name="a", scale=True, quiet=True),
    ):
        with pytest.raises(ConfigError, match="scale"):
            call()


def test_errors_and_the_options_of_methods_are_found_in_the_package():
    """For `except raysim.ConfigError`, and for what an editor completes behind `raysim.methods.scaffold(`."""
    assert issubclass(raysim.ConfigError, raysim.RaysimError)
    assert issubclass(raysim.DataError, raysim.RaysimError)
    for name, make in METHODS.items():
        shown = inspect.signature(getattr(raysim.methods, name)).parameters
        assert list(shown) == list(inspect.signature(make).parameters)
    with pytest.raises(raysim.ConfigError, match="mu"):
        raysim.methods.fedprox(mu=-1)
