"""What crosses between server and trainers: plain NumPy arrays in plain containers, the same with and without Ray."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from raysim.core.method import Value
from raysim.core.weights import RightMap


def map_leaves(function: Callable[[Value], Value], value: Value) -> Value:
    """The same nest of dicts, lists, tuples and maps, with function(item) in the place of everything inside."""
    if isinstance(value, RightMap):
        return RightMap(map_leaves(function, value.maps))
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


def pack(value: Value) -> Value:
    """Tensors become NumPy arrays, which Ray stores without copying and hands out to be read only."""
    return map_leaves(lambda x: x.detach().cpu().contiguous().numpy() if isinstance(x, Tensor) else x, value)


def packed_copy(value: Value) -> Value:
    """As `pack`, of a value that somebody else may write to later: nothing in it shares memory with the original."""

    def copied(leaf: Value) -> Value:
        if isinstance(leaf, Tensor):
            return leaf.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(copied, value)


def unpack(value: Value, device: torch.device | str = "cpu") -> Value:
    """The reverse, with copies: what comes out may be written, what lies in the object store may not."""
    return map_leaves(lambda x: torch.from_numpy(x.copy()).to(device) if isinstance(x, np.ndarray) else x, value)


def readonly_tensor(array: np.ndarray) -> Tensor:
    """A tensor over an array that may be read-only (memory-mapped or from the object store). Never write to it."""
    _hear_warning()
    return torch.from_numpy(array)


@cache
def _hear_warning() -> None:
    """PyTorch warns of read-only arrays once in a process: here. A filter around each call would cost 8 times the call."""
    array = np.empty(0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(array)


def num_bytes(value: Value) -> int:
    """Bytes of all arrays and tensors inside a value, and 8 for each bare number."""
    sizes: list[int] = []

    def measure(leaf: Value) -> None:
        sizes.append(leaf.nbytes if isinstance(leaf, np.ndarray | Tensor) else 8 * isinstance(leaf, int | float))

    map_leaves(measure, value)
    return sum(sizes)
