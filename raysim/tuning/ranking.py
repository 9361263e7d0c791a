"""Metrics by which a sweep or a report may rank runs."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.base.direction import SUMMARY
from raysim.base.errors import Fault
from raysim.config import Config, ReportGroup, nearest
from raysim.plan.find import build_methods
from raysim.reporting.measure import ReportMetric
from raysim.running.record import COLUMNS, judged
from raysim.training.tasks import TASKS

#: Main metrics of the tasks, and further metrics of the test set.
MAINS = tuple(dict.fromkeys(task.main for task in TASKS.values()))
OF_THE_SERVER = ("balanced_accuracy", "macro_f1", "calibration_error", "exact_match", "mae", "r2", "perplexity")
#: Metrics of clients and domains.
OF_PARTS = tuple(dict.fromkeys(task.of_part for task in TASKS.values()))

#: Keys of summary.json that a report may show.
SUMMARY_NUMBERS = (
    *(name for main in MAINS for name in judged([], 0, main)),
    *("rounds", "num_clients", "num_classes", "seconds_total", "seconds_per_round"),
)


def scores_of_mains(*mains: str) -> set[str]:
    """Return columns and summary keys of main metrics; without argument, of the main metrics of all tasks."""
    return {form.format(main) for main in mains or MAINS for form in (*SUMMARY, "server/{}", "server/validation_{}")}


def report_faults(report: ReportGroup, configs: Sequence[Config]) -> list[Fault]:
    """Return faults of a report: metrics that no run will record, and unknown figures."""
    metrics = {} if report.metric is None else {"report.metric": report.metric}
    for label, named in report.metrics.items():
        metrics |= {f"report.metrics.{label}.{value}": metric for value, metric in named.items()}
    names = {key: ReportMetric(metric).bare for key, metric in metrics.items()}
    texts = {key: metric_fault(name, configs) for key, name in names.items() if name not in SUMMARY_NUMBERS}
    faults = [Fault(key, text) for key, text in texts.items() if text]
    if report.figures:
        from raysim.reporting.drawing import figure_faults  # loads matplotlib: only where figures are named

        faults += figure_faults(report.figures)
    return faults


def metric_fault(metric: str, configs: Sequence[Config]) -> str:
    """Return why a metric cannot rank these runs; empty if it can, as far as the configurations show.

    A method names its columns `method/name` while it runs; before the run only the method is known.
    """
    unseen = (f"unseen_{name}" for name in (*MAINS, "loss"))
    names = {*scores_of_mains(), *COLUMNS, *(f"server/{name}" for name in (*OF_THE_SERVER, "validation_loss", *unseen))}
    kinds = ("", "unseen_", "expected_", "personal_", "expected_personal_")
    names |= {f"clients/{k}{name}_{part}" for k in kinds for name in OF_PARTS for part in ("mean", "p10", "worst")}
    methods: set[str] = set()
    for config in configs:
        names |= {f"server/{name.rpartition(':')[2]}" for name in config.evaluation.metrics}
        names |= {f"server/{part}_{name}" for part in OF_PARTS for name in config.data.test_sets}
        methods |= {method.name for method in build_methods(config.methods)[0]}
    owner, _, name = metric.partition("/")
    is_of_method = bool(name) and owner in methods
    if metric in names or is_of_method or metric.startswith(tuple(f"server/{part}_domain_" for part in OF_PARTS)):
        return ""
    return f"no run here has {metric!r}. {nearest(metric, sorted(names))}"
