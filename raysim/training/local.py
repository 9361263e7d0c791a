"""Local training: settings, batches and optimiser steps, the same for all methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raysim.core.method import Batch, GradFn, LossFn
from raysim.core.seeding import derive_seed, torch_generator
from raysim.training.inputs import Examples, InputTransform, Transform, sent
from raysim.training.model import BoundModel

#: Floats that are gathered at once for the next batches: 1 MiB.
GATHER_ENTRIES = 2**18


@dataclass(frozen=True)
class LocalSettings:
    """Settings of local training.

    Attributes:
      lr: client learning rate in round 0.
      epochs: passes over the local data, may be fractional; has no effect if `steps` is given.
      steps: optimiser steps; 0: no steps, clients only report; None: `epochs` applies.
      optimizer: "sgd" or "adamw"; its state is reset in every round.
      max_grad_norm: L2 norm to which a larger gradient, with every method's terms, is scaled down; None: no limit.
      precision: precision of forward and backward passes, see `BoundModel`.
      compile: whether, or by which backend, the passes of local steps are compiled, see `training.model.compiled`.
      stack: "auto": clients of dense networks are trained several at a time, see `training.stacked`; "off": never.
      schedule: learning rate in round t of T = num_rounds. "constant": lr; "exponential": lr * lr_decay^t; "cosine":
        lr * (1 + cos(pi t / T)) / 2, which is above 0 in all rounds t < T.
    """

    lr: float
    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    optimizer: str = "sgd"
    max_grad_norm: float | None = None
    precision: str = "float32"
    compile: bool | str = False
    stack: str = "auto"
    schedule: str = "exponential"
    num_rounds: int = 1

    def lr_of(self, round_index: int) -> float:
        if self.schedule == "cosine":  # never exactly 0: methods divide by it
            share = min(1.0, round_index / self.num_rounds)
            return self.lr * max((1 + math.cos(math.pi * share)) / 2, 1e-16)
        return self.lr * self.lr_decay**round_index  # lr_decay is 1 if the schedule is constant

    @property
    def is_bare_descent(self) -> bool:
        """Return whether a step is exactly params -= lr * gradient."""
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay) and self.max_grad_norm is None


def needs_two_examples(module: nn.Module) -> bool:
    """Return whether a module has BatchNorm, which has no variance on a single example: such batches are skipped."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def batch_bounds(num_examples: int, batch_size: int, *, skip_single: bool) -> list[tuple[int, int]]:
    """Return (start, end) of each batch of an epoch. A short last batch is kept; `skip_single` skips a batch of one
    example.
    """
    bounds = [(s, min(num_examples, s + batch_size)) for s in range(0, num_examples, batch_size)]
    return [(s, e) for s, e in bounds if e - s > 1] if skip_single else bounds


def num_local_steps(num_examples: int, settings: LocalSettings, *, skip_single: bool, share: float = 1.0) -> int:
    """Return the number of optimiser steps of a client, computed from sizes only, so that work can be planned.

    Args:
      share: share of the work, in (0, 1]; below 1 for stragglers, which take at least one step.
    """
    per_epoch = len(batch_bounds(num_examples, settings.batch_size, skip_single=skip_single))
    if per_epoch == 0:
        return 0
    if settings.steps is not None:
        return math.ceil(share * settings.steps - 1e-9)
    return max(1, math.ceil(share * settings.epochs * per_epoch - 1e-9))


