"""`python -m tests.bench scale`: 100,000 clients, 1,000 a round, 50 rounds; what grows with the population or the rounds?

Beside seconds a round: start-up, memory of every kind of process after rounds 5 and 50, and the size of the run
directory by file. The same with a tenth of the population, for comparison.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.bench.watch import raysim_command, watch
from tests.bench.workloads import Workload, prepared

IMAGES_EACH = 4
EARLY = 5


def load_of(population: int, cohort: int = 1_000, rounds: int = 50) -> Workload:
    """Clients with a few images of 8 x 8 pixels, and an MLP with 3,300 parameters."""
    config = {
        "partition": {"scheme": "iid", "num_clients": population},
        "model": {"name": "mlp", "hidden": 16},
        "local": {"lr": 0.01, "batch_size": IMAGES_EACH},
        "cohort": {"size": cohort},
        "resources": {"trainers": 2},
    }
    about = f"{population} clients of {IMAGES_EACH} images, {cohort} a round"
    return Workload("scale", about, IMAGES_EACH * population, 1_000, rounds, config, side=8)


def measure(load: Workload, root: Path, *settings: str) -> list[str]:
    """The lines about one population; a cold run."""
    ready = prepared(load, root)
    run = watch(raysim_command(ready.config, "scale", *settings), memory_after={EARLY, load.rounds})
    early, late = (sum(run.round_s[part]) for part in (slice(1, EARLY), slice(-EARLY + 1, None)))
    median = 1000 * float(np.median(run.round_s))
    lines = [
        f"{load.about}: {median:.0f} ms a round (median); rounds 2 to {EARLY} {early:.2f} s, the last {EARLY - 1} {late:.2f} s; "
        f"start {run.start_s:.1f} s, first round {run.round_s[0]:.2f} s, end {run.end_s:.1f} s",
        f"    memory (PSS) after round {EARLY} and {load.rounds}, MB: "
        + ", ".join(
            f"{kind} {run.memory_after[EARLY].get(kind, 0):.0f} -> {mb:.0f}"
            for kind, mb in run.memory_after[load.rounds].items()
        ),
    ]
    for what, folder in (("run directory", ready.root / "runs" / "scale"), ("shards", ready.root / "data" / "shards")):
        sizes = {path.name: path.stat().st_size / 1e6 for path in folder.rglob("*") if path.is_file()}
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:6]
        lines.append(
            f"    {what}: {sum(sizes.values()):.1f} MB in {len(sizes)} files: "
            + ", ".join(f"{name} {mb:.1f}" for name, mb in largest)
        )
    return lines


def main(populations: tuple[int, ...] = (10_000, 100_000)) -> None:
    for population in populations:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(measure(load_of(population), Path(folder))), flush=True)


if __name__ == "__main__":
    main()
