"""Every random number of a run comes from here, so that no result depends on where or when it was computed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # workers that only move data need no torch: 3 s and 250 MB each
    import torch


def derive_seed(run_seed: int, purpose: str, round_index: int = 0, client: int = 0) -> int:
    """A 63-bit seed that depends on all four arguments and on nothing else.

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
