"""The vectors of a round's clients, in the memory of the trainer that made them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from raysim.core.layout import Layout


class RoundVectors:
    """What the clients of one round left: name of a vector -> client -> its row.

    "update" has num_state entries, "method/name", a reported `Vector`, num_params. Rows are taken over from round to
    round, so that clients write to pages that are there already; what a round did not need is given up after it.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._spare: dict[str, list[Tensor]] = {}

    def begin_round(self) -> None:
        """Forget the clients of the last round."""
        self._spare = {name: list(rows.values()) for name, rows in self._rows.items()}
        self._rows = {}

    def of(self, name: str, clients: Iterable[int]) -> list[Tensor]:
        """The row of each client, on the CPU; valid until the next round begins."""
        rows = self._rows[name]
        return [rows[client] for client in clients]

    def write(self, name: str, client: int, value: Tensor, minus: Tensor | None = None) -> np.ndarray:
        """Keep a client's value, or value - minus.

        Args:
          value, minus: [num_state] or [num_params], on any device.
        Returns:
          (1, leaves) float64: largest absolute entry of each leaf.
        """
        row = self._row(name, client, len(value))
        if value.device.type != "cpu":  # measured there, and copied once
            value = value.float() if minus is None else value - minus
            row.copy_(value)
        else:
            row.copy_(value) if minus is None else torch.sub(value, minus, out=row)
            value = row
        return self._layout.norms(value, math.inf).numpy()[None]

    def _row(self, name: str, client: int, size: int) -> Tensor:
        rows, spare = self._rows.setdefault(name, {}), self._spare.get(name)
        if client not in rows:  # else a task that is done once more
            rows[client] = spare.pop() if spare else torch.empty(size)
        return rows[client]
