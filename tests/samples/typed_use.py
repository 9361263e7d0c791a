"""What a user's own typed code looks like: `mypy --strict` passes it, and it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import raysim
from raysim.core.method import ClientView, GradFn, Method


def pulled(*, mu: float = 0.1) -> Method:
    """FedProx."""

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        return lambda params, batch: inner(params, batch).add_(params - client.start, alpha=mu)

    return Method("pulled", grads=grads)


def stop_when_good(record: raysim.RoundRecord) -> Literal["stop"] | None:
    return "stop" if record.metrics["server/accuracy"] > 0.9 else None


def compare(settings: dict[str, object]) -> raysim.Report:
    run: raysim.Run = raysim.run(settings, {"local.lr": 0.1}, methods=[pulled], on_round=stop_when_good, quiet=True)
    both = [raysim.methods.uniform, raysim.methods.fedprox(mu=0.2)]
    other = raysim.run(settings, methods=both, partition__alpha=0.3, quiet=True)
    accuracy: float = run.accuracy or 0.0
    last: float = float(run.history["server/accuracy"].iloc[-1])
    assert accuracy == last
    assert not run.model().training
    found = raysim.load(run.folder)
    assert isinstance(found, raysim.Run)
    runs = raysim.Runs([run, other])
    best: raysim.Run = runs.best()
    folder: Path = best.folder
    print(runs.frame(), folder)
    if TYPE_CHECKING:
        print(run.name.x)  # type: ignore[attr-defined]  # an ignored error that is none would be one: types are seen
    return raysim.report(runs, out=folder.parent / "report")
