"""Differentially private local steps: gradients clipped example by example, and noise on their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from methods import local_dp
from methods.dp import Delta, Noise, epsilon_after, private_init, spending
from raysim.core.method import Batch, ClientView, GradFn, Method, Positive, ServerView, State

#: Methods that may be combined with dp_sgd: losses are means over examples; gradients and reports use examples only through
#: the noised steps.
SAFE = local_dp.POST_PROCESSING | frozenset(
    ["fedprox", "fedacg", "feddyn", "scaffold", "fedrs", "fedlc", "norm_bounding", "clipped_clustering", "sign_guard"]
)

#: Integer orders of Renyi divergences: a sixth of the time of fractional orders, and an epsilon some 2 % higher.
ORDERS = (*range(2, 64), 72, 80, 96, 128, 192, 256, 384, 512)


def dp_sgd(*, clip: Positive = 1.0, noise: Noise = 1.0, delta: Delta = 1e-5) -> Method:
    """Clip the gradient of each example and add Gaussian noise to the sum over a batch, to protect single examples.

    Abadi et al. 2016 (arXiv:1607.00133), algorithm 1, in each local step, with the clip S, the noise z and B examples:
        g = (1/B) (sum_i min(1, S / ||g_i||) g_i + N(0, (z S)^2 I))
    Neighbours are two data sets of a client, one with one example more than the other. `dp_sgd/epsilon` is the largest
    epsilon of a client of the round for all its local steps so far, by Renyi divergences of Poisson-sampled batches of the
    share B / n_k (dp-accounting, the extra `privacy`). As in most implementations, batches are slices of a random
    order, for which this epsilon is an approximation (Chua et al. 2024, arXiv:2403.17673, measure the gap). Everything
    computed from the noised steps is post-processing: robust rules, compression, server steps and `fedvg` may run
    beside dp_sgd. The numbers of examples are public, as are the records of a simulation.

    A local step computes B gradients one after the other. `train/loss` is the loss of the last example of each batch.
    Refused together with dp_sgd: methods that read the examples in another way, losses that are not a mean over examples, and
    BatchNorm.

    Args:
      clip: S, largest L2 norm of an example's gradient, > 0.
      noise: z, standard deviation of the noise in each entry of the sum as a multiple of the clip, >= 0; with 0 epsilon is
        infinite.
      delta: delta of (epsilon, delta)-privacy, in (0, 1), chosen below 1 / n_k.
    Raises:
      ValueError: when the run is checked, shared buffers or no dp-accounting.
    """

    def grads(gradient: GradFn, client: ClientView) -> GradFn:
        def noised(params: Tensor, batch: Batch) -> Tensor:
            total = torch.zeros_like(params)
            for row in range(len(batch.targets)):
                of_one = gradient(params, Batch(batch.inputs[row : row + 1], batch.targets[row : row + 1]))
                total += of_one * (clip / torch.linalg.vector_norm(of_one)).clamp(max=1.0)
            draws = torch.randn(len(total), generator=client.generator).to(total.device)
            return total.add_(draws, alpha=noise * clip).div_(len(batch.targets))

        return noised

    def report(client: ClientView) -> dict[str, float]:
        client.memory["num_steps"] = client.memory.get("num_steps", 0) + client.num_steps
        share = min(1.0, client.batch_size / max(1, client.num_examples))
        return {"num_steps": client.memory["num_steps"], "share": share}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        spent = zip(server.report["share"].tolist(), server.report["num_steps"].tolist(), strict=True)
        server.log("epsilon", max((epsilon_of(noise, share, int(steps), delta) for share, steps in spent), default=0.0))
        return update, state

    return Method(
        "dp_sgd",
        init=private_init("dp_sgd"),
        grads=grads,
        report=report,
        server_update=server_update,
        excludes={
            "loss": "its loss would see one example at a time",
            "grads": "its gradients would have no noise",
            "report": "clients' reports would reach the server without noise",
        },
        trusts=SAFE,
        needs=frozenset({"client-memory"}),
    )


def epsilon_of(noise: float, share: float, num_steps: int, delta: float) -> float:
    """Return a client's epsilon after `num_steps` local steps. share: a batch's share of the client's examples."""
    return epsilon_after(num_steps, spending(noise, share, 1, "poisson", ORDERS), delta) if num_steps else 0.0
