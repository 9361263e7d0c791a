"""`python -m tests.bench.local`: what methods add to one local step of the CNN (3 x 32 x 32, batch 32, one thread).

Steps with and without the method alternate, and the time is the thread's own, so that other work on the machine counts
little.
"""

from __future__ import annotations

import statistics
import time

import torch

from methods import METHODS
from raysim.core.layout import layout_of
from raysim.core.method import Batch, ClientView, Method
from raysim.engine.device import keep_freed_memory
from raysim.models import ModelSpec, build_model
from raysim.training.local import LocalSettings, local_step
from raysim.training.model import BoundModel
from raysim.training.tasks import cross_entropy

NUM_PAIRS = 100
SETTINGS = LocalSettings(lr=0.01)

#: name -> (method, its message)
CASES: dict[str, tuple[Method, dict]] = {
    f"flfa {layer}, scale {scale}": (METHODS["flfa"](candidates=[layer], scale=scale), {"layers": [0]})
    for layer in ("conv2", "fc1", "fc2")
    for scale in ("layer", "row", "none")
} | {
    name: (METHODS[name](**options), {})
    for name, options in {
        "univarfl": {},
        "fedrs": {},
        "fedlc": {},
        "fedacg": {},
        "fedprox": {},
        "moon": {},
        "fedsol": {},
    }.items()
}


def client_of(model: BoundModel, message: dict) -> ClientView:
    """A client as the trainer shows it, in its second round."""
    start, size = model.state.clone(), model.layout.num_params
    return ClientView(
        id=0,
        round_index=1,
        num_examples=400,
        class_counts=torch.tensor([80, 0, 80, 80, 0, 80, 0, 0, 80, 0]),
        lr=SETTINGS.lr,
        layout=model.layout,
        start=start[:size],
        params=model.params,
        start_state=start,
        state=model.state,
        head="fc2",
        model=model,
        message=message,
        memory={"previous": start.clone()},
        generator=torch.Generator(),
        batches=lambda: [],
        validation_gradient=lambda mode: model.grad,
        validation_loss=lambda mode: 0.0,
        accuracy=lambda held_out: 0.0,
        initial_state=lambda: start,
    )


def step_of(model: BoundModel, method: Method, message: dict):
    """(overrides, one local step) of a list of this one method."""
    client = client_of(model, message)
    ops = method.forward({}, client) if method.forward else {}
    loss = method.loss(cross_entropy, client) if method.loss else cross_entropy
    gradient = method.grads(model.gradient_function(loss), client) if method.grads else None
    return ops, local_step(model, loss, gradient, SETTINGS, SETTINGS.lr)


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    module = build_model(ModelSpec("cnn", 10, (32, 32, 3)), seed=0)
    model = BoundModel(module, layout_of(module, head="fc2", channels_last=True), head="fc2", features=True)
    module.train()
    images = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    batch = Batch(images, torch.tensor([0, 2, 3, 5, 8, 0, 2, 3] * 4))
    initial = model.state.clone()
    print(f"{'method':24} {'plain ms':>9} {'with ms':>9} {'ratio':>7}")
    for name, (method, message) in CASES.items():
        model.load(initial)
        plain, other = step_of(model, Method("fedavg"), {}), step_of(model, method, message)
        times: dict[int, list[float]] = {0: [], 1: []}
        for pair in range(NUM_PAIRS):
            for which in (0, 1) if pair % 2 else (1, 0):
                ops, step = (plain, other)[which]
                with model.overridden(ops):
                    began = time.thread_time()
                    step(batch)
                    times[which].append(time.thread_time() - began)
        ratio = statistics.median(b / a for a, b in zip(times[0][5:], times[1][5:], strict=True))
        medians = [1e3 * statistics.median(times[which]) for which in (0, 1)]
        print(f"{name:24} {medians[0]:9.2f} {medians[1]:9.2f} {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    main()
