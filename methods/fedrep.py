"""FedRep and FedBABU: the classifier and the body are trained apart."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from methods.fine_tune import fine_tune
from methods.personal import personal
from raysim.core.method import Batch, ClientView, GradFn, Method, require


def fedrep(*, head_steps: int = 10) -> Method:
    """Train a personal classifier first, with the body fixed, then the shared body, with the classifier fixed.

    Collins, Hassani, Mokhtari and Shakkottai 2021, "Exploiting Shared Representations for Personalized Federated Learning"
    (ICML), Algorithm 1. The classifier stays at the client, as with `personal: {layers: head}`. The fixed part has gradient 0:
    momentum that it had gathered and weight decay still move it.

    Args:
      head_steps: local steps of the classifier, >= 1; the steps that are left are the body's.
    Raises:
      ValueError: head_steps < 1.
    """
    require("fedrep: head_steps", head_steps, head_steps >= 1, ">= 1", "10 local epochs of steps are the paper's")

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        num_done, head = 0, _head_mask(client)

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            nonlocal num_done
            num_done += 1
            return inner(params, batch).mul_(head if num_done <= head_steps else 1 - head)

        return gradient

    return Method(
        "fedrep", partition=personal(layers="head").partition, grads=grads, needs=frozenset({"client-memory"})
    )


def fedbabu(*, steps: int = 10, lr: float | None = None) -> Method:
    """Train the body alone, below a classifier that stays at its initial values; fine-tune all of it for each client.

    Oh, Kim and Yun 2022, "FedBABU: Toward Enhanced Representation for Federated Image Classification" (ICLR). The client's own
    model is the global model after some steps on the client's examples, which move the classifier as well. The classifier has
    gradient 0 in training: weight decay still moves it.

    Args:
      steps: local steps of fine-tuning, >= 1.
      lr: learning rate of fine-tuning, > 0; null: the client learning rate of the round.
    Raises:
      ValueError: steps < 1, or lr <= 0.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        body = 1 - _head_mask(client)
        return lambda params, batch: inner(params, batch).mul_(body)

    return replace(fine_tune(steps=steps, lr=lr), name="fedbabu", grads=grads)


def _head_mask(client: ClientView) -> Tensor:
    """Return [num_params], 1 in the classifier and 0 elsewhere."""
    mask = client.start.new_zeros(len(client.start))
    for leaf in client.layout.params:
        if leaf.is_head:
            client.layout.view(mask, leaf).fill_(1)
    return mask
