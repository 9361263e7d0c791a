"""FedRep and FedBABU: the classifier and the body are trained apart."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from methods.fine_tune import fine_tune
from methods.personal import personal
from raysim.core.method import ClientView, Count, GradFn, Method, Positive


def fedrep(*, head_epochs: Positive = 10.0) -> Method:
    """Train a personal classifier first, with the body fixed, then the shared body, with the classifier fixed.

    Collins, Hassani, Mokhtari and Shakkottai 2021, "Exploiting Shared Representations for Personalized Federated Learning"
    (ICML), Algorithm 1. The classifier stays at the client, as with `personal: {layers: head}`. Its steps come before the local
    steps of the run, which train the body; in these the classifier has gradient 0, and weight decay alone moves it.

    Args:
      head_epochs: local epochs of the classifier, > 0; the paper takes 10, and 1 epoch of the body.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        head = _head_mask(client)
        trained = client.train(client.state, grads=lambda gradient: _masked(gradient, head), epochs=head_epochs)
        client.params.copy_(torch.where(head > 0, trained[: len(head)], client.params))
        return _masked(inner, 1 - head)

    return Method(
        "fedrep", partition=personal(layers="head").partition, grads=grads, needs=frozenset({"client-memory"})
    )


def fedbabu(*, steps: Count = 10, lr: Positive | None = None) -> Method:
    """Train the body below a fixed initial classifier, and fine-tune the whole network for each client.

    Oh, Kim and Yun 2022, "FedBABU: Toward Enhanced Representation for Federated Image Classification" (ICLR). The client's own
    model is the global model after some steps on the client's examples, which move the classifier as well. The classifier has
    gradient 0 in training: weight decay still moves it.

    Args:
      steps: local steps of fine-tuning, >= 1.
      lr: learning rate of fine-tuning, > 0; null: the client learning rate of the round.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        return _masked(inner, 1 - _head_mask(client))

    return replace(fine_tune(steps=steps, lr=lr), name="fedbabu", grads=grads)


def _masked(gradient: GradFn, mask: Tensor) -> GradFn:
    """Return the gradient function times a mask, [num_params]."""
    return lambda params, batch: gradient(params, batch).mul_(mask)


def _head_mask(client: ClientView) -> Tensor:
    """Return [num_params], 1 in the classifier and 0 elsewhere."""
    mask = client.start.new_zeros(len(client.start))
    for leaf in client.layout.params:
        if leaf.is_head:
            client.layout.view(mask, leaf).fill_(1)
    return mask
