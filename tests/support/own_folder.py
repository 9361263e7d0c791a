"""A folder with a user's own network, method and reader, and the command in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

SOURCES = Path(__file__).parents[2]

MY_NET = """
from torch import nn


def net(num_classes, input_shape, *, width: int = 16):
    height, breadth, channels = input_shape
    body = nn.Sequential(nn.Flatten(), nn.Linear(height * breadth * channels, width), nn.ReLU())
    return nn.Sequential(body, nn.Linear(width, num_classes))
"""
MY_METHOD = """
from raysim.core.method import Method


def pull(*, mu=0.1):
    def grads(inner, client):
        return lambda params, batch: inner(params, batch).add_(params - client.start, alpha=mu)

    return Method("pull", grads=grads)
"""
MY_DATA = """
import numpy as np
import torch


def read(files, *, invert: bool = False):
    images, labels = np.load(files / "scans.npy"), np.load(files / "grades.npy")
    return (255 - images if invert else images), labels


def noise(images, generator, strength: float = 0.1):
    return (images + strength * torch.rand(images.shape, generator=generator)).clamp(0, 1)


def split(labels, num_clients, rng):
    return np.array_split(rng.permutation(len(labels)), num_clients)


def share(labels, logits):
    return (logits.argmax(1) == labels).mean()
"""
SETTINGS = {
    "name": "own",
    "rounds": 2,
    "methods": [{"my_method:pull": {"mu": 0.2}}],
    "data": {
        "name": "mine",
        "reader": {"my_data:read": {"invert": True}},
        "files": "scans",
        "augment": {"my_data:noise": {"strength": 0.2}},
    },
    "partition": {"scheme": "my_data:split", "num_clients": 4},
    "model": {"name": "my_net:net", "width": 8},
    "local": {"lr": 0.1, "steps": 2},
    "evaluation": {"metrics": ["my_data:share"]},
    "resources": {"backend": "serial"},
}


def write_files(folder: Path, **others: str) -> Path:
    """The user's folder: modules, scans and own.yaml."""
    for name, text in {"my_net": MY_NET, "my_method": MY_METHOD, "my_data": MY_DATA, **others}.items():
        (folder / f"{name}.py").write_text(text)
    rng = np.random.default_rng(0)
    (folder / "scans").mkdir()
    np.save(folder / "scans" / "scans.npy", rng.integers(0, 256, (200, 8, 8), np.uint8))
    np.save(folder / "scans" / "grades.npy", np.arange(200) % 4)
    (folder / "own.yaml").write_text(yaml.safe_dump(SETTINGS))
    return folder


def command(folder: Path, *words: str, script: bool = True) -> subprocess.CompletedProcess[str]:
    """`raysim WORDS` as the installed script starts it, whose first folder of modules is not the current one."""
    start = (
        ["-c", "import sys; sys.path.remove(''); from raysim.cli.main import main; main()"]
        if script
        else ["-m", "raysim"]
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *start, *words], cwd=folder, env=environment, capture_output=True, text=True)


def summary(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / "runs" / name / "summary.json").read_text())
