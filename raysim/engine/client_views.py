"""A round in a trainer, and the client views that hooks get; each view belongs to one method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView, GradFn, State
from raysim.core.seeding import derive_seed, torch_generator
from raysim.engine.messages import RoundMessage, unpack
from raysim.engine.schedule import Phase, crowd_of
from raysim.training.inputs import Examples
from raysim.training.local import train_locally

if TYPE_CHECKING:
    from raysim.engine.trainer import Trainer


class Round:
    """A round's message in a trainer, copied to the device once for all tasks."""

    def __init__(self, message: RoundMessage, phase: Phase, device: torch.device):
        self.message, self.phase, self.index = message, phase, message.round_index
        self.state = torch.from_numpy(message.state.copy()).to(device)
        self.fields: dict[str, State] = unpack(dict(message.fields), device)
        self.overheard: dict[str, State] = unpack(dict(message.overheard or {}), device)

    def is_of(self, message: RoundMessage) -> bool:
        """Return whether the message has the same round, staleness, phase and part of the round.

        The first part trains all clients except latecomers, the second part the latecomers.
        """
        both = (self.message, message)
        mine, other = ((m.round_index, m.staleness, m.phase_index, m.overheard is None) for m in both)
        return mine == other


def client_views(
    trainer: Trainer, current: Round, client: int, examples: Examples, start: Tensor, memory: Mapping[str, State]
) -> dict[str, ClientView]:
    """Return method name -> view of the client: the method's message, memory, scratch and random stream."""
    settings, model = current.phase.settings, trainer.model
    seed = derive_seed(trainer.seed, "validation", current.index, client)
    if not current.phase.methods:
        return {}
    shared = partial(
        ClientView,
        id=client,
        round_index=current.index,
        num_examples=len(examples),
        lr=settings.lr_of(current.index),
        momentum=settings.momentum,
        batch_size=settings.batch_size,
        layout=trainer.layout,
        start=start[: trainer.layout.num_params],
        params=model.params,
        start_state=start,
        state=model.state,
        head=trainer.head,
        model=model,
        batches=partial(_drawn_batches, trainer, client, examples),
        train=partial(_trained_from, trainer, current, client, examples),
        validation_gradient=partial(trainer.on_validation, model.mean_gradient, settings.batch_size, seed),
        validation_loss=partial(trainer.on_validation, model.mean_loss, settings.batch_size, seed),
        accuracy=trainer.accuracy_on,
        initial_state=partial(trainer.initial_state, client),
    )
    return {
        method.name: shared(
            class_counts=torch.tensor(trainer.federation.class_counts[client], device=model.device),
            message=current.fields.get(method.name, {}),
            overheard=current.overheard.get(method.name, {}),
            memory=memory.get(method.name, {}),
            crowd=crowd_of(method.name, len(trainer.federation.sizes), trainer.seed),
            generator=torch_generator(derive_seed(trainer.seed, f"method/{method.name}", current.index, client)),
        )
        for method in current.phase.methods
    }


def _drawn_batches(trainer: Trainer, client: int, examples: Examples, *, is_normalised: bool = True) -> Iterable[Batch]:
    """See `ClientView.batches`. The order is drawn once, since sets from folders are sorted by class, which BatchNorm
    would see.
    """
    generator = torch_generator(derive_seed(trainer.seed, "pass", client=client))
    order = torch.randperm(len(examples), generator=generator).to(examples.targets.device)
    drawn = Examples(examples.inputs[order], examples.targets[order])
    return trainer.batches_of(drawn, is_normalised=is_normalised)


def _trained_from(
    trainer: Trainer,
    current: Round,
    client: int,
    examples: Examples,
    start: Tensor,
    /,
    *,
    grads: Callable[[GradFn], GradFn] | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    lr: float | None = None,
) -> Tensor:
    """Return the state [num_state] after local steps from `start` [num_state]; see `ClientView.train`."""
    model, settings = trainer.model, current.phase.settings
    if epochs is not None or steps is not None:
        settings = replace(settings, epochs=epochs or settings.epochs, steps=steps)
    gradient = grads(model.gradient_function(model.criterion)) if grads is not None else None
    seed = derive_seed(trainer.seed, "own_model", current.index, client)
    with model.aside(start, train=True, seed=seed):
        train_locally(
            model,
            model.criterion,
            gradient,
            examples,
            trainer.transform,
            settings,
            lr=settings.lr_of(current.index) if lr is None else lr,
            generator=torch_generator(seed),
            share=current.phase.share_of(client, trainer.seed, current.index),
        )
        return model.state.clone()
