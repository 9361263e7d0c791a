"""Fisher merging: every parameter is averaged with the clients' diagonal Fisher information."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from raysim.base.conditions import applies_with
from raysim.core.layout import Layout, Leaf
from raysim.core.method import Batch, ClientView, Count, Method, ServerView, State, Vector
from raysim.core.weights import RightMap, Weights, refuse_factors

#: Floats of per-example gradients that are held at once: 256 MiB.
GRADIENT_ENTRIES = 2**26
#: Smallest value of F_k. Where all clients have this value, the result is the weighted mean.
FLOOR = 1e-6
#: What fed-mammoth adds to every Fisher.
MAMMOTH_CONSTANT = 1e-12


def fisher(
    *, num_examples: Annotated[Count, applies_with("as_in", None)] = 4096, as_in: Literal["fed-mammoth"] | None = None
) -> Method:
    """w = sum_k a_k F_k y_k / sum_k a_k F_k, element by element, with a_k the aggregation weights given.

    Matena, Raffel 2022 (NeurIPS), eq. 3 and section 3.1. F_k is the mean over local examples of the squared gradient of
    log p(c|x) at the client's trained model, in eval mode, one example at a time. The square is an expectation over all
    classes c under the model's p(c|x), which costs a pass for each class. F_k is at least 1e-6. a_k is divided by the
    norm of F_k, so that well-fitted clients, whose Fishers are tiny, still count. The method reports two vectors of the
    size of the model, F_k and F_k * update_k, whose exact sums are divided. Buffers are averaged with the weights
    given.

    Args:
      num_examples: largest number of local examples from which F_k is computed; the first examples are used.
      as_in: "fed-mammoth", LIVAR's baseline: F_k is the sum over all examples (not the mean) of the squared gradient of
        log p(true label), times p(true label). 1e-12 is added to F_k, F_k is not normalised, and a_k is
        uniform. fed-mammoth takes the gradients at pixels that were not normalised, unlike the inputs of training;
        raysim takes the gradients at the inputs of training.
    Degenerate cases: clients of weight 0 have no effect; if all clients have weight 0, the model does not change.
    """
    is_mammoth = as_in == "fed-mammoth"

    def report(client: ClientView) -> dict[str, Vector | float]:
        total, count = fisher_sum(client, is_exact=not is_mammoth, num_examples=None if is_mammoth else num_examples)
        value = (total if is_mammoth else (total / count).clamp_min(FLOOR)).float()
        norm = float(value.double().norm())
        return {"fisher": Vector(value), "product": Vector(value * (client.params - client.start)), "norm": norm}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        weights: Weights = {}
        for leaf in server.layout.params:
            weight = server.weights.get(leaf.name)
            assert not isinstance(weight, RightMap)  # methods that give maps claim "merge"
            if weight is not None:
                refuse_factors(weight, leaf.name, "fisher divides by the weights that multiply the updates")
                norms = server.report["norm"].double().view((-1,) + (1,) * (weight.dim() - 1))
                weights[leaf.name] = weight if is_mammoth else weight / norms
        below = server.total("fisher", weights)
        above = server.total("product", weights)
        if is_mammoth:
            # Its 1e-12 is added here: inside the vectors it would fall below the grid of an exact sum with large Fishers.
            above = above + MAMMOTH_CONSTANT * update.double()
            for leaf in server.layout.params:
                if leaf.name in weights:
                    below[leaf.offset : leaf.end] += MAMMOTH_CONSTANT * _sum_of(weights[leaf.name], server.layout, leaf)
        return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0).float(), state

    return Method(
        "fisher",
        report=report,
        server_update=server_update,
        claims=frozenset({"merge"}),
        needs=frozenset({"classes"}),
        base_weights="uniform" if is_mammoth else "examples",
    )


def _sum_of(weight: Tensor | RightMap, layout: Layout, leaf: Leaf) -> Tensor:
    """[leaf.size]: the sum over clients of a leaf's weights, as the leaf lies in the vector."""
    assert isinstance(weight, Tensor)
    total = weight.sum(0)
    return layout.pack(leaf, total.view(total.shape + (1,) * (len(leaf.shape) - total.dim())).expand(leaf.shape))


def fisher_sum(client: ClientView, *, is_exact: bool, num_examples: int | None = None) -> tuple[Tensor, int]:
    """Sum over local examples of squared gradients of log p(c|x), and the number of examples.

      Args:
        is_exact: whether the sum is over all classes c, weighted by p(c|x), or over the true label alone, weighted by its
    probability.
      Returns:
        [num_params] float64.
    """
    total = torch.zeros(client.layout.num_params, dtype=torch.float64, device=client.params.device)
    count = 0
    gradients = per_example_gradients(client.model.module, client.layout, client.params)
    with _eval_mode(client.model.module):
        for batch in client.batches():
            batch = batch if num_examples is None else Batch(*(part[: num_examples - count] for part in batch))
            if not len(batch.targets):
                break
            count += len(batch.targets)
            probabilities = client.model.apply(client.params, batch.inputs).logits.softmax(1)
            classes = range(probabilities.shape[1]) if is_exact else ()
            for labels in [torch.full_like(batch.targets, c) for c in classes] or [batch.targets]:
                weights = probabilities.gather(1, labels[:, None])[:, 0]
                _add_squares(total, client.layout, gradients, Batch(batch.inputs, labels), weights)
    return total, count


def _add_squares(
    total: Tensor,
    layout: Layout,
    gradients: Callable[[Tensor, Tensor], dict[str, Tensor]],
    batch: Batch,
    weights: Tensor,
) -> None:
    step = max(1, GRADIENT_ENTRIES // max(1, layout.num_params))
    for start in range(0, len(weights), step):
        part = slice(start, start + step)
        for name, values in gradients(batch.inputs[part], batch.targets[part]).items():
            leaf = layout.by_name[name]
            # In float32, since the Fisher is sent as such; in float64 these two passes took more time than the gradients.
            # Not in place: gradients may share memory, as those of a ViT's class token and position embedding do.
            squares = (weights[None, part] @ values.flatten(1).square()).view(leaf.shape)
            total[leaf.offset : leaf.end] += layout.pack(leaf, squares)


def per_example_gradients(
    module: nn.Module, layout: Layout, params: Tensor
) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """f(images, labels) -> leaf name -> (B, *shape): gradient of each example's log p(label|x) at `params`."""
    leaves = {leaf.name: layout.view(params.detach(), leaf) for leaf in layout.params}

    def log_probability(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, values, (image[None],))
        return logits.log_softmax(1)[0].gather(0, label[None])[0]

    examples = vmap(grad(log_probability), in_dims=(None, 0, 0))

    def gradients(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels do not support vmap
            return dict(examples(leaves, images, labels))

    return gradients


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
