"""Reports over runs of own code, in every form in which a configuration names it."""

from __future__ import annotations

import numpy as np
import pytest

import raysim
from raysim import Method

OWN = "tests.fuzz.own_code"


def parts(labels, num_clients, *, rng, share=0.5):
    """An own partition with an option: the first client has a share, the others divide the rest."""
    order = rng.permutation(len(labels))
    cut = int(share * len(order))
    return [order[:cut], *np.array_split(order[cut:], num_clients - 1)]


def plain(*, mu: float = 0.0) -> Method:
    """An own method with an option."""
    return Method("plain", report=lambda client: {"mu": mu})


FORMS = {
    "method": {"methods": [{f"{__name__}:plain": {"mu": 0.5}}]},
    "method without options": {"methods": [f"{__name__}:plain"]},
    "model": {"model": {"name": f"{OWN}:net", "factor": 0.5}},
    "partition": {"partition": {"scheme": {f"{__name__}:parts": {"share": 0.4}}, "num_clients": 4}},
    "partition without options": {"partition": {"scheme": f"{__name__}:parts", "num_clients": 4}},
    "augmentation": {"data": {"augment": {f"{OWN}:augment": {"factor": 0.9}}}},
    "metric": {"evaluation": {"metrics": [f"{OWN}:plain_metric"]}},
    "task": {
        "task": {"tests.fuzz.tasks:drawn_task": {"base": "classes", "main": "accuracy", "direction": "max"}},
        "report": {"metric": "accuracy"},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_runs_of_own_code_are_reported(form, settings, tmp_path):
    """Two values of a label beside it, so that there is a table with two rows."""
    given = {**settings, **FORMS[form], "data": {**settings["data"], **FORMS[form].get("data", {})}, "rounds": 1}
    runs = [
        raysim.run(
            given | {"name": f"run-{rate}", "labels": {"method": f"lr {rate}"}, "local": {"lr": rate}}, quiet=True
        )
        for rate in (0.1, 0.2)
    ]
    raysim.report(runs, out=tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert all(f"lr {rate}" in text for rate in (0.1, 0.2))
