"""`python -m tests.bench stacks`: CPU time of a local step and of a serial round, with and without stacked clients."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

import raysim
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.training.inputs import InputTransform
from raysim.training.local import LocalSettings
from raysim.training.model import BoundModel, state_of
from raysim.training.stacked import Stacker, descend
from raysim.training.tasks import CLASSES, cross_entropy

ALL = {"partition": {"scheme": "iid", "num_clients": 100}, "local": {"epochs": 5, "batch_size": 10}}
FEW = {
    "partition": {"scheme": "dirichlet", "alpha": 0.5, "num_clients": 20},
    "cohort": {"size": 8},
    "local": {"epochs": 5, "batch_size": 16},
}
#: hidden layers of the network -> further settings
CASES = {
    "16, all 100 clients": {"model": {"name": "mlp", "hidden": 16}, **ALL},
    "64 and 32, all 100 clients": {"model": {"name": "mlp", "hidden": [64, 32]}, **ALL},
    "200, all 100 clients": {"model": {"name": "mlp", "hidden": 200}, **ALL},
    "128, 8 of 20 clients with alpha 0.5": {"model": {"name": "mlp", "hidden": 128}, **FEW},
    "2,000, 8 of 20 clients with alpha 0.5": {"model": {"name": "mlp", "hidden": 2000}, **FEW},
}


#: Sizes of dense networks, from the inputs to the classes, and a batch size.
STEPS = (((64, 16, 10), 10), ((64, 128, 10), 16), ((784, 200, 10), 10), ((784, 200, 10), 64), ((3072, 256, 10), 32))


def main(repeats: int = 5) -> None:
    for sizes, batch in STEPS:
        times = " ".join(f"{step_us(sizes, batch, width):.0f}" for width in (0, 1, 2, 4, 8))
        print(f"{sizes}, batch {batch}: us of CPU a step and client, autograd, then stacks of 1, 2, 4, 8: {times}")
    for name, case in CASES.items():
        runs = {stack: [cpu_ms(case, stack) for _ in range(repeats)] for stack in ("off", "auto")}
        times = {stack: f"{median(ms):.0f} ({min(ms):.0f} to {max(ms):.0f})" for stack, ms in runs.items()}
        gain = median(runs["off"]) / median(runs["auto"])
        print(
            f"{name}: off {times['off']}, auto {times['auto']} ms of CPU a round; {gain:.1f} times faster", flush=True
        )


def step_us(sizes: Sequence[int], batch: int, width: int, steps: int = 30, repeats: int = 7) -> float:
    """Microseconds of CPU per client of a local step, least of some repetitions. width: of the stack; 0: autograd."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parts = [part for ends in pairwise(sizes) for part in (nn.Linear(*ends), nn.ReLU())]
    module = nn.Sequential(nn.Flatten(), *parts[:-1])
    layout = layout_of(module, head=str(len(parts) - 1))
    images, labels = torch.randn(max(1, width), batch, sizes[0]), torch.randint(10, (max(1, width), batch))
    lr = 1e-7  # so that gradients do not vanish, which would make arithmetic slow
    if width:
        stacker = Stacker(module, layout, InputTransform(), LocalSettings(lr=lr), CLASSES)
        layers = stacker.layers(stacker.copies(state_of(module, layout), width))
        step = torch.no_grad()(partial(descend, layers, images, labels, torch.full(labels.shape, 1 / batch), lr))
    else:
        model = BoundModel(module, layout, head=str(len(parts) - 1))
        step = partial(model.descend, cross_entropy, Batch(images[0], labels[0]), lr)
    times = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(steps):
            step()
        times.append(time.process_time() - began)
    torch.set_num_threads(threads)
    return 1e6 * min(times) / steps / max(1, width)


def cpu_ms(case: Mapping[str, Any], stack: str) -> float:
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as storage:
        raysim.run(
            case,
            data={"name": "digits"},
            local=case["local"] | {"stack": stack},
            rounds=6,
            evaluation={"every": 6},
            resources={"backend": "serial"},
            on_round=lambda _: ends.append(time.process_time()),
            storage=storage,
            quiet=True,
        )
    return 1000 * median(end - begin for begin, end in pairwise(ends))
