"""Keep every client's adapters, for studies after the run."""

from __future__ import annotations

from torch import Tensor

from methods.livar.merging import factors_of
from raysim.core.method import Method, ServerView, State


def keep_factors() -> Method:
    """Logs each client's A and B after training, and its numbers of examples and steps; changes nothing.

    In arrays/round_*.npz, K clients in ascending order: `keep_factors.LAYER.a` (K, rank, d_in), `keep_factors.LAYER.b`
    (K, d_out, rank), float32; `keep_factors.num_examples` and `.num_steps` (K,). `raysim calibrate` reads these arrays.
    Cost: the server fetches every client's adapters, K times the broadcast, and the run stores all of them.
    """

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        for pair, a, b in factors_of(server):
            server.log(f"{pair.layer}.a", a.float())
            server.log(f"{pair.layer}.b", b.float())
        server.log("num_examples", server.num_examples)
        server.log("num_steps", server.num_steps)
        return update, state

    return Method("keep_factors", server_update=server_update, needs=frozenset({"lora", "lora-factors"}))
