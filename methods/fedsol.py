"""FedSOL: local gradients are taken where the distillation loss to the global model has been perturbed."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import Amount, Batch, ClientView, GradFn, LossFn, Method, Outputs, Positive

#: Shorter gradients of the proximal loss are rounding errors of float32.
FLOOR = 1e-6


def fedsol(*, rho: Amount = 1.0, form: Literal["fixed", "adaptive"] = "fixed", temperature: Positive = 3.0) -> Method:
    """The gradient of the loss at y + ε, where ε climbs the proximal loss at y.

    Lee et al. 2024 (CVPR) and their code, per batch, with u the gradient at y of KL(softmax(f_s / T) || softmax(f_y / T)):
        fixed:     ε = rho u / |u|
        adaptive:  ε_p = rho n(|y_p - s_p|) * u_p / |u| for each tensor p, n: every column along the first axis has
                   L2 norm 1
    and the step from y uses the gradient of the loss at y + ε. At the first step of a round y = s, and u is only
    rounding error. The released code scales this error to length rho, a random direction; raysim does not perturb if
    |u| is below 1e-6. The global model is in eval mode; in the released code it is in train mode for the first client
    of a run. A step takes two backward passes and one forward pass of the global model; BatchNorm's statistics follow
    the pass at y. Loss terms of methods listed before are taken at y + ε, of methods listed after at y.

    Args:
      rho: length of the perturbation, >= 0. The released configurations use 1.
      form: one of the two perturbations in the table above, both from the released code.
      temperature: T of the distillation, > 0.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        if rho == 0:
            return inner

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            reference = client.model.apply(client.start_state, batch.inputs)
            proximal = distillation(reference.logits, temperature)
            uphill = client.model.gradient(proximal, params, batch, moves_buffers=True)
            moved = perturbation(client.layout, uphill, params - client.start, rho=rho, form=form)
            return inner(params + moved, batch)  # a new point: the pass at y updated the statistics

        return gradient

    return Method("fedsol", grads=grads, needs=frozenset({"classes"}))


def distillation(reference: Tensor, temperature: float) -> LossFn:
    """KL(softmax(reference / T) || softmax(logits / T)), mean over the batch; reference: (B, classes)."""
    target = (reference / temperature).log_softmax(dim=1)

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        logs = (outputs.logits / temperature).log_softmax(dim=1)
        return F.kl_div(logs, target, reduction="batchmean", log_target=True)

    return loss


def perturbation(layout: Layout, uphill: Tensor, moved: Tensor, *, rho: float, form: str) -> Tensor:
    """ε of FedSOL, [num_params]; zeros where the gradient is shorter than FLOOR.

    Args:
      uphill: [num_params], u.
      moved: [num_params], y - s.
    """
    size: Tensor = torch.linalg.vector_norm(uphill)
    length = torch.where(size >= FLOOR, rho / size, 0.0)  # not an `if`, which would wait for the device
    if form == "fixed":
        return uphill * length
    step = torch.zeros_like(uphill)
    for leaf in layout.params:
        scale = F.normalize(layout.view(moved, leaf).abs(), dim=0)
        layout.view(step, leaf).copy_(layout.view(uphill, leaf) * scale * length)
    return step
