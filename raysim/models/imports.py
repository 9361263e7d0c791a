"""Libraries that are imported when the first of their models is built."""

from __future__ import annotations

import torch


def importing() -> torch.device:
    """`with importing(): import timm`: the import sees the CPU as default device, whatever the caller's is.

    Models are tried on the meta device. The compiler of PyTorch 2.6, which timm and torchvision import, reads tensors when it
    is imported, and on the meta device none can be read.
    """
    return torch.device("cpu")
