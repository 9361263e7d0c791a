"""What a trained client leaves behind: reports, vectors beside the update, memory; and sums and maps over vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.errors import MethodError
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Vector
from raysim.engine.messages import FoldRequest, MapRequest, Packed, Share, Vectors
from raysim.engine.plan import Phase
from raysim.engine.transport import pack, readonly_tensor, unpack
from raysim.training.aggregate import fold

#: The engine's own namespace in client memory: personal (trained but not shared) leaves.
ENGINE = "raysim"


def take_update(row: np.ndarray, state: Tensor, start: Tensor, layout: Layout) -> np.ndarray:
    """Write state - start into a row; (leaves,) float64, its peaks.

    Args:
      row: (num_state,), written; state, start: [num_state], on the device.
    """
    update = torch.from_numpy(row)
    if state.device.type == "cpu":
        torch.sub(state, start, out=update)
    else:
        update.copy_(torch.sub(state, start))
    return layout.norms(update, math.inf).numpy()


def take_reports(
    phase: Phase, views: Mapping[str, ClientView], vectors: Vectors, row: int, layout: Layout
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """(method name -> what it reports in small, vector name -> peaks); Vectors go to a row of `vectors`."""
    small: dict[str, dict[str, np.ndarray]] = {}
    peaks: dict[str, np.ndarray] = {}
    for method, reported in phase.stack.report(views).items():
        small[method] = {}
        for name, value in reported.items():
            if not isinstance(value, Vector):
                small[method][name] = np.asarray(pack(value))
                continue
            if value.value.shape != (layout.num_params,):
                raise MethodError(
                    f"Vector {name!r} has shape {tuple(value.value.shape)}",
                    f"report of {method}",
                    "a Vector is [num_params]",
                )
            key, count = f"{method}/{name}", len(vectors["update"])
            target = vectors.setdefault(key, np.empty((count, layout.num_params), np.float32))
            target[row] = value.value.detach().cpu().numpy()
            peaks[key] = layout.norms(torch.from_numpy(target[row]), math.inf).numpy()
    return small, peaks


def take_memory(phase: Phase, views: Mapping[str, ClientView], layout: Layout, state: Tensor) -> Packed:
    """What a client keeps: packed; None where nothing is kept.

    Args:
      state: [num_state], where its personal leaves are.
    """
    memory: dict[str, Any] = {}
    for method in phase.methods:
        kept = views[method.name].memory
        if kept and "client-memory" not in method.needs:
            raise MethodError(f"{method.name} wrote client memory", "its hooks", 'declare needs={"client-memory"}')
        if kept:
            memory[method.name] = kept
    if layout.personal:
        leaves = layout.views(state)
        memory[ENGINE] = {leaf.name: leaves[leaf.name].clone() for leaf in layout.personal}
    return pack(memory) if memory else None


def fold_vectors(layout: Layout, request: FoldRequest, shares: Sequence[Share], tasks: Sequence[Vectors]) -> np.ndarray:
    """(size,) float64: partial exact sum of a vector over some clients of some tasks."""
    total: Tensor | None = None
    grid = torch.from_numpy(request.constants.copy())
    for share, vectors in zip(shares, tasks, strict=True):
        total = fold(layout, _rows(vectors[request.vector], share.rows), unpack(share.weights), grid, total)
    assert total is not None
    return total.numpy()


def map_updates(layout: Layout, request: MapRequest, shares: Sequence[Share], tasks: Sequence[Vectors]) -> list[Packed]:
    """function(update [num_params], shared) for every one of some clients of some tasks."""
    shared, size = unpack(request.shared), layout.num_params
    pairs = zip(tasks, shares, strict=True)
    updates = [update for vectors, share in pairs for update in _rows(vectors["update"], share.rows)]
    # A copy: a function that writes to its argument would otherwise crash on the store's read-only memory.
    return [pack(request.function(update[:size].clone(), shared)) for update in updates]


def _rows(array: np.ndarray, rows: np.ndarray) -> Tensor:
    tensor = readonly_tensor(array)
    return tensor if len(rows) == len(array) else tensor[torch.from_numpy(rows.copy())]
