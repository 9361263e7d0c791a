"""`python -m tests.bench layouts`: one local step by memory layout and precision, one thread.

The layouts are PyTorch's own (channels first) and channels-last; the precisions are those of `local.precision`. All cases of
a network take turns, and the time is the thread's own, so that other work on the machine counts little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.engine.device import keep_freed_memory
from raysim.models import ModelSpec, build_model, head_of
from raysim.training.local import LocalSettings, local_step
from raysim.training.model import BoundModel
from raysim.training.tasks import cross_entropy

SETTINGS = LocalSettings(lr=0.01)
SMALL = {"stem": "small"}

#: name -> (network on 3 x 32 x 32, images of a batch, steps of each case)
NETWORKS: dict[str, tuple[ModelSpec, int, int]] = {
    "cnn, 32 (W1, W4)": (ModelSpec("cnn", 10, (32, 32, 3)), 32, 30),
    "cnn, 256 (scoring)": (ModelSpec("cnn", 10, (32, 32, 3)), 256, 6),
    "resnet18, 32 (W2)": (ModelSpec("resnet18", 10, (32, 32, 3), SMALL), 32, 5),
    "lenet, 64 (W5)": (ModelSpec("lenet", 10, (32, 32, 3)), 64, 40),
    "mobilenetv2, 64 (FLFA)": (ModelSpec("mobilenetv2", 10, (32, 32, 3), SMALL), 64, 4),
}

#: name -> (channels-last, precision)
CASES = {
    "channels first": (False, "float32"),
    "channels last": (True, "float32"),
    "first, bfloat16": (False, "bfloat16"),
    "last, bfloat16": (True, "bfloat16"),
}


def step_of(spec: ModelSpec, images: int, is_last: bool, precision: str) -> Callable[[], None]:
    """A local step on random images in a layout and a precision."""
    module, head = build_model(spec, seed=0).train(), head_of(spec)
    layout = layout_of(module, head=head, channels_last=is_last)
    model = BoundModel(module, layout, head=head, precision=precision)
    memory_format = torch.channels_last if is_last else torch.contiguous_format
    batch = Batch(torch.rand(images, 3, 32, 32).contiguous(memory_format=memory_format), torch.arange(images) % 10)
    step = local_step(model, cross_entropy, None, SETTINGS, SETTINGS.lr)
    return lambda: step(batch)


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{'ms of a step':24} " + " ".join(f"{name:>16}" for name in CASES) + "   over channels last")
    for name, (spec, images, turns) in NETWORKS.items():
        steps = {case: step_of(spec, images, *how) for case, how in CASES.items()}
        times: dict[str, list[float]] = {case: [] for case in CASES}
        for _ in range(turns + 1):
            for case, step in steps.items():
                began = time.thread_time()
                step()
                times[case].append(time.thread_time() - began)
        medians = {case: 1e3 * statistics.median(seconds[1:]) for case, seconds in times.items()}
        ratios = ", ".join(f"{median / medians['channels last']:.2f}" for median in medians.values())
        print(f"{name:24} " + " ".join(f"{median:16.1f}" for median in medians.values()) + f"   {ratios}", flush=True)


if __name__ == "__main__":
    main()
