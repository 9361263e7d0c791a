"""A federation's examples on the device that trains."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from raysim.core.method import Batch
from raysim.data.federation import Federation
from raysim.engine.messages import Slice
from raysim.engine.transport import readonly_tensor
from raysim.training.inputs import Examples, InputTransform, passes

#: Validation inputs of up to 256 MiB stay in memory as floats, resized: every client of every round is scored on them.
KEPT_INPUT_BYTES = 2**28


class DeviceData:
    """The federation's examples on the device of a trainer; held-out sets are brought there once."""

    def __init__(self, federation: Federation, transform: InputTransform, device: torch.device):
        self.federation, self._transform, self._device = federation, transform, device
        self._held_out: dict[str, Examples] = {}
        self._ready: dict[int, list[Batch]] = {}

    def client(self, client: int) -> Examples:
        """A client's training examples."""
        return self._examples(*self.federation.client(client))

    def held_out(self, name: str) -> Examples:
        """The "test" set, the "validation" set, or "test-NAME", a further test set."""
        if name not in self._held_out:
            self._held_out[name] = self._examples(*self.federation.held_out(name))
        return self._held_out[name]

    def slice(self, part: Slice) -> Examples:
        """A slice of a held-out set, without copying."""
        return self.held_out(part.held_out).part(part.start, part.end)

    def validation_batches(self, batch_size: int) -> Iterable[Batch]:
        """A pass over the validation set, ready for the model: made once where it takes little room.

        In the clients' batch size, as in FedVG's code: in train mode BatchNorm makes the score depend on it.
        """
        examples, transform = self.held_out("validation"), self._transform
        height, width, channels = examples.images.shape[1:]
        rows, columns = transform.output_size(height, width)
        size_bytes = 4 * len(examples) * rows * columns * (transform.channels or channels)
        if size_bytes > KEPT_INPUT_BYTES:
            return passes(examples, transform, batch_size)
        if batch_size not in self._ready:
            self._ready[batch_size] = list(passes(examples, transform, batch_size))
        return self._ready[batch_size]

    def _examples(self, images: np.ndarray, labels: np.ndarray) -> Examples:
        return Examples(readonly_tensor(images).to(self._device), readonly_tensor(labels).to(self._device))
