"""Results of a trained client: vectors, which stay in the process; small reports; client memory; or an error."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from raysim.base.errors import ClientError, MethodError, OutOfMemory, UserCodeError
from raysim.base.texts import round_name
from raysim.base.user_places import place_in
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Update, Value, Vector
from raysim.engine.messages import Packed, packed_copy
from raysim.engine.schedule import Phase
from raysim.training.model import BoundModel


class RoundVectors:
    """Vectors of a round's clients: name of a vector -> client -> row.

    The vector "update" has num_state entries; "method/name" is a reported `Vector` with num_params entries. Rows are
    reused in the next round, so that clients write to allocated memory pages; rows that the next round does not use
    are freed after it.
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
        """Return the row of each client, on the CPU; valid until the next round begins."""
        rows = self._rows[name]
        return [rows[client] for client in clients]

    def write(self, name: str, client: int, value: Tensor, minus: Tensor | None = None) -> np.ndarray:
        """Store a client's value, or value - minus.

        Args:
          value, minus: [num_state] or [num_params], on any device.
        Returns:
          (1, leaves) float64: largest absolute entry of each leaf.
        """
        rows, spare = self._rows.setdefault(name, {}), self._spare.get(name)
        if client not in rows:  # a client of a repeated task has a row already
            rows[client] = spare.pop() if spare else torch.empty(len(value))
        row = rows[client]
        if value.device.type != "cpu":  # the peaks are computed on the device; one copy to the CPU
            value = value.float() if minus is None else value - minus
            row.copy_(value)
        else:
            row.copy_(value) if minus is None else torch.sub(value, minus, out=row)
            value = row
        return self._layout.norms(value, math.inf).numpy()[None]


#: Key of the engine in client memory, for personal leaves (trained but not shared).
ENGINE = "raysim"


def take_update(
    phase: Phase, views: Mapping[str, ClientView], vectors: RoundVectors, client: int, model: BoundModel, start: Tensor
) -> tuple[np.ndarray, int, Tensor]:
    """Store a client's update; return (peaks, bytes, state [num_state] after the local steps).

    The model's state is set to `start` plus the update as sent, for example after compression.

    Args:
      start: [num_state], the client's starting point.
    """
    layout, is_encoded = model.layout, any(method.outgoing for method in phase.methods)
    # A non-finite update is not encoded, so that it is detected: encoding by signs, for example, would hide it.
    if not is_encoded or not bool(torch.isfinite(model.state).all()):
        return vectors.write("update", client, model.state, start), layout.shared_bytes, model.state
    size, whole = layout.num_params, model.state - start
    shared = 4 * sum(leaf.size for leaf in layout.shared if not leaf.is_buffer)
    sent = phase.stack.outgoing(Update(whole[:size].clone(), shared), views)
    trained = model.state.clone()
    for view in views.values():
        view.trained_state = trained
    for leaf in layout.params:
        if leaf.is_shared:  # personal leaves are not sent, and keep their values
            whole[leaf.offset : leaf.end] = sent.values[leaf.offset : leaf.end]
    model.state.copy_(start + whole)
    return vectors.write("update", client, whole), sent.num_bytes + layout.shared_bytes - shared, trained


def take_reports(
    phase: Phase, views: Mapping[str, ClientView], vectors: RoundVectors, client: int, layout: Layout
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return (method name -> small reports, (1, ...); vector name -> peaks). Vectors are stored in `vectors`.

    All reports are copies: a hook may return a view of the model, which the next client overwrites.
    """
    small: dict[str, dict[str, np.ndarray]] = {}
    peaks: dict[str, np.ndarray] = {}
    for method, reported in phase.stack.report(views).items():
        small[method] = {}
        for name, value in reported.items():
            if not isinstance(value, Vector):
                small[method][name] = np.asarray(packed_copy(value))[None]
                continue
            if value.value.shape != (layout.num_params,):
                what = f"Vector {name!r} has shape {tuple(value.value.shape)}"
                raise MethodError(what, f"report of {method}", "a Vector is [num_params]")
            key = f"{method}/{name}"
            peaks[key] = vectors.write(key, client, value.value.detach())
    return small, peaks


def take_memory(phase: Phase, views: Mapping[str, ClientView], layout: Layout, state: Tensor) -> Packed:
    """Return a client's packed memory; None if nothing is kept.

    Args:
      state: [num_state], holds the client's personal leaves.
    """
    memory: dict[str, Value] = {}
    for method in phase.methods:
        kept = views[method.name].memory
        if kept and "client-memory" not in method.needs:
            raise MethodError(f"{method.name} wrote client memory", "its hooks", 'declare needs={"client-memory"}')
        if kept:
            memory[method.name] = kept
    if layout.personal:
        leaves = layout.views(state)
        memory[ENGINE] = {leaf.name: leaves[leaf.name] for leaf in layout.personal}
    return packed_copy(memory) if memory else None


@contextmanager
def named_errors(client: int, block: int, round_index: int) -> Iterator[None]:
    """Turn an error of a client into an error that names the client.

    Lack of device memory becomes OutOfMemory, which the pool retries: another trainer may have more memory. All other
    errors become ClientError: a retry would fail again.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"no memory left on the device for client {client} ({error})",
            round_name(round_index),
            "lower local.batch_size, or take a smaller model or a larger device",
        ) from error
    except Exception as error:
        cause = str(error)  # a UserCodeError names its place itself
        if not isinstance(error, UserCodeError):
            cause = f"{type(error).__name__}: {error} in {place_in(error) or _innermost(error)}"
        fault = ClientError(client, round_index, block, f"worker {os.getpid()}", cause)
        fault.add_note(traceback.format_exc())  # notes, unlike tracebacks, are pickled with the error
        raise fault from error


def _innermost(error: BaseException) -> str:
    """Return the place where an error was raised, in the form of `place_in`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
