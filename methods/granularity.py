"""One weight per client for the whole model, for each layer, or for each layer block (FedVG, section on granularity)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from raysim.core.layout import Layout, Leaf


def spread(
    layout: Layout,
    weights_of: Callable[[Sequence[str]], Tensor | None],
    *,
    granularity: str,
    otherwise: Tensor,
    buffers: str = "layer",
) -> dict[str, Tensor]:
    """Weights of every leaf.

    Args:
      weights_of: layers (parameter leaves) -> their common (K,) weights; None if the layers have no weights.
      granularity: "model", "layer" or "block".
      otherwise: (K,) weights of a layer block without weights, and of buffers if `buffers` is "uniform".
      buffers: with granularity "layer": "layer" or "uniform".
    """
    block_of = {leaf.name: leaf.block for leaf in layout.params}

    def weights_or(layers: Sequence[str], default: Tensor) -> Tensor:
        weights = weights_of(layers)
        return default if weights is None else weights

    everything = weights_or(list(block_of), otherwise)
    by_block = {
        block: weights_or([layer for layer in block_of if block_of[layer] == block], otherwise)
        for block in layout.blocks
    }
    by_layer = {layer: weights_or([layer], by_block[block_of[layer]]) for layer in block_of}
    # A BatchNorm statistic has the weight of the first parameter tensor of its module.
    owners = {leaf.layer: leaf.name for leaf in reversed(layout.params)}

    def weight_of(leaf: Leaf) -> Tensor:
        if granularity == "model":
            return everything
        if granularity == "layer" and leaf.is_buffer and buffers == "uniform":
            return otherwise
        owner = owners.get(leaf.layer) if leaf.is_buffer else leaf.name
        if granularity == "layer" and owner is not None:
            return by_layer[owner]
        return by_block[leaf.block] if leaf.block in block_of.values() else everything

    return {leaf.name: weight_of(leaf) for leaf in layout.leaves}
