"""The bench's own numbers on a tiny federation: the bare loop does what raysim does, and a comparison has all its lines."""

from __future__ import annotations

import csv
import re

import pytest

from tests.bench import whole
from tests.bench.watch import Watched
from tests.bench.workloads import WORKLOADS, prepared


@pytest.mark.slow  # four commands, each of which imports PyTorch
def test_the_bare_loop_trains_weighs_and_evaluates_as_raysim(tmp_path):
    ready, system = prepared(WORKLOADS["tiny"], tmp_path), whole.SYSTEMS["serial"]
    run = whole.raysim_sample(ready, system, "serial", samples_memory=True)
    with open(tmp_path / "tiny" / "runs" / "serial" / "progress.csv") as file:
        expected = [float(row["server/loss"]) for row in csv.DictReader(file)]
    for processes, flags in ((2, []), (1, ["--tuned"])):
        bare = whole.bare_sample(ready, processes, 1, *flags)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", bare.run.output)]
        assert losses == pytest.approx(expected, abs=1e-5)
        assert len(losses) == len(bare.run.round_s) == len(run.run.round_s) == 4
    assert expected[0] - expected[-1] > 1e-3  # it learns: the losses are no constants
    assert sum(run.run.memory_mb.values()) > 100


def test_ratios_are_taken_to_the_bare_loops_on_both_sides():
    def sample(*rounds, **parts):
        return whole.Sample(Watched(1.0, [9.0, *rounds], 1.0, 20.0, 5.0, {"driver": 5.0}), parts)

    class ready:
        load = WORKLOADS["tiny"]

    made = whole.Comparison(
        ready,
        whole.SYSTEMS["ray"],
        cold=sample(1),
        cold_bare=sample(1),
        bare=[sample(2.0, 2.0), sample(3.0, 3.0), sample(1.0, 1.0)],
        runs=[
            sample(5.0, 5.0, train=4.0, aggregate=2.0, evaluate=1.0),
            sample(2.0, 4.0, train=4.0, aggregate=2.0, evaluate=0.2),
        ],
    )
    assert made.ratios("rounds_s") == [10 / 5, 6 / 4]
    assert made.ratio == 16 / 9
    assert made.noise == [6 / 4, 2 / 6]
    text = "\n".join(whole.describe(made))
    assert "1.778   (1.500 to 2.000); bare against itself 0.333 to 1.500" in text
    assert "train 50.0%, aggregate 25.0%, evaluate 7.5%, record and rest 17.5%" in text
