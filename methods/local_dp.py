"""Local differential privacy: each client clips its own update and adds noise before sending it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from methods.dp import Delta, Noise, private_init, require_accounting
from raysim.core.method import ClientView, Method, Positive, ServerView, State, Update

#: Methods whose reports depend on the sent update and on the server's validation data alone.
POST_PROCESSING = frozenset({"fedvg", "fedvg_loss", "fedvg_cosine"})


def local_dp(*, clip: Positive = 1.0, noise: Noise = 1.0, delta: Delta = 1e-5) -> Method:
    """Clip each update and add Gaussian noise at the client, so that even the server learns little about the examples.

    The Gaussian mechanism (Dwork and Roth 2014, appendix A) at the client, with clip S and noise z. Client k sends
        min(1, S / ||u_k||) u_k + N(0, (z S)^2 I)
    Any two data sets of a client are neighbours: the sent vector moves by at most 2 S. `local_dp/epsilon` is the
    largest epsilon of a client of the round, which grows with the n rounds in which the client took part: exactly that
    of one Gaussian mechanism with noise z / (2 sqrt(n)) (Balle and Wang 2018, arXiv:1805.06530; dp-accounting, the
    extra `privacy`). Everything that the server computes from the sent vectors is post-processing: `fedvg`, robust
    rules without a report (`krum`) and compression may be listed after local_dp. The numbers of examples are public, as
    are the records of a simulation. The norm is over all shared parameters.

    Args:
      clip: S, largest L2 norm of an update before the noise, > 0.
      noise: z, standard deviation of the noise in each entry as a multiple of the clip, >= 0; with 0 epsilon is infinite.
      delta: delta of (epsilon, delta)-privacy, in (0, 1).
    Raises:
      ValueError: when the run is checked, shared buffers or no dp-accounting.
    """

    def outgoing(update: Update, client: ClientView) -> Update:
        client.memory["num_rounds"] = client.memory.get("num_rounds", 0) + 1
        values = client.layout.zero_personal_(update.values.clone())
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        draws = torch.randn(len(values), generator=client.generator).to(values.device)
        sent = values * (clip / norm).clamp(max=1.0).float() + client.layout.zero_personal_(draws * (noise * clip))
        return update._replace(values=sent)

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if len(server.clients):
            of_one = noise / (2 * math.sqrt(int(server.report["num_rounds"].max())))
            server.log("epsilon", require_accounting().get_epsilon_gaussian(of_one, delta) if noise else math.inf)
        return update, state

    return Method(
        "local_dp",
        init=private_init("local_dp"),
        outgoing=outgoing,
        report=lambda client: {"num_rounds": client.memory.get("num_rounds", 0)},
        server_update=server_update,
        excludes={"report": "clients' reports would reach the server without noise"},
        trusts=POST_PROCESSING,
        needs=frozenset({"client-memory"}),
    )
