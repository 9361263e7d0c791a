"""What all of them share: the arrays of a job folder, and the lines that the bench waits for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

torch.set_num_threads(1)


class Job:
    """A federation: clients' images (n, channels, height, width) float32 in [0, 1], test set, cohorts, initial module."""

    def __init__(self, folder: str | None = None):
        self.folder = Path(folder or sys.argv[1])
        facts = json.loads((self.folder / "job.json").read_text())
        self.rounds, self.lr, self.epochs, self.batch_size = (
            facts[name] for name in ("rounds", "lr", "epochs", "batch_size")
        )
        self.cohorts = np.load(self.folder / "cohorts.npy").tolist()
        self.starts = np.load(self.folder / "starts.npy").tolist()
        self._train = self._set("train")
        self.test = self._set("test")

    def _set(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (np.load(self.folder / f"{name}_{what}.npy") for what in ("images", "labels"))
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float().div_(255), torch.from_numpy(labels)

    @property
    def num_clients(self) -> int:
        return len(self.starts) - 1

    def client(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(self.starts[client], self.starts[client + 1])
        return self._train[0][rows], self._train[1][rows]

    def model(self) -> torch.nn.Module:
        return torch.load(self.folder / "model.pt", weights_only=False)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        """On the test set, in batches of 256."""
        model.eval()
        batches = zip(*(part.split(256) for part in self.test), strict=True)
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / len(self.test[1])

    def begun(self) -> None:
        print(f"running {self.rounds} rounds", flush=True)

    def over(self, number: int, accuracy: float) -> None:
        """Say that a round, counted from 1, is over."""
        print(f"round {number}/{self.rounds}  accuracy {accuracy:.4f}", flush=True)


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, job: Job) -> None:
    """Local epochs of plain SGD, for the tools that leave them to their users."""
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    model.train()
    for _ in range(job.epochs):
        for index in torch.randperm(len(y)).split(job.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
