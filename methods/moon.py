"""MOON: local features are pulled towards the global model's and pushed away from the client's previous model's."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from methods.univarfl import unit_rows
from raysim.core.method import Amount, Batch, ClientView, LossFn, Method, Outputs, Positive


def moon(*, mu: Amount = 1.0, temperature: Positive = 0.5, first: Literal["none", "random"] = "none") -> Method:
    """Adds mu times a model-contrastive loss to the loss.

    Li, He, Song 2021 (CVPR), with z, z_g, z_p the features of one image under the current, the broadcast and
    the client's previous model:
        l = -log( e^(cos(z, z_g)/T) / (e^(cos(z, z_g)/T) + e^(cos(z, z_p)/T)) ),   loss = inner + mu mean l
    Features are the classifier's input: the output of the projection head, if the model has one, else the pooled
    features. The two reference models are in eval mode, each with its own BatchNorm statistics. The previous model is
    the one of the client's last round, however old; the paper does not say what it is in a client's first round.
    Features of a sequence count as one vector, position after position.

    Args:
      mu: strength of the contrastive loss, >= 0. The paper uses 5 on CIFAR-10 and 1 on CIFAR-100; UniVarFL 1, FLFA 0.1.
      temperature: T of the contrastive loss, > 0.
      first: previous model of a client that has never trained. "none": no contrastive term; "random" (the authors'
        code): no term in the first round of the run, in later rounds a randomly initialised network, drawn for the client.
    """

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        previous = client.memory.get("previous") if mu else None
        if mu and previous is None and first == "random" and client.round_index > 0:
            previous = client.initial_state()
        if previous is None:
            return inner

        def value(outputs: Outputs, batch: Batch) -> Tensor:
            towards, away = (client.model.apply(point, batch.inputs) for point in (client.start_state, previous))
            contrast = contrastive(_of(outputs), _of(towards), _of(away), temperature=temperature)
            return inner(outputs, batch) + mu * contrast

        return value

    def report(client: ClientView) -> dict[str, Tensor]:
        if mu > 0 and client.num_steps > 0:
            client.memory["previous"] = client.trained.clone()
        return {}

    return Method("moon", loss=loss, report=report, needs=frozenset({"features", "client-memory"}))


def contrastive(features: Tensor, towards: Tensor, away: Tensor, *, temperature: float) -> Tensor:
    """Mean over a batch of MOON's contrastive loss; all features (n, width). Scalar, ln 2 where both pulls are equal."""
    unit, near, far = (unit_rows(z.float().flatten(1)) for z in (features, towards, away))
    cosines = torch.stack([(unit * near).sum(dim=1), (unit * far).sum(dim=1)], dim=1)
    return F.cross_entropy(cosines / temperature, torch.zeros(len(unit), dtype=torch.int64, device=unit.device))


def _of(outputs: Outputs) -> Tensor:
    assert outputs.features is not None  # the method needs "features"
    return outputs.features
