"""What somebody may write as a logger, a metric, a model or an augmentation, each hostile in its way."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch import Tensor, nn

#: Built-ins and functions of libraries, which are none of these.
BUILT_IN = ("builtins:print", "builtins:dict", "builtins:object", "builtins:len", "os:getcwd", "time:sleep", "sys:exit")


def leave(*_: object) -> NoReturn:
    sys.exit(3)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def fail(*_: object) -> NoReturn:
    raise ValueError("a fault of its own")


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


ACTS: dict[str, Callable[[Path], object]] = {"leave": leave, "interrupt": interrupt, "fail": fail, "delete": delete}


class Logger:
    """Does what it should not at one moment."""

    def __init__(self, where: str, act: str):
        self.where, self.act, self.folder, self.rounds = where, act, Path(), [0]

    def _at(self, where: str) -> None:
        if where == self.where:
            ACTS[self.act](self.folder)

    def start(self, folder: Path, config: object) -> None:
        self.folder = folder
        self._at("start")

    def round(self, record: object) -> None:
        self._at("round")

    def end(self, summary: object) -> None:
        self._at("end")


def logger(*, where: str = "none", act: str = "leave") -> Logger:
    if where == "made":
        ACTS[act](Path("/nonexistent"))
    return Logger(where, act)


def metric(labels: np.ndarray, logits: np.ndarray) -> float:
    """The accuracy, and then it writes into what the other metrics get, too."""
    value = float((logits.argmax(1) == labels).mean())
    logits[:] = logits[:, ::-1]
    return value


def plain_metric(labels: np.ndarray, logits: np.ndarray) -> float:
    """The sum of squares: any change of the logits shows."""
    return float((np.asarray(logits, np.float64) ** 2 @ np.arange(logits.shape[1])).mean())


def augment(images: Tensor, *, factor: float = 1.0) -> Tensor:
    return images * factor


class Net(nn.Module):
    def __init__(self, inputs: int, classes: int, factor: float):
        super().__init__()
        self.fc, self.factor = nn.Linear(inputs, classes), factor

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1)) * self.factor
        return logits


def net(num_classes: int, input_shape: tuple[int, int, int], *, factor: float = 1.0) -> nn.Module:
    return Net(int(np.prod(input_shape)), num_classes, factor)


def on_round(act: str) -> Any:
    """An `on_round` of Python, good or bad."""
    wrong: dict[str, Any] = {
        "word": lambda record: "halt",
        "true": lambda record: True,
        "array": lambda record: np.zeros(2),
        "leave": leave,
        "number": 3,
        "text": "stop",
        "stop": lambda record: "stop",
        "none": lambda: None,
        "two": lambda record, other: None,
    }
    return wrong[act]
