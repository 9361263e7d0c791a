"""Every figure of `raysim report`, checked by what its axes hold."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from raysim.base.errors import ConfigError
from raysim.reporting.drawing import FIGURES, figure_faults, figure_function
from raysim.reporting.gather import make_report
from raysim.reporting.panels import styles_of, zoom
from raysim.reporting.report import write
from raysim.reporting.tables import all_rows
from tests.support.report_runs import SCORES, drawn, fabricate, labels_of, sweep

MAIN = ["fedvg_table_A3", "fedvg_table_A4"]


@pytest.fixture
def runs(tmp_path):
    group = {"columns": ["alpha"], "published": ["fedvg_table_A3"], "against": "FedVG"}
    return sweep(tmp_path / "small", SCORES, group)


def test_bars_hold_means_deviations_and_published_means(runs):
    report, made, _ = drawn([runs], {"figures": ["bars"]})
    (axes,) = made["bars"].axes
    heights = sorted(round(bar.get_height(), 6) for bar in axes.patches)
    assert heights == [41.0, 45.0, 54.0, 54.0, 61.0]
    spans = {tuple(np.round(part[:, 1], 6)) for lines in axes.collections for part in lines.get_segments() if len(part)}
    cells = [cell for cell in report.tables[0].cells.values() if cell.n and cell.std is not None]
    expected = {tuple(np.round([cell.mean - cell.std, cell.mean + cell.std], 6)) for cell in cells}
    assert {span for span in spans if np.isfinite(span).all()} == expected  # one seed has no deviation
    assert len(expected) < len(heights)
    diamonds = sorted(float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D")
    assert diamonds == [48.83, 53.58, 55.22, 57.93, 61.06]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["alpha = 0.1", "alpha = 0.05"]
    assert [text.get_text() for text in made["bars"].legends[0].texts] == [*all_rows(report.tables), "published"]


def test_bars_of_several_tables_stand_at_the_smallest_alpha():
    _, made, _ = drawn([], {"published": MAIN, "figures": ["bars"]})
    (axes,) = made["bars"].axes
    assert axes.get_title() == "alpha = 0.05"
    assert len(axes.patches) == 7 * 7
    assert axes.get_xticklabels()[0].get_text() == "CIFAR-10\nResNet-18"


@pytest.mark.parametrize(("mode", "best"), [("max", 61.0), ("min", 54.0)])
def test_ranks_put_the_best_on_top_of_each_column_and_mark_the_baseline(runs, mode, best):
    _, made, _ = drawn([runs], {"figures": ["ranks"], "baseline": "FedAvg", "mode": mode})
    first, second = made["ranks"].axes
    assert [first.get_title(), second.get_title()] == ["alpha = 0.1", "alpha = 0.05"]
    widths = [round(bar.get_width(), 6) for bar in first.patches]
    assert widths == sorted(widths, reverse=mode == "min")
    assert widths[-1] == best  # the last bar is the highest on the page
    names = [text.get_text() for text in first.get_yticklabels()]
    column = dict(zip(names, widths, strict=True))
    assert first.lines[0].get_xdata()[0] == pytest.approx(column["FedAvg"])


def test_lines_fall_with_alpha_on_a_logarithmic_axis():
    _, made, _ = drawn([], {"published": MAIN, "figures": ["lines"], "against": "FedVG"})
    assert len(made["lines"].axes) == 7
    axes = made["lines"].axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlim()[0] > axes.get_xlim()[1]
    line = next(line for line in axes.lines if line.get_label() == "FedVG")
    assert list(line.get_xdata()) == [0.05, 0.1, 1, 10, 100]
    assert list(line.get_ydata()) == [53.58, 61.06, 75.69, 79.65, 80.74]
    assert line.get_linewidth() > axes.lines[0].get_linewidth()
    assert len(axes.collections) == 7  # a band each
    assert len({line.get_color() for line in axes.lines}) == 7


def test_integration_pairs_dashed_and_solid_in_one_colour():
    _, made, _ = drawn([], {"published": ["fedvg_table_A7"], "figures": ["integration"]})
    panels = made["integration"].axes
    assert len(panels) == 3 * 6
    for axes in panels:
        base, joint = axes.lines
        assert joint.get_label() == f"{base.get_label()} + FedVG"
        assert (base.get_linestyle(), joint.get_linestyle()) == ("--", "-")
        assert base.get_color() == joint.get_color()


def test_imbalance_draws_a_method_without_rho_as_a_level(tmp_path):
    base = {"dataset": "CIFAR-10", "model": "ResNet-18"}
    fabricate(tmp_path / "avg", 0.5, labels={**base, "method": "FedAvg"})
    for rho in (1, 0.5, 0.1):
        fabricate(tmp_path / f"vg{rho}", 0.5 + rho / 10, labels={**base, "method": "FedVG", "rho": rho})
    _, made, _ = drawn([tmp_path], {"figures": ["imbalance"]})
    (axes,) = made["imbalance"].axes
    level, line = axes.lines
    assert list(level.get_ydata()) == [50.0, 50.0]
    assert list(line.get_xdata()) == [0.1, 0.5, 1]
    assert line.get_ydata() == pytest.approx([51, 55, 60])


def test_strategies_are_bars_from_model_to_block():
    _, made, _ = drawn([], {"published": ["fedvg_table_A8"], "rows": "granularity", "figures": ["strategies"]})
    (axes,) = made["strategies"].axes
    assert [text.get_text() for text in made["strategies"].legends[0].texts] == ["modelwise", "layerwise", "blockwise"]
    assert [bar.get_height() for bar in axes.patches][:2] == [53.58, 87.57]
    assert axes.get_title() == "alpha = 0.05"


def test_curves_are_the_mean_over_seeds(tmp_path):
    for seed, value in enumerate((0.4, 0.6)):
        fabricate(tmp_path / str(seed), value, seed=seed)
    _, made, _ = drawn([tmp_path], {"figures": ["curves"]})
    (axes,) = made["curves"].axes
    (line,) = axes.lines
    assert list(line.get_xdata()) == list(range(1, 11))
    assert line.get_ydata()[-1] == pytest.approx(50.0)
    assert len(axes.collections) == 1


def test_time_curves_are_interpolated_between_evaluations(tmp_path):
    for seed, (value, pace) in enumerate(((0.4, 3600.0), (0.6, 7200.0))):
        times = [pace * (index + 1) for index in range(10)]
        fabricate(tmp_path / str(seed), value, seed=seed, progress={"time/simulated_s": times}, time={})
    _, made, _ = drawn([tmp_path], {})
    (axes,) = made["time_curves"].axes
    assert axes.get_xlabel() == "simulated time (h)"
    (line,) = axes.lines
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (2.0, 10.0)  # the slow seed begins, the fast seed ends
    middle = 0.6 * (1 - 0.6 * np.exp(-3 * 4 / 10))  # the slow seed after ten hours
    assert line.get_ydata()[-1] == pytest.approx(100 * (0.4 + middle) / 2)


def test_a_cell_has_no_time_curve_if_one_of_its_seeds_recorded_no_times(tmp_path):
    times = {"time/simulated_s": [3600.0 * (index + 1) for index in range(10)]}
    fabricate(tmp_path / "a", 0.4, labels=labels_of("FedVG", 0.1, 0), progress=times, time={})
    fabricate(tmp_path / "b", 0.6, labels=labels_of("FedVG", 0.1, 1), seed=1, time={})
    fabricate(tmp_path / "c", 0.5, labels=labels_of("FedAvg", 0.1), progress=times, time={})
    _, made, _ = drawn([tmp_path], {})
    assert [line.get_label() for axes in made["time_curves"].axes for line in axes.lines] == ["FedAvg"]


def test_weights_make_the_balanced_client_bold(tmp_path):
    for norm in ("l1", "l2"):
        labels = {**labels_of("FedVG", 0.05), "norm": norm}
        fabricate(
            tmp_path / norm, 0.5, labels=labels, clients=5, partition={"scheme": "nine_plus_one", "num_clients": 5}
        )
    _, made, _ = drawn([tmp_path], {"figures": ["weights"]})
    assert [axes.get_title() for axes in made["weights"].axes] == ["norm = l1", "norm = l2"]
    axes = made["weights"].axes[0]
    lines = axes.lines[:5]
    assert [line.get_linewidth() > 2 for line in lines] == [False, True, False, False, False]
    assert lines[1].get_label() == "client 1"
    assert np.sum([line.get_ydata() for line in lines], axis=0) == pytest.approx(np.ones(10))


def test_norms_show_two_rounds_on_one_logarithmic_scale(tmp_path):
    fabricate(tmp_path / "a", 0.5, norms=(0, 5, 9))
    _, made, _ = drawn([tmp_path], {"figures": ["norms"]})
    first, last, bar = made["norms"].axes
    assert (first.get_title(), last.get_title()) == ("round 1", "round 10")
    with np.load(tmp_path / "a" / "arrays" / "round_00009.npz") as arrays:
        assert np.allclose(last.images[0].get_array(), arrays["fedvg.norms"])
    assert first.images[0].norm is last.images[0].norm
    assert first.get_xticklabels()[0].get_text() == "layer1.0.conv.weight"
    assert [text.get_text() for text in first.get_yticklabels()][:2] == ["0", "3"]
    assert bar.get_yscale() == "log"


def test_figures_without_data_are_named_in_the_report(runs, tmp_path):
    kinds = ["weights", "norms", "integration", "imbalance", "strategies"]
    _, made, missing = drawn([runs], {"figures": kinds})
    assert not made
    assert sorted(missing) == sorted(kinds)
    text = write(make_report([runs], {"figures": kinds}), tmp_path / "out").read_text()
    assert "Figure `norms` is not drawn: no run" in text


def test_many_rows_keep_apart_and_the_legend_outside(tmp_path):
    styles = styles_of([str(index) for index in range(20)])
    assert len({(s.colour, s.dash) for s in styles.values()}) == 20
    root = sweep(tmp_path / "many", {(f"method number {index}", 0.1): [0.5] for index in range(18)})
    _, made, _ = drawn([root], {"figures": ["bars"]})
    figure = made["bars"]
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    legend = figure.legends[0].get_window_extent()
    assert not legend.overlaps(axes.get_tightbbox())
    assert legend.x0 >= 0
    assert axes.get_window_extent().height > 200


def test_lines_need_numbers(tmp_path):
    runs = sweep(tmp_path / "x", {("a", "low"): [0.5], ("a", "high"): [0.6]})
    _, made, missing = drawn([runs], {"figures": ["lines"]})
    assert not made
    assert missing == {"lines": "no column label has two numbers or more"}


def test_every_name_of_a_figure_is_of_one_kind():
    for name in FIGURES:
        assert "Missing: " in figure_function(name).__doc__


OWN_FIGURES = '''
from matplotlib.figure import Figure

def heat_2(report):
    """Rows of the first table.

    Missing: never.
    """
    figure = Figure()
    figure.suptitle(", ".join(report.tables[0].rows))
    return figure

def two(report):
    yield from (Figure(), Figure())

def none(report):
    return []

def fails(report):
    raise ValueError("no such row")
'''


@pytest.fixture
def own_figures(tmp_path, monkeypatch):
    (tmp_path / "my_figures.py").write_text(OWN_FIGURES)
    monkeypatch.syspath_prepend(tmp_path)


def test_functions_of_ones_own_are_figures(runs, tmp_path, own_figures):
    names = ["bars", "my_figures:heat_2", "my_figures:two", "my_figures:none"]
    _, made, missing = drawn([runs], {"figures": names})
    assert list(made) == ["bars", "my_figures.heat_2", "my_figures.two_1", "my_figures.two_2"]
    assert made["my_figures.heat_2"].get_suptitle() == "FedAvg, FedProx, FedVG"
    assert missing == {"my_figures:none": "the runs do not hold the numbers of the figure"}
    text = write(make_report([runs], {"figures": names}), tmp_path / "out").read_text()
    assert "(figures/my_figures.heat_2.png)\n\nRows of the first table." in text
    write(make_report([runs], {"figures": ["bars"]}), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "figures").glob("*.png")] == ["bars.png"]
    _, made, missing = drawn([runs], {"figures": ["my_figures:fails", "bars"]})
    assert list(made) == ["bars"]  # a figure that fails costs no other one
    assert re.search(r"ValueError: no such row in .*my_figures\.py, line \d+, in fails", missing["my_figures:fails"])
    with pytest.raises(ConfigError, match=r"report\.figures\[0\]: cannot import figure 'my_figures:hat'"):
        drawn([runs], {"figures": ["my_figures:hat"]})


def test_functions_that_the_files_of_runs_name_are_not_called(tmp_path):
    root = sweep(tmp_path / "theirs", {("a", 0.1): [0.5]}, {"figures": ["bars", "os:abort"]})
    report, made, _ = drawn([root], {})
    assert list(made) == ["bars"]
    assert report.notes == ["Figure `os:abort` is code that the runs name: give the name to the report to draw it."]


def test_unknown_figures_are_faults_with_the_nearest_name(runs):
    with pytest.raises(ConfigError, match="2 faults in the command line") as caught:
        make_report([runs], {"figures": ["curve", "bars", "spectra"]})
    first, second = caught.value.faults
    assert (first.key, second.key) == ("report.figures[0]", "report.figures[2]")
    assert first.message.startswith("unknown figure 'curve'. Did you mean 'curves'? Known: agreement, ")
    assert "Did you mean 'spectrum'" in second.message


def test_an_unknown_figure_of_a_sweep_is_a_fault_of_its_file(tmp_path):
    root = sweep(tmp_path / "x", {("a", 0.1): [0.5]}, {"figures": ["pie"]})
    with pytest.raises(ConfigError, match=r"sweep\.yaml") as caught:
        make_report([root], {"figures": ["bars"]})
    assert [fault.key for fault in caught.value.faults] == ["report.figures[0]"]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 60.0), (20.0, 60.0), (55.0, 60.0), (-3.0, 5.0), (-5.0, -1.0), (0.0, 0.0)]
)
def test_bars_begin_at_zero_or_the_axis_says_where(low, high):
    axes = Figure().subplots()
    axes.bar([0, 1], [low, high])
    zoom(axes, low, high, name="accuracy (%)")
    bottom, top = axes.get_ylim()
    assert bottom < top
    assert bottom <= low
    assert high <= top
    if bottom > 0:
        assert axes.get_ylabel() == f"accuracy (%); the axis begins at {bottom:g}"
    else:
        assert top >= 0
        assert axes.get_ylabel() == "accuracy (%)"


def test_functions_that_cannot_be_imported_are_faults_where_they_are_imported():
    names = ["bars", "no_such_module:function"]
    assert [fault.key for fault in figure_faults(names)] == ["report.figures[1]"]
    assert figure_faults(names, imports=False) == []
