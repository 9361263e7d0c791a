"""A model as one flat vector: which leaf lies where, in which layer and layer block.

The state vector is `[params | float buffers]`, float32. Its first `num_params` entries are the trained parameters in
module order, and the other entries are the floating-point buffers (BatchNorm statistics). Frozen parameters are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Leaf:
    """One named tensor of the layout.

    `layer` is the owning module's path, `block` its layer block (FedVG's granularity). `is_channels_last`: a
    convolution weight lies as (out, height, width, in) in the vector, and its view keeps the usual shape. `is_lookup`:
    an embedding, whose rows are looked up, not multiplied.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    layer: str
    block: str
    is_buffer: bool = False
    is_head: bool = False
    is_shared: bool = True
    is_channels_last: bool = False
    is_lookup: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Layout:
    """Leaves in vector order: the trained parameters first, then the float buffers.

    Example:
      >>> network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3))
      >>> layout = layout_of(network, head="2")
      >>> [leaf.name for leaf in layout.params]
      ['0.weight', '0.bias', '1.weight', '1.bias', '2.weight', '2.bias']
      >>> [leaf.name for leaf in layout.buffers]
      ['1.running_mean', '1.running_var']
      >>> layout.num_params, layout.num_state
      (19, 23)
      >>> layout.by_name["2.weight"].offset, layout.by_name["2.weight"].is_head
      (10, True)
      >>> vector = torch.arange(23.0)
      >>> layout.view(vector, "2.weight")
      tensor([[10., 11.],
              [12., 13.],
              [14., 15.]])
      >>> layout.norms(vector, 1)[:2]  # of the first two leaves
      tensor([6., 9.], dtype=torch.float64)
    """

    leaves: tuple[Leaf, ...]

    @cached_property
    def params(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if not leaf.is_buffer)

    @cached_property
    def buffers(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.is_buffer)

    @cached_property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in self.params)

    @cached_property
    def num_state(self) -> int:
        return sum(leaf.size for leaf in self.leaves)

    @cached_property
    def shared(self) -> tuple[Leaf, ...]:
        """Leaves that are sent, aggregated and broadcast."""
        return tuple(leaf for leaf in self.leaves if leaf.is_shared)

    @cached_property
    def by_name(self) -> Mapping[str, Leaf]:
        return {leaf.name: leaf for leaf in self.leaves}

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the layer blocks, in order of first appearance."""
        return tuple(dict.fromkeys(leaf.block for leaf in self.leaves))

    @cached_property
    def personal(self) -> tuple[Leaf, ...]:
        """Leaves, trained ones and buffers, that never leave their client."""
        return tuple(leaf for leaf in self.leaves if not leaf.is_shared)

    @property
    def shared_bytes(self) -> int:
        """Bytes of one float32 copy of everything shared."""
        return 4 * sum(leaf.size for leaf in self.shared)

    def part(self, first: int, last: int) -> Layout:
        """The leaves `first` to `last` - 1 as a layout of their own, whose offsets begin with 0."""
        start = self.leaves[first].offset
        return Layout(tuple(replace(leaf, offset=leaf.offset - start) for leaf in self.leaves[first:last]))

    def view(self, vector: Tensor, leaf: Leaf | str) -> Tensor:
        """The leaf's part of a vector, in the leaf's shape, without copying.

        Args:
          vector: [num_params] or [num_state].
        Returns:
          leaf.shape; with the strides of a channels-last convolution if the leaf is one.
        """
        leaf = self.by_name[leaf] if isinstance(leaf, str) else leaf
        part = vector[leaf.offset : leaf.end]
        if not leaf.is_channels_last:
            return part.view(leaf.shape)
        out, channels, height, width = leaf.shape
        return part.view(out, height, width, channels).permute(0, 3, 1, 2)

    def zero_personal_(self, vector: Tensor) -> Tensor:
        """Set the personal leaves of a vector [num_params] to 0 in place; personal leaves have no global
        counterpart.
        """
        for leaf in self.personal:
            vector[leaf.offset : leaf.end] = 0
        return vector

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Name -> view for every leaf that the vector covers ([num_params] or [num_state])."""
        leaves = self.leaves if vector.numel() == self.num_state else self.params
        return {leaf.name: self.view(vector, leaf) for leaf in leaves}

    def pack(self, leaf: Leaf, value: Tensor) -> Tensor:
        """Return a tensor of the leaf's shape as [leaf.size], in the order of the vector."""
        return (value.permute(0, 2, 3, 1) if leaf.is_channels_last else value).reshape(-1)

    def norms(self, vector: Tensor, order: float = 2.0) -> Tensor:
        """[num_leaves covered], float64: the vector norm of each leaf (order 1, 2 or inf)."""
        leaves = self.leaves if vector.numel() == self.num_state else self.params
        parts = [vector[leaf.offset : leaf.end] for leaf in leaves]
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        if order == math.inf:  # aminmax: vector_norm(inf) is 25 times slower on a CPU; both keep NaN
            lowest, highest = (torch.stack(side) for side in zip(*(part.aminmax() for part in parts), strict=True))
            return torch.maximum(highest, -lowest).to("cpu", torch.float64)
        return torch.stack([torch.linalg.vector_norm(part, order, dtype=torch.float64) for part in parts]).cpu()


