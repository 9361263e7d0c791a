"""`python -m tests.bench scoring`: FedVG's score of one client on one thread, ours against the plain way.

The plain way is that of the released code: the server loads a client's model into a scratch network, goes through a
DataLoader over the validation set in the clients' batch size, adds up the gradients of the summed loss in train mode, and
takes the norm of every tensor. It scores one client after the other; ours runs on every trainer at once, so the ratio
here is what is gained before that. Both run in turns in one process, on CPU time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import raysim
from methods import METHODS
from raysim.core.method import ClientView, Method
from tests.bench.bare import Job
from tests.bench.workloads import WORKLOADS, Workload, prepared

LOAD = replace(
    WORKLOADS["W4"],
    **{"train": 64, "test": 10, "validation": 1_504, "rounds": 1},
    config=WORKLOADS["W4"].config
    | {
        "partition": {"scheme": "iid", "num_clients": 2},
        "local": {"lr": 0.01, "batch_size": 32},
        "cohort": {"size": 1},
    },
)


def plain_norms(job: Job, state: dict[str, Tensor]) -> list[float]:
    """L1 norm of each parameter's validation gradient, as the released code takes it, times the batches over the examples."""
    job.model.load_state_dict(state)
    job.model.train()
    job.model.zero_grad()
    loader = DataLoader(TensorDataset(*job.validation), batch_size=job.facts["batch_size"])
    for x, y in loader:
        F.cross_entropy(job.model(x), y, reduction="sum").backward()
    count = len(job.validation[1])
    return [float(parameter.grad.norm(1)) / count for parameter in job.model.parameters()]


def timed_scoring(*, job_folder: str, pairs: int, result: str) -> Method:
    """FedVG, whose report is taken several times in turns with the plain way.

    Args:
      result: JSON file that gets what `measure` returns.
    """
    ours, job = METHODS["fedvg"](granularity="block"), Job(Path(job_folder))
    assert ours.report is not None

    def report(client: ClientView) -> dict[str, Tensor]:
        seconds: tuple[list[float], list[float]] = ([], [])
        state = {name: value.contiguous() for name, value in client.layout.views(client.state).items()}
        for _ in range(pairs + 1):
            began = time.thread_time()
            answer = ours.report(client)
            between = time.thread_time()
            plain = plain_norms(job, state)
            seconds[0].append(between - began)
            seconds[1].append(time.thread_time() - between)
        by_name = dict(zip((leaf.name for leaf in client.layout.params), answer["norms"].tolist(), strict=True))
        names = [name for name, _ in job.model.named_parameters()]
        error = max(abs(by_name[name] / norm - 1) for name, norm in zip(names, plain, strict=True))
        Path(result).write_text(json.dumps([seconds[0][1:], seconds[1][1:], error]))
        return answer

    return replace(ours, report=report)


def measure(root: Path, load: Workload = LOAD, pairs: int = 5) -> tuple[list[float], list[float], float]:
    """(CPU seconds of ours, of the plain way, largest relative difference of a norm) for one client."""
    ready, result = prepared(load, root), root / "scoring.json"
    options = {"job_folder": str(ready.job), "pairs": pairs, "result": str(result)}
    method = {"tests.bench.scoring:timed_scoring": options}
    raysim.run(ready.config, methods=[method], resources={"backend": "serial"}, name="scoring", quiet=True)
    return json.loads(result.read_text())


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ours, plain, error = measure(Path(folder))
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    print(
        f"scoring one client on {LOAD.validation} validation images, CNN of W1, one thread: "
        f"{1000 * statistics.median(ours):.0f} ms, plain way {1000 * statistics.median(plain):.0f} ms: "
        f"{ratio:.3f} (1 / {1 / ratio:.2f}); norms differ by {error:.1e} at most",
        flush=True,
    )


if __name__ == "__main__":
    main()
