"""Feature shift: differences between the clients' inputs, in addition to differences in classes and numbers of examples."""

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
    """Add Gaussian noise with standard deviation std * client / (num_clients - 1), which grows with the client's id.

    Li et al. 2022 (arXiv:2102.02079), section IV-B, as in their code: client 0 has no noise, the last client has all of
    it, and values are not clipped to [0, 1]. Their code draws new noise for each batch; here an example keeps its noise
    unless `anew`.

    Args:
      images: (n, channels, height, width) in [0, 1].
      std: standard deviation of the last client's noise, in units of the images.
      anew: draw new noise for each training batch, as in the authors' code; held-out rows keep their noise.
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
      function: function(images=, client=, num_clients=, generator=) gets and returns (n, channels, height, width)
        float32; pixels are in [0, 1] before the shift.
      seed: seed of the function's draws.
      is_anew: whether each training batch is shifted with new draws; otherwise every example keeps its draws.
    """

    function: Callable[..., object]
    num_clients: int
    seed: int
    is_anew: bool = False

    def of_client(self, images: Tensor, client: int, purpose: str = "train") -> Tensor:
        """Shift a client's images, (n, height, width, channels) uint8 -> float32 in the same units, on their device."""
        return self.of_batch(images, torch_generator(derive_seed(self.seed, f"shift {purpose}", client=client)), client)

    def of_batch(self, images: Tensor, generator: torch.Generator, client: int) -> Tensor:
        """Shift images of a client as `of_client` does, with draws from a generator."""
        x = images.cpu().permute(0, 3, 1, 2).float() / 255
        result = self.function(images=x, client=client, num_clients=self.num_clients, generator=generator)
        shifted = same_form(result, x, "a shift", self.function)
        return (shifted * 255).permute(0, 2, 3, 1).contiguous().to(images.device)

    def of_held_out(self, images: Tensor, purpose: str, sizes: Sequence[int] | np.ndarray | None) -> Tensor:
        """Shift the server's rows: each row gets the shift of a client.

        Args:
          purpose: "test", "validation" or "unseen"; each has different draws.
          sizes: number of rows of each client, if rows are sorted by client; None: rows are assigned to clients evenly
            and at random.
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