def layout_of(
    module: nn.Module,
    *,
    head: str,
    trained: Iterable[str] | None = None,
    shared: Iterable[str] | None = None,
    channels_last: bool = False,
    blocks: str = "residual",
) -> Layout:
    """The layout of a module.

    Args:
      head: path of the classifier layer; it is a layer block by itself.
      trained: names of the parameters that clients train (all, if None); the others are frozen and not in the vector.
      shared: names of the trained parameters and float buffers that are sent (all, if None).
      channels_last: lay 4-D weights out as (out, height, width, in).
      blocks: "residual", "stage" or "width", see `block_namer`.
    """
    buffers = float_buffers(module)
    trained = {name for name, _ in module.named_parameters()} if trained is None else set(trained)
    shared = trained | buffers.keys() if shared is None else set(shared)
    block_of = block_namer(module, head=head, blocks=blocks)
    leaves: list[Leaf] = []

    def add(name: str, tensor: Tensor, *, is_buffer: bool) -> None:
        layer = name.rpartition(".")[0]
        leaf = Leaf(
            name=name,
            shape=tuple(tensor.shape),
            offset=leaves[-1].end if leaves else 0,
            layer=layer,
            block=block_of(name),
            is_buffer=is_buffer,
            is_head=not is_buffer and (layer == head or layer.startswith(head + ".")),
            is_shared=name in shared,
            is_channels_last=not is_buffer and channels_last and tensor.dim() == 4,
            is_lookup=isinstance(module.get_submodule(layer), nn.Embedding | nn.EmbeddingBag),
        )
        leaves.append(leaf)

    for name, parameter in module.named_parameters():
        if name in trained:
            add(name, parameter, is_buffer=False)
    for name, buffer in buffers.items():
        add(name, buffer, is_buffer=True)
    return Layout(tuple(leaves))


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the state vector: BatchNorm's running statistics."""
    persistent = module.state_dict(keep_vars=True)  # without constants such as masks
    return {n: buffer for n, buffer in module.named_buffers() if buffer.is_floating_point() and n in persistent}


