"""Memory of the driver and of the server over many rounds of 1,000 clients: `python -m tests.bench.growth [ray] [ROUNDS]`.

Pictures are drawn when a run has earned their seconds: in a short run at some round in its middle. What they load then, once,
is no growth with rounds: it is drawn from before, and told apart.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np
import psutil

import raysim
from raysim.engine.round_metrics import RoundRecord
from raysim.running.pictures import bar_chart, heat_map, png

#: Rounds whose memory is not counted: caches fill, pages are taken over from round to round.
WARM = 0.2


def load_pictures() -> float:
    """Draw what a run draws until that takes no more memory; the MB that it took."""
    me, values = psutil.Process(), np.random.default_rng(0).random((10, 8))
    before = me.memory_full_info().uss
    for index in range(12):
        title = f"round {index}"
        png(heat_map(values, range(10), list("abcdefgh"), title=title))
        png(heat_map(values, range(10), list("abcdefgh"), title=title, is_log=True))
        png(bar_chart(values[0], list("abcdefgh"), title))
    return (me.memory_full_info().uss - before) / 1e6


def growth(backend: str, rounds: int, folder: str) -> dict[str, float]:
    """MB a round, by a line through the unique memory of each process after the first WARM rounds."""
    me, seen = psutil.Process(), {}

    def sample(record: RoundRecord) -> None:
        index = record.round_index
        if index < WARM * rounds or index % 5:
            return
        processes = {"driver": me}
        processes |= {p.name(): p for p in me.children(recursive=True) if "ServerActor" in p.name()}
        for name, process in processes.items():
            seen.setdefault(name, []).append((index, process.memory_full_info().uss / 1e6))

    raysim.run(
        {
            "name": "growth",
            "storage": folder,
            "rounds": rounds,
            "data": {"name": "digits", "root": f"{folder}/data", "validation": 0.05},
            "partition": {"scheme": "iid", "num_clients": 1000},
            "model": {"name": "mlp", "hidden": 8},
            "cohort": {"size": 10},
            "local": {"lr": 0.1},
            "methods": ["fedvg"],
            "checkpoint": {"every_s": 5},
            "resources": {"backend": backend},
        },
        on_round=sample,
        quiet=True,
    )
    return {name: float(np.polyfit(*np.array(points).T, 1)[0]) for name, points in seen.items()}


if __name__ == "__main__":
    backend = "ray" if "ray" in sys.argv else "serial"
    rounds = next((int(word) for word in sys.argv[1:] if word.isdigit()), 500)
    print(f"pictures, once: {load_pictures():.0f} MB", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for name, slope in growth(backend, rounds, folder).items():
            print(f"{name}: {slope:.4f} MB a round")
