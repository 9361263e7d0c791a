"""Stacked clients: several clients of a block as a batched network, for small dense networks bound by call overhead.

Each client has its own parameters, batch order and loss, so results differ from training one by one only by rounding.
Rounding may depend on which clients are stacked together; this depends only on the configuration and data sizes.

Backpropagation is written out. `torch.func.vmap` costs more calls than a stack of four clients saves. vmap traced by
`make_fx` saved half as much as this code, and took 1.4 s and 85 MB at the first trace of every process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raysim.core.layout import Layout
from raysim.core.method import Batch, Method
from raysim.training.inputs import Examples, Transform
from raysim.training.local import LocalSettings, training_batches
from raysim.training.tasks import CLASSES, Task

#: Largest network and batch that are stacked: larger ones are bound by arithmetic rather than calls. Stacking saved 5 %
#: with batches of 32 images, and a quarter with 10. On a CPU a stack has at most MOST_CLIENTS clients, whose parameters
#: and inputs fit into a cache.
MOST_PARAMS, MOST_BATCH, MOST_CLIENTS = 2**18, 16, 8

#: Most parameters of a stack on devices where kernel launches bound a step: 64 MiB. The value was not tuned on a GPU.
MOST_ENTRIES = 2**24


class Trained(NamedTuple):
    """A client after local training. state: [num_state]; seconds: the client's share of the stack's time."""

    state: Tensor
    num_steps: int
    mean_loss: float
    seconds: float


class Layer(NamedTuple):
    """A linear layer of n clients. weight: [n, out, in]; bias: [n, out]; is_bent: a ReLU follows."""

    weight: Tensor
    bias: Tensor
    is_bent: bool


@dataclass(frozen=True)
class Stacker:
    """Trains stacks of clients that have the same network, settings and input transform."""

    module: nn.Module
    layout: Layout
    transform: Transform
    settings: LocalSettings
    task: Task

    def fits(self, methods: Sequence[Method]) -> bool:
        """Return whether clients are stacked; depends on the configuration only.

        Clients are stacked if `stack` is "auto", the network is a small dense network with ReLU, all of it trained and
        shared, and local training is uncompiled float32 SGD without momentum, weight decay or a gradient limit, in
        small batches, for the cross-entropy of classes, without a user's augmentation and without methods that change
        local steps.
        """
        settings, layout = self.settings, self.layout
        return (
            settings.stack == "auto"
            and not settings.compile
            and self.task is CLASSES
            and settings.is_bare_descent
            and settings.precision == "float32"
            and self.transform.function is None
            and not any(method.begin or method.forward or method.loss or method.grads for method in methods)
            and settings.batch_size <= MOST_BATCH
            and layout.num_params <= MOST_PARAMS
            and not layout.personal
            and len(layout.params) == 2 * len(dense_layers(self.module)) > 0
        )

    def train(
        self,
        clients: Sequence[int],
        num_steps: Sequence[int],
        members: Sequence[tuple[Examples, torch.Generator]],
        start: Tensor,
        lr: float,
    ) -> dict[int, Trained]:
        """Train the clients of a block in stacks, and return client -> result; clients without a partner are left out.

        Args:
          num_steps: number of local steps of each client.
          members: each client's examples, and the generator of the client's batch order.
          start: [num_state], the starting point of all clients.
        """
        done: dict[int, Trained] = {}
        for first, end in stacks(num_steps, most_clients(start.device, self.layout.num_params)):
            steps = num_steps[first]
            if end - first > 1 and steps:
                began = time.perf_counter()
                states, losses = self._train_stack(members[first:end], steps, start, lr)
                seconds = (time.perf_counter() - began) / (end - first)
                for client, state, loss in zip(clients[first:end], states, losses, strict=True):
                    done[client] = Trained(state, steps, loss, seconds)
        return done

    @torch.no_grad()
    def _train_stack(
        self, members: Sequence[tuple[Examples, torch.Generator]], num_steps: int, start: Tensor, lr: float
    ) -> tuple[Tensor, list[float]]:
        """Run `train_locally` for n clients at once; return ([n, num_state], mean loss of each client)."""
        states = start.repeat(len(members), 1)
        layers = [
            Layer(self._leaf(states, f"{name}.weight"), self._leaf(states, f"{name}.bias"), is_bent)
            for name, is_bent in dense_layers(self.module)
        ]
        size = min(self.settings.batch_size, max(len(examples) for examples, _ in members))
        total = torch.zeros(len(members), device=start.device)
        batches_of = partial(training_batches, num_steps=num_steps, skip_single=False)
        streams = [batches_of(examples, self.transform, self.settings, generator=each) for examples, each in members]
        for batches in zip(*streams, strict=True):
            total += descend(layers, *joined_batches(batches, size), lr)
        return states, (total / num_steps).tolist()

    def _leaf(self, states: Tensor, name: str) -> Tensor:
        leaf = self.layout.by_name[name]
        return states[:, leaf.offset : leaf.end].view(len(states), *leaf.shape)


def most_clients(device: torch.device, num_params: int) -> int:
    """Return the most clients of a stack. Free memory has no effect, so that bits are reproducible."""
    return MOST_CLIENTS if device.type == "cpu" else max(MOST_CLIENTS, MOST_ENTRIES // num_params)


def stacks(num_steps: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of neighbouring clients with the same number of steps, at most `most` clients each."""
    first = 0
    for end in range(1, len(num_steps) + 1):
        if end == len(num_steps) or num_steps[end] != num_steps[first] or end - first == most:
            yield first, end
            first = end


