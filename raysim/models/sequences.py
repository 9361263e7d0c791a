"""Models for sequences of tokens: recurrent networks, and a small causal transformer.

Inputs are tokens (B, length), int64. Outputs are logits (B, length, classes), where logits at position t depend only on
tokens up to t; with `per: sequence`, logits (B, classes) of the last position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.models.architecture import Architecture, Shape
from raysim.models.parts import Depth, Rate, Width, named_layers, unfit_option

#: Logits for each token, or for the sequence.
Per = Literal["token", "sequence"]


class Recurrent(nn.Module):
    """Embedding, recurrent layers, linear layer. Each recurrent layer is a separate module, hence a layer block."""

    def __init__(self, vocabulary: int, width: int, recurrent: Sequence[nn.GRU | nn.LSTM], classes: int, per: Per):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(recurrent)
        self.fc = nn.Linear(recurrent[-1].hidden_size, classes)
        self.per = per

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.fc(_of(self.per, x))


def recurrent(
    network: Literal["gru", "lstm"],
    shape: Shape,
    classes: int,
    vocabulary: int,
    *,
    embedding: Width = 8,
    hidden: Width = 256,
    layers: Depth = 2,
    per: Per = "token",
) -> nn.Module:
    """GRU or LSTM layers on embedded tokens, by default of the sizes that are usual for the characters of Shakespeare.

    `lstm` is the character model of McMahan et al. 2017 (AISTATS, section 3) and of LEAF; it has 822,570 parameters
    with the defaults and 90 tokens. PyTorch's layers have two bias vectors, TensorFlow's have one.

    Args:
      embedding: width of the embedding of a token.
      hidden: width of each layer's state.
      layers: number of recurrent layers.
      per: "token": logits at each token, such as for the next token; "sequence": logits at the last token, as in LEAF.
    """
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}[network]
    stack = [kind(hidden if number else embedding, hidden, batch_first=True) for number in range(layers)]
    return Recurrent(vocabulary, embedding, stack, classes, per)


class CausalAttention(nn.Module):
    """Causal attention: each token attends to itself and earlier tokens.

    Attributes:
      dropout: dropout of the attention weights in training.
    """

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # Each (B, heads, length, dim / heads).
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(x.transpose(1, 2).flatten(2))


class CausalBlock(nn.Module):
    """Attention, then two dense layers: two residual branches, each with a normalisation in front."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = CausalAttention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = named_layers(fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), fc2=nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class CausalTransformer(nn.Module):
    """Embeddings of tokens and positions, blocks, normalisation, linear layer."""

    def __init__(
        self, length: int, classes: int, vocabulary: int, *, dim: int, depth: int, heads: int, dropout: float, per: Per
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.pos_embed = nn.Parameter(torch.zeros(length, dim))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(CausalBlock(dim, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.per = per

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + self.pos_embed[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(_of(self.per, x)))


def gpt(
    shape: Shape,
    classes: int,
    vocabulary: int,
    *,
    dim: Width = 128,
    depth: Depth = 4,
    heads: Width = 4,
    dropout: Rate = 0.0,
    per: Per = "token",
) -> nn.Module:
    """A causal transformer of any size: GPT-2, with an output layer that is not tied to the embedding.

    Radford et al. 2019 ("Language models are unsupervised multitask learners", section 2.3): normalisation in front of
    each residual branch, learnt positions, and initial values from N(0, 0.02^2), divided by sqrt(2 depth) for the last
    layer of a residual branch.

    Args:
      dim: width of the tokens, a multiple of `heads`.
      depth: number of blocks.
      heads: heads of each attention layer.
      dropout: dropout after the embeddings, of the attention weights, and after each residual branch.
      per: "token": logits at each token, such as for the next token; "sequence": logits at the last token.
    """
    if dim % heads:
        raise unfit_option(f"dim must be a multiple of heads, got {dim} and {heads}")
    module = CausalTransformer(
        shape[0], classes, vocabulary, dim=dim, depth=depth, heads=heads, dropout=dropout, per=per
    )
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            ends_branch = name.endswith(("attn.proj.weight", "mlp.fc2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if ends_branch else 0.02)
    return module


def _of(per: Per, x: Tensor) -> Tensor:
    """Select the positions to classify from (B, length, width): all, or the last (B, width)."""
    return x if per == "token" else x[:, -1]


SEQUENCES = {
    "gpt": Architecture(gpt, "head", size=80, inputs="tokens"),
    "gru": Architecture(partial(recurrent, "gru"), "fc", size=80, inputs="tokens"),
    "lstm": Architecture(partial(recurrent, "lstm"), "fc", size=80, inputs="tokens"),
}
