"""A device that is not the CPU, for machines without an accelerator: the CPU's arithmetic behind another device's rules.

`register()` makes the device type `other` known to PyTorch as its accelerator (PyTorch's Python backend for PrivateUse1, an
experimental interface of 2.10 and later). Inside `with OtherDevice()` tensors on `other:0` wrap a CPU tensor. Operations run
on the CPU tensors, so results have the CPU's bits. Refused as on a card: operations on tensors of two devices, `.numpy()`,
a CPU generator, BatchNorm with vectors that do not start at a multiple of 16 bytes, operations without a deterministic form.
The device has a random stream of its own. `OtherDevice.waits` counts the calls in which a host would wait for a card: copies
to the CPU, copies to the device from memory that is not pinned, `item`, `tolist`, and operations whose result has a size that
depends on values.

Not covered: several devices, streams, memory limits.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "other"

#: Operations whose result's size depends on values: a card has to be waited for.
VALUE_DEPENDENT = (
    "nonzero",
    "masked_select",
    "_unique",
    "unique_consecutive",
    "is_nonzero",
    "equal",
    "repeat_interleave",
)
#: Operations without a deterministic form on CUDA.
NONDETERMINISTIC = (
    *(
        "_adaptive_avg_pool2d_backward",
        "adaptive_max_pool2d_backward",
        "nll_loss2d_forward",
        "reflection_pad2d_backward",
    ),
    *("upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "histc", "kthvalue", "put_"),
)
LIBRARIES: list[torch.library.Library] = []  # registrations live as long as these
#: Operations that autocast runs in its lower precision on CPU, CUDA and XPU alike.
LOWERED = ("conv2d", "linear", "matmul", "addmm", "mm", "bmm", "baddbmm")


class OtherTensor(Tensor):
    """A tensor of the other device; `raw` is the CPU tensor with its values."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> OtherTensor:
        made: OtherTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: OtherTensor) -> None:
        self.raw = new.raw

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError("a tensor of the device type 'other' has no numpy array; copy it to the CPU first")

    def tolist(self) -> Any:
        OtherDevice.waits += 1
        return self.raw.tolist()

    def pin_memory(self, *_: object) -> Tensor:
        raise RuntimeError("only a CPU tensor can be pinned")

    def __repr__(self, **_: object) -> str:
        return f"OtherTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Sends every operation that touches the other device, factories among them, to its rules.

    Attributes:
      waits: calls so far in which a host would have waited; num_operations: of the device, so far.
      sent: (type, shape, whether pinned and asynchronous) of each tensor copied to the device so far.
    """

    waits = 0
    num_operations = 0
    sent: ClassVar[list[tuple[torch.dtype, tuple[int, ...], bool]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        touches = any(isinstance(value, OtherTensor) for value in tree_flatten((args, kwargs))[0])
        if function.__name__.startswith("_pin_memory"):
            pinned = args[0].clone()
            pinned.lies_pinned = True
            return pinned
        if touches or (device is not None and torch.device(device).type == NAME):
            return _run(function, args, kwargs)
        return function(*args, **kwargs)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    name = function.__name__.partition(".")[0]
    values = tree_flatten((args, kwargs))[0]
    others = [value for value in values if isinstance(value, OtherTensor)]
    OtherDevice.num_operations += 1
    if name == "_to_copy":
        target = kwargs.get("device")
        target = args[0].device if target is None else torch.device(target)
        copied = function(_raw(args[0]), **{**kwargs, "device": "cpu"})
        is_other = isinstance(args[0], OtherTensor)
        if target.type == "cpu":
            OtherDevice.waits += is_other
            return copied
        if not is_other:
            _sent(args[0], is_async=kwargs.get("non_blocking", False))
        return OtherTensor(copied)
    if name == "_local_scalar_dense":
        OtherDevice.waits += 1
        return function(args[0].raw)
    if name == "copy_":
        from_other, to_other = (isinstance(each, OtherTensor) for each in (args[1], args[0]))
        OtherDevice.waits += from_other and not to_other
        if to_other and not from_other:
            _sent(args[1], is_async=len(args) > 2 and args[2])
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    _refuse_mixed(name, values, others)
    if name in NONDETERMINISTIC or (name == "cumsum" and others[0].is_floating_point()):
        raise RuntimeError(f"{name} does not have a deterministic implementation")
    if "batch_norm" in name and any(each.dim() == 1 and each.storage_offset() % 4 for each in others):
        raise RuntimeError(f"{name}: misaligned address")
    indices = args[1] if name in ("index", "index_put_", "index_put", "_index_put_impl_") else ()
    has_mask = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)
    OtherDevice.waits += name.startswith(VALUE_DEPENDENT) or has_mask
    is_random = torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None
    call = _with_stream(function) if is_random else function
    result = call(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    wrapper_of = {id(value.raw): value for value in others}  # in-place operations return their own tensor

    def wrapped(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return wrapper_of[id(value)] if id(value) in wrapper_of else OtherTensor(value)

    return tree_map(wrapped, result)


def _sent(tensor: Tensor, *, is_async: bool) -> None:
    """Note a copy to the device: a card is waited for unless the memory is pinned and the copy is asynchronous."""
    is_free = is_async and hasattr(tensor, "lies_pinned")
    OtherDevice.waits += not is_free
    OtherDevice.sent.append((tensor.dtype, tuple(tensor.shape), is_free))


def _refuse_mixed(name: str, values: list[object], others: list[OtherTensor]) -> None:
    plain = [value for value in values if isinstance(value, Tensor) and not isinstance(value, OtherTensor)]
    if others and any(value.dim() for value in plain):  # a CPU scalar may stand beside tensors of a device
        raise RuntimeError(f"{name}: expected all tensors on one device, found other:0 and cpu")
    if any(isinstance(value, torch.Generator) and value.device.type == "cpu" for value in values):
        raise RuntimeError(f"{name}: expected a generator of the device other, found one of the CPU")


def _raw(value: object) -> object:
    if isinstance(value, OtherTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _with_stream(function: Any) -> Any:
    """The function, drawing from the device's stream in place of the CPU's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(Module.stream.get_state())
        try:
            return function(*args, **kwargs)
        finally:
            Module.stream.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(kept)

    return call


class Module(backend_registration._DummyBackendModule):
    """What `torch.get_device_module("other")` offers, as `torch.cuda` does."""

    stream = torch.Generator()

    def manual_seed(self, seed: int) -> None:
        self.stream.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.stream.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> Tensor:
        return self.stream.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self.stream.set_state(state)

    def get_device_name(self, index: int = 0) -> str:
        return "a device of the tests"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@functools.cache
def register() -> None:
    """Make the device known to PyTorch, once in a process; it is the accelerator from then on."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    lowered = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in LOWERED:
        lowered.impl(name, functools.partial(_lowered, getattr(torch.ops.aten, name)))
    LIBRARIES.extend([everything, lowered])


def _lowered(function: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of autocast: float32 tensors become those of the lower precision first."""
    low = torch.get_autocast_dtype(NAME)

    def cast(value: object) -> object:
        is_float = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(low) if is_float else value  # type: ignore[union-attr]

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return function(*tree_map(cast, args), **tree_map(cast, kwargs))
