"""What a process that computes settles once: arithmetic and memory."""

from __future__ import annotations

import contextlib
import ctypes

import torch

#: Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def settle_arithmetic(num_threads: int, device: str) -> None:
    """Make what rounds differently from run to run a matter of the settings."""
    # How a sum is shared out over threads decides how it is rounded: the number is a setting, not the machine's.
    torch.set_num_threads(num_threads)
    if device != "cpu":
        # cuDNN would else take whatever algorithm was fastest just then, and bits would change from run to run.
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process instead of returning it to the system.

    A step allocates the same activations as the one before; returned and fetched again they cost 2,000 to 3,000 page
    faults a step for the two-convolution CNN, a tenth of its time. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
