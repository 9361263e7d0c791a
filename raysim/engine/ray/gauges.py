"""Progress of a run as metrics of Ray, for the dashboard, Prometheus and Grafana. docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable

from ray.util.metrics import Gauge

from raysim.engine.round_metrics import RoundRecord

#: Name, which Ray begins with `ray_` -> meaning.
GAUGES = {
    "raysim_round": "rounds that a run has finished",
    "raysim_score": "main metric of the global model on the test set, at the last evaluation",
    "raysim_clients_per_s": "clients of the last round by its seconds",
    "raysim_redone_blocks": "client blocks of the last round that were trained again, since a trainer was lost",
}


def round_gauges(run: str, main: str) -> Callable[[RoundRecord], None]:
    """Return a callback for each round's record.

    Args:
      run: the run's name, the tag `run`; main: its main metric, the tag `metric`.
    """
    gauges = {name: Gauge(name, meaning, tag_keys=("run", "metric")) for name, meaning in GAUGES.items()}

    def show(record: RoundRecord) -> None:
        metrics = record.metrics
        values = {
            "raysim_round": record.round_index + 1,
            "raysim_score": metrics.get(f"server/{main}"),
            "raysim_clients_per_s": len(record.clients["client"]) / metrics["system/round_s"],
            "raysim_redone_blocks": metrics["system/redone_blocks"],
        }
        for name, value in values.items():
            if value is not None:
                gauges[name].set(value, {"run": run, "metric": main})

    return show