def norm_names(module: nn.Module) -> set[str]:
    """Return names of parameters and buffers of normalisation layers, recognised by "Norm" in the class name."""
    layers = {path for path, layer in module.named_modules() if any("Norm" in c.__name__ for c in type(layer).__mro__)}
    return {name for name in module.state_dict(keep_vars=True) if name.rpartition(".")[0] in layers}


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return counters such as BatchNorm's num_batches_tracked: never averaged, the largest of the cohort is kept.

    Integer tensors with dimensions are constant tables (the relative positions of Swin transformers) and are left out.
    """
    counters = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_floating_point()}
    persistent = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in counters.items() if buffer.dim() == 0 and name in persistent}


def block_namer(module: nn.Module, *, head: str, blocks: str = "residual") -> Callable[[str], str]:
    """Return a function: leaf name -> layer block.

    "residual" (FedVG, section on granularity): each residual or encoder block, the head, and "stem" for all the rest:
    first convolution, class token, embeddings, final normalisation. A convolution after the blocks in the same sequence
    is a block (MobileNetV2's last). The layers of a stage beside its blocks are a block, too (ConvNeXt's
    down-sampling).
    "stage" (FedVG's released code): each sequence of such blocks, unless the model has only one.
    "width": neighbouring blocks of one output width, named after the last of them: the stages of networks that are one
    long sequence (MobileNetV2's ten of FLFA, table 13). A model without such blocks has one block per layer.
    """
    prefixes = _layer_blocks(module)
    if blocks == "stage" and len(set(prefixes.values())) > 1:
        prefixes = {stage: stage for stage in prefixes.values()}
    longest_first = sorted(prefixes, key=len, reverse=True)

    def block_of(name: str) -> str:
        if name.startswith(head + "."):
            return head
        if not prefixes:
            return name.rpartition(".")[0] or "stem"
        return next((path for path in longest_first if name.startswith(path + ".")), "stem")

    if blocks != "width":
        return block_of
    runs = _runs_of_one_width(module, block_of, {"stem", head}) if prefixes else {}
    return lambda name: runs.get(block_of(name), block_of(name))


def _runs_of_one_width(module: nn.Module, block_of: Callable[[str], str], alone: set[str]) -> dict[str, str]:
    """Return layer block -> last of the neighbouring blocks with an equal number of outputs.

    Args:
      alone: blocks that stand by themselves.
    """
    widths = {block_of(name): len(value) for name, value in module.named_parameters() if value.dim() > 1}
    last: dict[str, str] = {}
    following = ""
    for block in reversed(widths):
        is_same = following and alone.isdisjoint((block, following)) and widths[block] == widths[following]
        last[block] = last[following] if is_same else block
        following = block
    return last


def _layer_blocks(module: nn.Module) -> dict[str, str]:
    """Return path prefix of each layer block -> prefix of its stage.

    A block is a numbered child of a sequence with at least two weights (tensors of two or more dimensions). The child
    is a stage instead if it is, or contains, a sequence of such blocks (at least two blocks, or nothing else).
    """
    # Path of a sequence -> its numbered children -> their number of weights.
    sequences: dict[str, dict[str, int]] = {}
    for path, child in module.named_modules():
        parent, _, number = path.rpartition(".")
        weights = sum(parameter.dim() > 1 for parameter in child.parameters())
        if number.isdigit() and weights:
            sequences.setdefault(parent, {})[path] = weights
    large = {path for children in sequences.values() for path, weights in children.items() if weights > 1}

    def around(path: str) -> list[str]:
        """The large children that are, or hold, the module at the path; the outermost first."""
        return [other for other in sorted(large, key=len) if (path + ".").startswith(other + ".")]

    # Path of a sequence of blocks -> its first block and all that follows.
    members: dict[str, list[str]] = {}
    for sequence, children in sequences.items():
        blocks = [path for path in children if path in large]
        holds_nothing_else = sequence in large and len(blocks) == len(children)
        if blocks and (not around(sequence) or len(blocks) > 1 or holds_nothing_else):
            members[sequence] = list(children)[list(children).index(blocks[0]) :]
    stages = {path for sequence in members for path in around(sequence)}
    stage_of = {path: around(path)[0] for path in stages}
    for sequence, paths in members.items():
        stands_alone = not stages.isdisjoint(paths)  # a block in a sequence of stages is a stage of its own
        stage_of |= {path: [*around(sequence), path if stands_alone else sequence][0] for path in paths}
    return stage_of
