"""What a sweep may be judged by."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.config import Config, ReportGroup, method_names, nearest
from raysim.core.errors import Fault
from raysim.reporting.measure import ReportMetric
from raysim.running.record import COLUMNS, judged

#: Metrics of a whole run that a sweep may be judged by, besides the columns of progress.csv -> the column that says what
#: the best round is. The last one chooses a round without a look at the test set.
SUMMARY_METRICS = {
    "accuracy": "server/accuracy",
    "best_accuracy": "server/accuracy",
    "mean_last_10pct_accuracy": "server/accuracy",
    "accuracy_at_best_validation": "server/validation_accuracy",
}

#: Columns of every run, of runs with a validation set, and of some kinds of clients.
OF_THE_SERVER = ("balanced_accuracy", "macro_f1", "calibration_error", "validation_accuracy", "validation_loss")
OF_CLIENTS = ("accuracy", "expected_accuracy", "personal_accuracy", "expected_personal_accuracy")


#: Numbers of summary.json, which a report may show.
SUMMARY_NUMBERS = (*judged([], 0), "rounds", "num_clients", "num_classes", "seconds_total", "seconds_per_round")


def report_faults(report: ReportGroup, configs: Sequence[Config]) -> list[Fault]:
    """Metrics of a report that none of these runs will have."""
    metrics = {} if report.metric is None else {"report.metric": report.metric}
    metrics |= {
        f"report.metrics.{label}.{name}": m for label, all_ in report.metrics.items() for name, m in all_.items()
    }
    names = {key: ReportMetric(metric).bare for key, metric in metrics.items()}
    texts = {key: metric_fault(name, configs) for key, name in names.items() if name not in SUMMARY_NUMBERS}
    return [Fault(key, text) for key, text in texts.items() if text]


def metric_fault(metric: str, configs: Sequence[Config]) -> str:
    """Why these runs cannot be judged by a metric; empty where they can, as far as the configurations say.

    A method names its own columns `method/name` while it runs: of these only the method is known beforehand.
    """
    known = {*SUMMARY_METRICS, *COLUMNS, *(f"server/{name}" for name in OF_THE_SERVER)}
    known |= {f"clients/{kind}_{part}" for kind in OF_CLIENTS for part in ("mean", "p10", "worst")}
    methods: set[str] = set()
    for config in configs:
        known |= {f"server/{name.rpartition(':')[2]}" for name in config.evaluation.metrics}
        known |= {f"server/accuracy_{name}" for name in config.data.test_sets}
        methods |= set(method_names(config.methods))
    owner, _, name = metric.partition("/")
    is_of_method = bool(name) and (owner in methods or any(":" in method for method in methods))
    if metric in known or is_of_method or metric.startswith("server/accuracy_domain_"):
        return ""
    return f"no run here has {metric!r}. {nearest(metric, sorted(known))}"
