"""Average gains, relative times and the figures of what `diagnostics` and `flfa` log, against numbers by hand."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from raysim.base.errors import ConfigError
from raysim.reporting.gather import make_report
from raysim.reporting.published import FOLDER
from raysim.reporting.render import PUBLISHED, lines_of
from raysim.reporting.report import write
from raysim.reporting.significance import base_row
from tests.support.report_runs import drawn, fabricate

ROWS = ("FedAvg", "FedAvg + FLFA", "FedProx", "FedProx + FLFA")


# --- gains and times --------------------------------------------------------------------------------------------------


def printed(name):
    """(data set, fa_layers or "") -> the printed gain."""
    with open(FOLDER / f"{name}.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"].startswith("avg_gain") and row["value"]]
    return {
        (row["dataset"], dict(p.split("=") for p in row["setting"].split(";") if "=" in p).get("fa_layers", "")): float(
            row["value"]
        )
        for row in rows
    }


@pytest.mark.parametrize("number", ["05", "06", "07", "08", "09"])
def test_gains_of_published_rows_are_the_printed_ones(number):
    name = f"flfa_table_{number}"
    report = make_report([], {"published": [name], "columns": ["dataset"], "gain": "FLFA"})
    (table,) = report.tables
    want = printed(name)
    assert {column[0] for column in table.gains} == {dataset for dataset, _ in want}
    for (dataset,), gain in table.gains.items():
        assert gain.n == 6
        assert gain.published.value == want[dataset, ""]
        assert gain.mean == pytest.approx(gain.published.value, abs=0.0101)  # printed numbers are rounded


@pytest.mark.parametrize("number", ["10", "11"])
def test_gains_over_one_layer_are_the_printed_ones(number):
    name = f"flfa_table_{number}"
    report = make_report([], {"published": [name], "columns": ["dataset", "fa_layers"], "gain": "fa_layers=1"})
    (table,) = report.tables
    want = printed(name)
    assert len(table.gains) == len(want) == 6
    for (dataset, layers), gain in table.gains.items():
        assert gain.n == 8
        assert gain.published.value == want[dataset, f"{layers:g}"]
        assert gain.mean == pytest.approx(gain.published.value, abs=0.0101)


def flfa_runs(folder, **config):
    """FedAvg and FedProx, each with FLFA, two seeds, on CIFAR-10 and MobileNetV2."""
    for row, best, seconds in zip(ROWS, (0.5, 0.54, 0.6, 0.62), (2.0, 3.0, 4.0, 5.0), strict=True):
        for seed in (0, 1):
            labels = {"dataset": "CIFAR-10", "model": "MobileNetV2", "method": row, "seed": seed}
            times = [100.0, *[seconds + seed] * 9]  # the first round is slow for other reasons than the method
            more = {"progress": {"system/train_s": times, "system/evaluate_s": 50.0}, **config}
            fabricate(folder / f"{row}-{seed}".replace(" ", ""), best, labels=labels, seed=seed, **more)
    return folder


def test_gain_line_by_hand_with_the_printed_one_below(tmp_path):
    runs = flfa_runs(tmp_path / "runs")
    report = make_report([runs], {"gain": "FLFA", "published": ["flfa_table_08"], "columns": ["dataset"]})
    (table,) = report.tables
    assert [row for row, _ in lines_of(table)][-1] == "Avg. gain of + FLFA (2 pairs)"
    assert table.gains["CIFAR-10",].mean == pytest.approx((4 + 2) / 2)  # no printed gain: those runs had no such label
    (text,) = lines_of(table)[-1][1]
    assert text.text == "+3.00"
    for path in runs.iterdir():
        config = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(config.replace("labels:\n", "labels:\n  local_epochs: 15\n"))
    report = make_report([runs], {"gain": "FLFA", "published": ["flfa_table_08"], "columns": ["dataset"]})
    name, (text,) = lines_of(report.tables[0])[-1]
    assert (name, text.text) == (PUBLISHED, "+1.80 (+1.20)")
    text = write(report, tmp_path / "out").read_text()
    assert "| Avg. gain of + FLFA (2 pairs) | +3.00 |" in text
    assert "Avg. gain of + FLFA" in (tmp_path / "out" / "table.tex").read_text()


def test_a_gain_without_a_pair_is_a_fault(tmp_path):
    runs = flfa_runs(tmp_path / "runs")
    with pytest.raises(ConfigError, match="no table has a pair of rows X and X \\+ FLAF"):
        make_report([runs], {"gain": "FLAF"})
    with pytest.raises(ConfigError, match="no table has a column label layers with the value 1"):
        make_report([runs], {"gain": "layers=1"})


def test_a_gain_that_only_the_recipe_asks_for_becomes_a_note(tmp_path):
    group = {"gain": "FLFA"}
    runs = flfa_runs(tmp_path / "runs")
    (runs / "sweep.yaml").write_text(json.dumps({"report": group}))
    assert make_report([runs], {}).tables[0].gains
    for path in runs.glob("*FLFA*"):
        path.rename(tmp_path / path.name)
    report = make_report([runs], {})
    assert not report.tables[0].gains
    assert report.notes == ["`report.gain`: no table has a pair of rows X and X + FLFA. Known: FedAvg, FedProx"]


def test_relative_times_are_paired_by_seed_with_the_printed_ones(tmp_path):
    report = make_report([flfa_runs(tmp_path / "runs")], {"time": "FedAvg", "published": ["flfa_table_01"]})
    (extra,) = report.extras
    lines = {name: [entry.text for entry in entries] for name, entries in extra.lines if name != PUBLISHED}
    assert lines["FedAvg"] == ["1.00"]
    assert lines["FedProx + FLFA"] == [f"{(5 / 2 + 6 / 3) / 2:.2f}"]
    assert [e.text for n, (e,) in extra.lines if n == PUBLISHED][-1] == "2.09 (+0.16)"
    assert "## Relative time: CIFAR-10 / MobileNetV2" in write(report, tmp_path / "out").read_text()


def test_a_row_is_compared_with_what_it_adds_to():
    assert base_row("FedProx + FLFA", ROWS, "FedAvg") == "FedProx"
    assert base_row("FedProx", ROWS, "FedAvg") == "FedAvg"
    assert base_row("FedAvg", ROWS, "FedAvg") is None
    assert base_row("FLFA*", ("FLFA", "FLFA*"), None) is None


# --- figures ----------------------------------------------------------------------------------------------------------

LAYERS = np.array(["stem", "one", "two", "head"])


def with_diagnostics(folder, drift, *, seed=0):
    """Add columns and arrays as `diagnostics` and `flfa` log them, every second round."""
    with open(folder / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows[::2]:
        number = int(row["round"])
        values = {"drift": drift + number + seed, "intra": 2.0, "inter": 1.0 + number, "separability": (1 + number) / 2}
        row |= {f"diagnostics/{name}": repr(value) for name, value in values.items()}
    with open(folder / "progress.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "arrays").mkdir()
    for index in range(len(rows)):
        arrays = {"flfa.selected": np.eye(4, dtype=int)[(index + seed) % 3], "flfa.selected:columns": LAYERS}
        if index % 2 == 0:
            arrays |= {
                "diagnostics.agreement": np.array([0.1, 0.2, 0.2, 0.9 + index / 100]),
                "diagnostics.singular_values": np.array([4.0, 2.0, 1.0 / (index + 1)]),
            }
        np.savez(folder / "arrays" / f"round_{index:05}.npz", **arrays)


@pytest.fixture
def runs(tmp_path):
    folder = flfa_runs(tmp_path / "runs")
    for row, drift in zip(ROWS, (5.0, 4.0, 8.0, 6.0), strict=True):
        for seed in (0, 1):
            with_diagnostics(folder / f"{row}-{seed}".replace(" ", ""), drift, seed=seed)
    return folder


def test_representation_has_three_panels(runs):
    _, made, _ = drawn([runs], {"figures": ["representation"]})
    panels = made["representation"].axes
    assert [axes.get_title() for axes in panels][:2] == ["intra-class distance", "inter-class distance"]
    assert all(len(axes.lines) == 4 for axes in panels)
    assert list(panels[1].lines[0].get_xdata()) == [1, 3, 5, 7, 9]
    assert list(panels[1].lines[0].get_ydata()) == [1, 3, 5, 7, 9]


def test_drift_reduction_is_against_the_base_with_the_same_seed(runs):
    _, made, _ = drawn([runs], {"figures": ["drift"], "baseline": "FedAvg"})
    (axes,) = made["drift"].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines if " against " in line.get_label()}
    assert lines == {
        "FedAvg + FLFA against FedAvg": [1.0] * 5,
        "FedProx against FedAvg": [-3.0] * 5,
        "FedProx + FLFA against FedProx": [2.0] * 5,
    }


def test_agreement_is_a_histogram_of_the_first_round(runs):
    _, made, _ = drawn([runs], {"figures": ["agreement"]})
    (axes,) = made["agreement"].axes
    assert sum(bar.get_height() for bar in axes.patches) == 2 * len(LAYERS)  # two seeds
    assert "lowest" in axes.get_title()
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(0.9)


def test_agreement_has_a_skewness_for_each_run(runs):
    """Each run decides by its own; here two seeds decide differently, and what both have together says neither."""
    path = runs / "FedAvg-1" / "arrays" / "round_00000.npz"
    with np.load(path) as arrays:
        kept = dict(arrays)
    np.savez(path, **{**kept, "diagnostics.agreement": np.array([0.1, 0.8, 0.8, 0.9])})
    _, made, _ = drawn([runs], {"figures": ["agreement"]})
    (axes,) = made["agreement"].axes

    def g1(values):
        mean = sum(values) / 4
        m2, m3 = (sum((v - mean) ** k for v in values) / 4 for k in (2, 3))
        return m3 / m2**1.5

    first, second = g1([0.1, 0.2, 0.2, 0.9]), g1([0.1, 0.8, 0.8, 0.9])
    assert f"g1 = {first:+.2f} (lowest), {second:+.2f} (highest)" in axes.get_title()


def test_spectrum_is_relative_to_the_largest_value(runs):
    _, made, _ = drawn([runs], {"figures": ["spectrum"]})
    (axes,) = made["spectrum"].axes
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]
    assert axes.lines[0].get_ydata() == pytest.approx([1, 0.5, 1 / 9 / 4])
    assert axes.get_yscale() == "log"


def test_selection_counts_choices_by_block(runs):
    report, made, _ = drawn([runs], {"figures": ["selection"]})
    (axes,) = made["selection"].axes
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(4 * 100)
    (extra,) = report.extras
    shares = {block: [entry.text for entry in entries] for block, entries in extra.lines}
    # Ten rounds: seed 0 chose blocks 0, 1, 2, 0 ..., seed 1 one later.
    assert shares["stem"][0] == f"{35:.2f} ± {np.std([40, 30], ddof=1):.2f}"
    assert shares["head"][0] == "0.00 ± 0.00"


def test_selection_stands_beside_table_13_where_the_stages_fit(tmp_path):
    blocks = np.array([f"block{index}" for index in range(10)])
    for strategy in ("lowest", "highest"):
        labels = {"dataset": "CIFAR-10", "model": "MobileNetV2", "method": "FLFA", "strategy": strategy}
        folder = fabricate(tmp_path / strategy, 0.5, labels=labels)
        (folder / "arrays").mkdir()
        chosen = np.eye(10, dtype=int)[0 if strategy == "lowest" else 9]
        np.savez(folder / "arrays" / "round_00000.npz", **{"flfa.selected": chosen, "flfa.selected:columns": blocks})
    given = {"rows": "strategy", "published": ["flfa_table_13"], "figures": ["selection"]}
    report, made, _ = drawn([tmp_path], given)
    (extra,) = report.extras
    assert list(extra.header) == ["layer block", "lowest", "highest"]
    names = [name for name, _ in extra.lines if name != PUBLISHED]
    assert names[:2] == ["Stem (block0)", "Stage 1 (block1)"]
    assert names[-2:] == ["Head (block8)", "Classifier (block9)"]
    assert [entry.text for entry in extra.lines[1][1]] == ["17.69 (+82.31)", "16.37 (−16.37)"]
    diamonds = [line.get_ydata()[0] for line in made["selection"].axes[0].lines if line.get_marker() == "D"]
    assert len(diamonds) == 20


def test_a_layer_block_that_a_run_does_not_name_was_never_chosen_there(tmp_path):
    for seed, blocks in enumerate((["stem", "head"], ["stem"])):
        labels = {"dataset": "CIFAR-10", "model": "ResNet-18", "method": "FLFA", "strategy": "lowest"}
        folder = fabricate(tmp_path / str(seed), 0.5, labels=labels, seed=seed)
        (folder / "arrays").mkdir()
        values = {"flfa.selected": np.ones(len(blocks), int), "flfa.selected:columns": np.array(blocks)}
        np.savez(folder / "arrays" / "round_00000.npz", **values)
    report, _, _ = drawn([tmp_path], {"rows": "strategy", "figures": ["selection"]})
    (extra,) = report.extras
    shares = {block: [entry.text for entry in entries] for block, entries in extra.lines}
    assert shares["head"][0].startswith("25.00 ± ")
    assert shares["stem"][0].startswith("75.00 ± ")


def test_the_new_figures_say_what_is_missing(tmp_path):
    kinds = ["representation", "drift", "agreement", "spectrum", "selection"]
    folder = flfa_runs(tmp_path / "runs")
    _, made, missing = drawn([folder], {"figures": kinds})
    assert not made
    assert sorted(missing) == sorted(kinds)
    assert all("no " in reason for reason in missing.values())
    text = write(make_report([folder], {"figures": kinds}), tmp_path / "out").read_text()
    assert "Figure `drift` is not drawn" in text


def test_every_new_figure_is_written_with_a_caption(runs, tmp_path):
    kinds = ["representation", "drift", "agreement", "spectrum", "selection"]
    text = write(make_report([runs], {"figures": kinds}), tmp_path / "out").read_text()
    for name in ("representation", "drift", "agreement", "spectrum", "selection"):
        assert f"![{name}](figures/{name}.png)" in text
        assert (tmp_path / "out" / "figures" / f"{name}.png").stat().st_size > 5000