def dense_layers(module: nn.Module) -> list[tuple[str, bool]]:
    """Return (name, whether a ReLU follows) of each linear layer of a dense network; empty for other modules."""
    layers: list[tuple[str, bool]] = []
    if type(module) is not nn.Sequential:
        return []
    parts = list(module.named_modules(remove_duplicate=False))[1:]  # the same ReLU may occur several times
    for index, (name, part) in enumerate(parts):
        if index == 0 and type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1):
            continue
        if index and type(part) is nn.Linear and part.bias is not None:
            layers.append((name, False))
        elif type(part) is nn.ReLU and layers:
            layers[-1] = (layers[-1][0], True)
        else:
            return []
    return layers if layers and not layers[-1][1] else []


def joined_batches(batches: Sequence[Batch], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Join a batch of each client; return (images [n, size, pixels], labels [n, size], shares [n, size]).

    The share is the weight of an example in the client's loss. Shorter batches are padded with zeros of share 0.
    """
    lengths = [len(batch.targets) for batch in batches]
    if min(lengths) == size:
        labels = torch.stack([batch.targets for batch in batches])
        shares = torch.full(labels.shape, 1 / size, device=labels.device)
        return torch.stack([batch.inputs for batch in batches]).flatten(2), labels, shares
    first = batches[0]
    images = first.inputs.new_zeros(len(batches), size, *first.inputs.shape[1:])
    labels, shares = first.targets.new_zeros(len(batches), size), first.inputs.new_zeros(len(batches), size)
    for row, (batch, length) in enumerate(zip(batches, lengths, strict=True)):
        images[row, :length], labels[row, :length], shares[row, :length] = batch.inputs, batch.targets, 1 / length
    return images.flatten(2), labels, shares


def descend(layers: Sequence[Layer], images: Tensor, labels: Tensor, shares: Tensor, lr: float) -> Tensor:
    """Take an SGD step for every client; return [n], the losses before the step.

    For y = x W^T + b and the gradient g of y, the gradient of W is g^T x, of b the sum of g, and of x it is g W. For
    the cross-entropy, g is (softmax - onehot) * shares.

    Args:
      images, labels, shares: see `joined_batches`.
    """
    inputs = [images]
    for layer in layers:
        outputs = torch.baddbmm(layer.bias.unsqueeze(1), inputs[-1], layer.weight.transpose(1, 2))
        inputs.append(outputs.relu_() if layer.is_bent else outputs)
    logs, chosen = inputs.pop().log_softmax(2), labels.unsqueeze(2)
    losses = -(logs.gather(2, chosen).squeeze(2) * shares).sum(1)
    grad = logs.exp_().scatter_add_(2, chosen, -torch.ones_like(logs[..., :1])).mul_(shares.unsqueeze(2))
    for index, (layer, x) in reversed(list(enumerate(zip(layers, inputs, strict=True)))):
        below = torch.bmm(grad, layer.weight) if index else None
        layer.weight.baddbmm_(grad.transpose(1, 2), x, alpha=-lr)
        layer.bias.sub_(grad.sum(1), alpha=lr)
        if below is not None:
            grad = below.mul_(x > 0) if layers[index - 1].is_bent else below
    return losses
