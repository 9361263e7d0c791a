"""Where a trainer computes: arithmetic and memory, set once a process, and the federation's examples on its device."""

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

#: Devices without float64, in which FedVG and other methods measure.
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
    """Devices of that type."""
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
    """Make what rounds differently from run to run a matter of the settings."""
    # How a sum is shared out over threads decides how it is rounded: the number is a setting, not the machine's.
    torch.set_num_threads(num_threads)
    if device == "cuda":
        # Attention and sums by index otherwise add in whatever order their threads finish, and bits would change from run
        # to run. PyTorch refuses operations without a deterministic form, by name.
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
        torch.use_deterministic_algorithms(is_deterministic)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process instead of returning it to the system.

    A step allocates the same activations as the one before; returned and fetched again they cost 2,000 to 3,000 page
    faults a step for the two-convolution CNN, a tenth of its time. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


#: Validation inputs of up to 64 MiB stay in memory as floats, resized: every client of every round is scored on them.
KEPT_INPUT_BYTES = 2**26

#: Floats of a batch of inputs for scoring, and its most examples: larger ones gain little, and their activations, all kept
#: for the way back, cost memory. At 3 x 32 x 32 these are 128 examples.
SCORING_ENTRIES, SCORING_EXAMPLES = 2**19, 256


class DeviceData:
    """The federation's examples on the device of a trainer; held-out sets are brought there once.

    Args:
      shift: of clients' examples, unseen ones among them, of the validation set and of the test set; further test sets stay
        as they are.
    """

    def __init__(self, federation: Federation, transform: Transform, device: torch.device, shift: Shift | None = None):
        self.federation, self._transform, self._device, self._shift = federation, transform, device, shift
        self._held_out: dict[str, Examples] = {}
        self._ready: dict[int, list[Batch]] = {}

    def client(self, client: int) -> Examples:
        """A client's training examples."""
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
                if name == "unseen" and self.federation.unseen_sizes is not None:  # numbered behind the others
                    sizes = np.concatenate([np.zeros_like(self.federation.sizes), self.federation.unseen_sizes])
                examples = Examples(self._shift.of_held_out(examples.inputs, name, sizes), examples.targets)
            self._held_out[name] = examples
        return self._held_out[name]

    def slice(self, part: Slice) -> Examples:
        """A slice of a held-out set, without copying."""
        return self.held_out(part.held_out).part(part.start, part.end)

    def validation_batches(self, batch_size: int, *, is_exact: bool) -> Iterable[Batch]:
        """A pass over the validation set, ready for the model: made once where it takes little room.

        Args:
          is_exact: in batches of just this size; else of at least it, as many as make the pass fast.
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
    """Examples, a power of two, of a batch for scoring; entries: floats of one example's input."""
    return min(SCORING_EXAMPLES, 1 << max(1, SCORING_ENTRIES // entries).bit_length() - 1)