def training_batches(
    examples: Examples,
    transform: Transform,
    settings: LocalSettings,
    *,
    num_steps: int,
    generator: torch.Generator,
    skip_single: bool,
) -> Iterator[Batch]:
    """Yield `num_steps` batches, each epoch in a new order, gathered and transformed on the examples' device.

    For speed, as many batches as fit into a cache are gathered at once and yielded as slices. Examples that fit into
    the cache together and are used more than once are transformed only once, unless they are augmented. The
    augmentation of an epoch is drawn at once, so that it does not depend on this grouping, and from a separate stream,
    so that batches have the same examples with and without augmentation.
    """
    bounds = batch_bounds(len(examples), settings.batch_size, skip_single=skip_single)
    shape, device = examples.inputs.shape[1:], examples.targets.device
    entries = max(1, math.prod(shape), transform.entries(shape)) * settings.batch_size
    group = max(1, GATHER_ENTRIES // entries)
    augments = any(each is not None for each in (transform.augmentation, transform.function, examples.shift))
    stream = torch_generator(derive_seed(generator.initial_seed(), "augment")) if augments else None
    is_due_again = num_steps > len(bounds) <= group
    ready = transform(examples.inputs) if is_due_again and stream is None else None
    done = 0
    while done < num_steps:
        order = sent(torch.randperm(len(examples), generator=generator), device)
        draws = None
        if stream is not None and isinstance(transform, InputTransform) and transform.augmentation is not None:
            draws = transform.draw(len(examples), shape[0], shape[1], stream).mapped(lambda each: sent(each, device))
        due = bounds[: num_steps - done]
        for first in range(0, len(due), group):
            part = due[first : first + group]
            base = part[0][0]
            chosen = order[base : part[-1][1]]
            targets = examples.targets.index_select(0, chosen)
            stored = examples.inputs.index_select(0, chosen) if ready is None else transform.rows(ready, chosen)
            if stream is not None and examples.shift is not None:
                stored = examples.shift(stored, stream)
            if stream is not None and isinstance(transform, InputTransform) and transform.function is not None:
                # Batch by batch, so that the function's draws do not depend on how many batches are gathered at once.
                for start, end in part:
                    batch = slice(start - base, end - base)
                    yield Batch(transform.by_function(stored[batch], stream), targets[batch])
                continue
            if draws is not None and isinstance(transform, InputTransform):
                inputs = transform.augmented(stored, draws.part(base, part[-1][1]))
            else:
                inputs = transform(stored) if ready is None else stored
            for start, end in part:
                yield Batch(inputs[start - base : end - base], targets[start - base : end - base])
        done += len(bounds)


def optimizer_step(params: Tensor, settings: LocalSettings, lr: float) -> Callable[[Tensor], None]:
    """Return a function step(grad) that updates `params` [num_params] in place and may overwrite `grad`."""
    if settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW([params], lr=lr, weight_decay=settings.weight_decay)

        def adamw(grad: Tensor) -> None:
            params.grad = grad
            optimizer.step()
            params.grad = None

        return adamw

    buffer: Tensor | None = None

    def sgd(grad: Tensor) -> None:
        # Weight decay, momentum, step: the order and the bits of torch.optim.SGD.
        nonlocal buffer
        if settings.weight_decay:
            grad = grad.add_(params, alpha=settings.weight_decay)
        if settings.momentum:
            grad = buffer = grad.clone() if buffer is None else buffer.mul_(settings.momentum).add_(grad)
        params.add_(grad, alpha=-lr)

    return sgd


def local_step(
    model: BoundModel, loss: LossFn, gradient: GradFn | None, settings: LocalSettings, lr: float
) -> Callable[[Batch], None]:
    """Return a function step(batch) that takes one optimiser step of the model."""
    limit = settings.max_grad_norm
    if gradient is None and settings.is_bare_descent:
        return lambda batch: model.descend(loss, batch, lr)
    compute = gradient or model.gradient_function(loss)
    move = optimizer_step(model.params, settings, lr)

    def step(batch: Batch) -> None:
        grad = compute(model.params, batch)
        with torch.no_grad():
            if limit is not None:
                grad.mul_((limit / (grad.norm() + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
            move(grad)

    return step


def train_locally(
    model: BoundModel,
    loss: LossFn,
    gradient: GradFn | None,
    examples: Examples,
    transform: Transform,
    settings: LocalSettings,
    *,
    lr: float,
    generator: torch.Generator,
    share: float = 1.0,
) -> tuple[int, float]:
    """Run the local steps of one client from the model's current state.

    Args:
      loss: loss(outputs, batch), with every method's `loss` applied.
      gradient: gradient(params, batch) -> [num_params], with every method's `grads` applied; None if no method has one.
      generator: draws the batch order, and seeds the augmentation's draws.
      share: share of the work, see `num_local_steps`.
    Returns:
      (steps taken, mean loss over the steps; NaN without a step).
    """
    skip_single = model.has_batch_norm
    num_steps = num_local_steps(len(examples), settings, skip_single=skip_single, share=share)
    step = local_step(model, loss, gradient, settings, lr)
    total = torch.zeros((), device=model.device)
    model.module.train()
    batches = training_batches(
        examples, transform, settings, num_steps=num_steps, generator=generator, skip_single=skip_single
    )
    for batch in batches:
        step(batch)
        total += model.loss
    return num_steps, float(total) / num_steps if num_steps else math.nan
