"""Seeds of all random numbers of a run; results do not depend on the place or time of computation."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # workers that only move data need no torch: 3 s and 250 MB each
    import torch


def derive_seed(run_seed: int, purpose: str, round_index: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed determined by the four arguments.

    Independent streams for each purpose ("cohort", "batches", "init", ...) let two methods see the same
    cohorts, batch orders and initial parameters.
    """
    text = f"{run_seed}|{purpose}|{round_index}|{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def torch_generator(seed: int) -> torch.Generator:
    """A CPU generator: draws stay on the CPU so that they are the same whatever the device."""
    import torch

    return torch.Generator().manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    """A NumPy generator for partitions and cohorts."""
    return np.random.default_rng(seed)
