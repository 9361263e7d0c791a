"""Feature shift: a difference between clients' inputs that is neither of classes nor of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.base.errors import DataError
from raysim.core.seeding import derive_seed, numpy_generator, torch_generator
from raysim.training.inputs import same_form


def noise(
    images: Tensor, *, client: int, num_clients: int, generator: torch.Generator, std: float = 0.1, anew: bool = False
) -> Tensor:
    """Gaussian noise with deviation std * client / (num_clients - 1), growing with the client's number.

    Li et al. 2022 (arXiv:2102.02079), section IV-B, as their code has it: client 0 has no noise, the last one all of it, and
    nothing is cut off at 0 and 1. Their code draws it anew for each batch; here an example keeps its noise unless `anew`.

    Args:
      images: (n, channels, height, width) in [0, 1].
      std: of the last client's noise, in units of these.
      anew: draw the noise of training batches anew for each batch, as their code does; held-out rows keep theirs.
    """
    if not std >= 0:
        raise DataError(f"std is {std}", "data.shift.noise", "give 0 or more")
    share = client / max(1, num_clients - 1)
    return images + std * share * torch.randn(images.shape, generator=generator)


#: Named shifts: function(images, client, num_clients, generator, options) -> images.
SHIFTS: dict[str, Callable[..., object]] = {"noise": noise}


@dataclass(frozen=True)
class Shift:
    """A feature shift over the clients of a run.

    Attributes:
      function: function(images=, client=, num_clients=, generator=) takes and returns (n, channels, height, width) float32 in
        units of [0, 1].
      seed: of its draws.
      is_anew: whether training batches are shifted one by one; else every example keeps what was drawn for it.
    """

    function: Callable[..., object]
    num_clients: int
    seed: int
    is_anew: bool = False

    def of_client(self, images: Tensor, client: int, purpose: str = "train") -> Tensor:
        """(n, height, width, channels) uint8 of one client -> float32 in the same units, on the same device."""
        return self.of_batch(images, torch_generator(derive_seed(self.seed, f"shift {purpose}", client=client)), client)

    def of_batch(self, images: Tensor, generator: torch.Generator, client: int) -> Tensor:
        """The same with draws from a generator."""
        x = images.cpu().permute(0, 3, 1, 2).float() / 255
        result = self.function(images=x, client=client, num_clients=self.num_clients, generator=generator)
        shifted = same_form(result, x, "a shift", self.function)
        return (shifted * 255).permute(0, 2, 3, 1).contiguous().to(images.device)

    def of_held_out(self, images: Tensor, purpose: str, sizes: Sequence[int] | np.ndarray | None) -> Tensor:
        """Shift the server's rows: each row gets the shift of a client.

        Args:
          purpose: "test", "validation" or "unseen"; their draws differ.
          sizes: rows of each client, one client's after the other's; None: rows are dealt to clients at random, evenly.
        """
        if sizes is None:
            rng = numpy_generator(derive_seed(self.seed, f"shift {purpose}"))
            owners = rng.permutation(np.arange(len(images)) % self.num_clients)
        else:
            owners = np.repeat(np.arange(len(sizes)), sizes)
        shifted = torch.empty(images.shape, dtype=torch.float32, device=images.device)
        for client in np.unique(owners):
            rows = torch.from_numpy(np.flatnonzero(owners == client)).to(images.device)
            shifted[rows] = self.of_client(images[rows], int(client), purpose)
        return shifted
