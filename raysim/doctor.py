"""What `raysim doctor` looks at."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("ray", "torch", "torchvision", "timm", "peft", "medmnist", "shap", "scikit-learn", "pyarrow", "tensorboard")


def findings() -> Iterator[tuple[bool, str]]:
    """(whether it is well, a line) for each thing looked at."""
    yield (3, 11) <= sys.version_info[:2] <= (3, 13), f"Python {sys.version.split()[0]} (3.11 to 3.13)"
    for name in PACKAGES:
        try:
            yield True, f"{name} {version(name)}"
        except PackageNotFoundError:
            yield False, f"{name} is not installed: pip install -c constraints.txt -e ."
    try:
        import torchvision

        boxes = torchvision.ops.nms  # fails to resolve where torch and torchvision do not fit each other
        yield boxes is not None, "torch and torchvision fit each other"
    except (ImportError, RuntimeError, AttributeError) as error:
        yield False, f"torch and torchvision do not fit each other ({error}): use the versions of constraints.txt"
    import psutil
    import torch

    memory = psutil.virtual_memory()
    yield (
        True,
        f"{os.cpu_count()} CPUs, {memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB of memory free",
    )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield True, f"GPUs: {', '.join(names) if names else 'none, trainers use CPUs'}"
    for place in (".", "/dev/shm", "/tmp"):
        if os.path.isdir(place):
            free = shutil.disk_usage(place).free / 2**30
            yield (
                free > 2,
                f"{free:.0f} GiB free in {place}" + ("" if free > 2 else ": Ray and the runs need 2 GiB or more"),
            )
