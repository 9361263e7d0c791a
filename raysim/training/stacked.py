"""Stacked clients: the clients of a block as a batched network, for dense networks.

Each client has its own parameters, batch order and loss, so results differ from training one by one only by rounding.
Rounding may depend on which clients are stacked together; this depends only on the configuration and data sizes.

Backpropagation is written out, which takes 12 to 45 % less time than autograd for a single client.
`torch.func.vmap` costs more calls than a stack of four clients saves. vmap traced by `make_fx` saved half as much as
this code, and took 1.4 s and 85 MB at the first trace of every process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raysim.core.layout import Layout
from raysim.core.method import Batch, Method
from raysim.training.inputs import Examples, Transform
from raysim.training.local import LocalSettings, training_batches
from raysim.training.tasks import CLASSES, Task

#: On a CPU a stack has at most MOST_CLIENTS clients and MOST_ENTRIES_CPU parameters (8 MiB). On devices where kernel
#: launches bound a step, a stack has up to MOST_ENTRIES parameters (64 MiB); the value was not tuned on a GPU.
MOST_CLIENTS, MOST_ENTRIES_CPU, MOST_ENTRIES = 8, 2**21, 2**24

#: In small networks, calls take more time than arithmetic: with 9,610 parameters, a step of four stacked clients takes
#: little longer than a step of two (0.23 and 0.19 ms); with 159,010 parameters it takes 1.6 times as long. Up to CALL_BOUND
#: parameters, a value between these two, client blocks have LEAST_CLIENTS clients or more on average.
CALL_BOUND, LEAST_CLIENTS = 2**16, 4


class Trained(NamedTuple):
    """A client after local training.

    Attributes:
      leaves: flat leaves in the order of the layout; joined, they are the state [num_state].
      seconds: the client's share of the stack's time.
    """

    leaves: tuple[Tensor, ...]
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

        Clients are stacked if `stack` is "auto", the network is dense with ReLU, all of it trained and shared, and
        local training is uncompiled float32 SGD without momentum, weight decay or a gradient limit, for the
        cross-entropy of classes, without a user's augmentation and without methods that change local steps.
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
            and not layout.personal
            and len(layout.params) == 2 * len(dense_layers(self.module)) > 0
        )

    def least_clients(self, methods: Sequence[Method]) -> int:
        """Return the fewest clients of a client block on average, see `raysim.engine.schedule.cut_blocks`."""
        return LEAST_CLIENTS if self.layout.num_params <= CALL_BOUND and self.fits(methods) else 1

    def train(
        self,
        clients: Sequence[int],
        num_steps: Sequence[int],
        members: Sequence[tuple[Examples, torch.Generator]],
        start: Tensor,
        lr: float,
    ) -> dict[int, Trained]:
        """Train the clients of a block in stacks, and return client -> result; clients without steps are left out.

        Args:
          num_steps: number of local steps of each client, in descending order.
          members: each client's examples, and the generator of the client's batch order.
          start: [num_state], the starting point of all clients.
        """
        done: dict[int, Trained] = {}
        width, count = most_clients(start.device, self.layout.num_params), sum(steps > 0 for steps in num_steps)
        for first in range(0, count, width):
            stack = slice(first, min(count, first + width))
            began, steps = time.perf_counter(), num_steps[stack]
            values, losses = self._train_stack(members[stack], steps, start, lr)
            seconds = (time.perf_counter() - began) / sum(steps)
            leaves = zip(*(value.flatten(1) for value in values.values()), strict=True)
            for client, parts, loss, taken in zip(clients[stack], leaves, losses, steps, strict=True):
                done[client] = Trained(parts, taken, loss, seconds * taken)
        return done

    @torch.no_grad()
    def _train_stack(
        self, members: Sequence[tuple[Examples, torch.Generator]], num_steps: Sequence[int], start: Tensor, lr: float
    ) -> tuple[dict[str, Tensor], list[float]]:
        """Run `train_locally` for n clients at once; return (see `copies`, mean loss of each client)."""
        values, total = self.copies(start, len(members)), torch.zeros(len(members), device=start.device)
        streams = [
            training_batches(
                examples, self.transform, self.settings, num_steps=steps, generator=each, skip_single=False
            )
            for (examples, each), steps in zip(members, num_steps, strict=True)
        ]
        layers, done = self.layers(values), 0
        while streams:
            until, count = num_steps[len(streams) - 1], len(streams)
            layers = [Layer(layer.weight[:count], layer.bias[:count], layer.is_bent) for layer in layers]
            for _ in range(done, until):
                total[:count] += descend(layers, *joined_batches([next(each) for each in streams]), lr)
            done = until
            streams = streams[: sum(steps > done for steps in num_steps)]
        return values, [loss / steps for loss, steps in zip(total.tolist(), num_steps, strict=True)]

    def copies(self, start: Tensor, count: int) -> dict[str, Tensor]:
        """Return leaf name -> [n, *shape], the leaf of `start` [num_state] for each of n clients.

        With a tensor for each leaf, a step of a stack of 3072-64-10 takes some 15 % less time than with slices of one
        tensor [n, num_state].
        """
        views = self.layout.views(start)
        return {name: view.repeat(count, *[1] * view.dim()) for name, view in views.items()}

    def layers(self, values: Mapping[str, Tensor]) -> list[Layer]:
        """Return the layers of n clients. values: see `copies`."""
        return [
            Layer(values[f"{name}.weight"], values[f"{name}.bias"], is_bent)
            for name, is_bent in dense_layers(self.module)
        ]


def most_clients(device: torch.device, num_params: int) -> int:
    """Return the most clients of a stack. Free memory has no effect, so that bits are reproducible."""
    if device.type == "cpu":
        return min(MOST_CLIENTS, max(1, MOST_ENTRIES_CPU // num_params))
    return max(1, MOST_ENTRIES // num_params)


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


def joined_batches(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Join a batch of each client; return (images [n, size, pixels], labels [n, size], shares [n, size]).

    The share is the weight of an example in the client's loss. Shorter batches are padded with zeros of share 0.
    """
    lengths = [len(batch.targets) for batch in batches]
    size = max(lengths)
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
