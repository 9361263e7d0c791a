"""The device of a trainer: settings of arithmetic and memory, applied once per process, and examples on the device."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch

from raysim.base.errors import Fault, refuse
from raysim.core.method import Batch
from raysim.data.federation import Federation
from raysim.engine.messages import Slice, readonly_tensor
from raysim.training.inputs import Examples, Transform, passes, sent
from raysim.training.shift import Shift

#: Devices without float64, which FedVG and other methods need.
WITHOUT_FLOAT64 = ("mps",)


def accelerator(wanted: str = "auto") -> str:
    """Return the type of the training device: "cuda" (also AMD's cards), "xpu", "mps", or "cpu".

    Args:
      wanted: a type, or "auto": this machine's accelerator if it has float64, else "cpu".
    Raises:
      ConfigError: this machine has no such device.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = "cpu" if device is None else device.type
    if wanted == "auto":
        return "cpu" if there in WITHOUT_FLOAT64 else there
    if wanted not in ("cpu", there):
        text = f"PyTorch has no {wanted} on this machine, only {there}; set auto, or install its build of PyTorch"
        refuse([Fault("resources.device", text)], "the resources")
    return wanted


def num_accelerators() -> int:
    """Return the number of devices of the type that `accelerator()` returns; 0 for "cpu"."""
    return 0 if accelerator() == "cpu" else torch.accelerator.device_count()


def limit_memory(device: str, share: float) -> None:
    """Limit this process to a share of the device's memory.

    No-op on a CPU, and on accelerators for which PyTorch has no such limit.
    """
    if device != "cpu":
        limit = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", lambda _: None)
        limit(min(1.0, share))


#: Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def settle_arithmetic(num_threads: int, device: str) -> None:
    """Make the rounding of results depend on the settings only, so that it does not vary from run to run."""
    # The number of threads affects the rounding of sums, so it is a setting and not taken from the machine.
    torch.set_num_threads(num_threads)
    if device == "cuda":
        # Without this, attention and sums by index add in the order in which threads finish, and bits vary from run to
        # run. PyTorch raises an error that names an operation without a deterministic form.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set on the module's class
        torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def arithmetic_kept() -> Iterator[None]:
    """Restore PyTorch's number of threads and deterministic mode at the end of the block."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != is_deterministic:  # the call imports PyTorch's compiler
            torch.use_deterministic_algorithms(is_deterministic)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process instead of returning it to the system.

    A step allocates the same activations as the step before. If the memory is returned in between, the two-convolution
    CNN has 2,000 to 3,000 page faults a step, a tenth of its time. No-op without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


#: Transformed validation inputs of up to 64 MiB stay in memory: every client may be scored on them in every round.
KEPT_INPUT_BYTES = 2**26

#: Most floats and most examples of an input batch for scoring. Larger batches gain little, and the activations kept for
#: a backward pass cost memory. For inputs of 3 x 32 x 32 a batch has 128 examples.
SCORING_ENTRIES, SCORING_EXAMPLES = 2**19, 256


class DeviceData:
    """The federation's examples on the device of a trainer; held-out sets are copied to the device once.

    Args:
      shift: shift of the examples of clients (also unseen clients), of the validation set and of the test set; further
        test sets are not shifted.
    """

    def __init__(self, federation: Federation, transform: Transform, device: torch.device, shift: Shift | None = None):
        self.federation, self._transform, self._device, self._shift = federation, transform, device, shift
        self._held_out: dict[str, Examples] = {}
        self._ready: dict[int, list[Batch]] = {}

    def client(self, client: int) -> Examples:
        """Return a client's training examples."""
        examples = self._examples(*self.federation.client(client))
        if self._shift is None:
            return examples
        if self._shift.is_anew:
            return Examples(examples.inputs, examples.targets, partial(self._shift.of_batch, client=client))
        return Examples(self._shift.of_client(examples.inputs, client), examples.targets)

    def held_out(self, name: str) -> Examples:
        """Return a held-out set: "test", "validation", "unseen" (clients concatenated), or a further test set
        "test-NAME".
        """
        if name not in self._held_out:
            examples = self._examples(*self.federation.held_out(name))
            if self._shift is not None and name in ("test", "validation", "unseen"):
                sizes = self.federation.test_sizes if name == "test" else None
                if name == "unseen" and self.federation.unseen_sizes is not None:  # numbered after the population
                    sizes = np.concatenate([np.zeros_like(self.federation.sizes), self.federation.unseen_sizes])
                examples = Examples(self._shift.of_held_out(examples.inputs, name, sizes), examples.targets)
            self._held_out[name] = examples
        return self._held_out[name]

    def slice(self, part: Slice) -> Examples:
        """Return a slice of a held-out set, without copying."""
        return self.held_out(part.held_out).part(part.start, part.end)

    def validation_batches(self, batch_size: int, *, is_exact: bool) -> Iterable[Batch]:
        """Return the batches of a pass over the validation set, transformed for the model; small sets are cached.

        Args:
          is_exact: whether batches have exactly `batch_size` examples; otherwise batches may be larger, for speed.
        """
        examples, transform = self.held_out("validation"), self._transform
        entries = transform.entries(examples.inputs.shape[1:])
        if not is_exact:
            batch_size = max(batch_size, scoring_batch(entries))
        if 4 * len(examples) * entries > KEPT_INPUT_BYTES:
            return passes(examples, transform, batch_size)
        if batch_size not in self._ready:
            self._ready[batch_size] = list(passes(examples, transform, batch_size))
        return self._ready[batch_size]

    def _examples(self, inputs: np.ndarray, targets: np.ndarray) -> Examples:
        return Examples(sent(readonly_tensor(inputs), self._device), sent(readonly_tensor(targets), self._device))


def scoring_batch(entries: int) -> int:
    """Return the number of examples of a batch for scoring, a power of two. entries: floats of one example's input."""
    return min(SCORING_EXAMPLES, 1 << max(1, SCORING_ENTRIES // entries).bit_length() - 1)
