"""The contents of env.json: machine, resources and code version of a run."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from raysim.base import __version__
from raysim.base.settings import Settings

PACKAGES = ("ray", "torch", "torchvision", "timm", "peft", "numpy", "pyarrow", "scikit-learn")


def environment(resources: Mapping[str, object]) -> Settings:
    """Return the contents of env.json: versions, commit, checksum of sources, machine, and resources of the run."""
    return {
        "python": platform.python_version(),
        "packages": {"raysim": __version__, **{name: version(name) for name in PACKAGES}},
        "git_commit": git_commit(),
        "sources": sources(),
        "machine": {"cpus": os.cpu_count(), "gpus": gpu_names()},
        "resources": dict(resources),
    }


def gpu_names() -> list[str]:
    """Return names of the visible accelerators: GPUs of NVIDIA, AMD, Intel or Apple."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda _: str(device))
    return [name_of(index) for index in range(torch.accelerator.device_count())]


@cache
def sources() -> str:
    """Return SHA-256 of the code of raysim and its methods, since a checkout can change without a new version."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(file for folder in ("raysim", "methods") for file in (root / folder).rglob("*.py")):
        if "cluster" not in file.relative_to(root).parts:  # only an installed wheel has this folder here
            digest.update(file.read_bytes())
    return digest.hexdigest()


def git_commit() -> str | None:
    """Return the commit of the running code, with "+" for a changed tree; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # an installed package may be inside another project's repository
        return None
    command = ["git", "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    first, *others = status.stdout.splitlines()
    is_changed = any(not line.startswith("#") for line in others)
    return first.removeprefix("# branch.oid ") + ("+" if is_changed else "")
