"""Values that a configuration writes as a name or as {name: {option: value}}."""

from __future__ import annotations

import pytest

from raysim.base.settings import Spec, as_written


@pytest.mark.parametrize(
    ("written", "options"),
    [("noise", {}), ({"noise": None}, {}), ({"noise": {}}, {}), ({"noise": {"std": 0.1}}, {"std": 0.1})],
)
def test_spec_holds_name_options_and_the_written_form(written, options):
    spec = Spec.of(written)
    assert (spec.name, spec.options, spec.written) == ("noise", options, written)
    assert spec == written
    assert spec == Spec.of(written)
    assert spec != Spec.of("none")
    assert as_written([spec, 1]) == [written, 1]


@pytest.mark.parametrize("written", [None, 3, [], {}, {"a": 1}, {"a": {}, "b": {}}, {1: {}}])
def test_spec_refuses_other_forms(written):
    with pytest.raises(ValueError, match=r"must be a name or \{name: \{option: value\}\}"):
        Spec.of(written)
