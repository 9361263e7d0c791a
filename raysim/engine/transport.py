"""What crosses between server and trainers: plain NumPy arrays in plain containers, the same with and without Ray."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.weights import RightMap


def pack(value: Any) -> Any:
    """Tensors inside nested dicts, lists and tuples become NumPy arrays (which Ray stores without copying)."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().numpy()
    if isinstance(value, RightMap):
        return RightMap(pack(value.maps))
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(pack(item) for item in value)
    return value


def unpack(value: Any) -> Any:
    """The reverse, with copies: what comes out may be written, what lies in the object store may not."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, RightMap):
        return RightMap(unpack(value.maps))
    if isinstance(value, dict):
        return {key: unpack(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(unpack(item) for item in value)
    return value


def readonly_tensor(array: np.ndarray) -> Tensor:
    """A tensor over an array that may be read-only (memory-mapped or from the object store). Never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def num_bytes(value: Any) -> int:
    """Bytes of all arrays and tensors inside a value, and 8 for each bare number."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(num_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(num_bytes(item) for item in value)
    return 8 if isinstance(value, int | float) else 0
