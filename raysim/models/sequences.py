"""Models for sequences of tokens: recurrent ones, and a small causal transformer.

All take tokens (B, length), int64, and give logits (B, length, classes), of which those at position t depend on the tokens
up to t alone; with `per: sequence` (B, classes), from the last position.
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
from raysim.models.parts import Depth, Rate, Width, named, unfit_option

#: An answer for each token, or one for the sequence.
Per = Literal["token", "sequence"]


class Recurrent(nn.Module):
    """Embedding, recurrent layers, linear layer. The recurrent layers stand apart: each is a layer block."""

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
    """GRU or LSTM layers on embedded tokens, in the sizes that federated learning uses for the characters of Shakespeare.

    `lstm` is the character model of McMahan et al. 2017 (AISTATS, section 3) and of LEAF: with the defaults and 90 tokens 822,570
    parameters. PyTorch's layers have two biases, of which TensorFlow's have one.

    Args:
      embedding: numbers that stand for a token.
      hidden: numbers in each layer's state.
      layers: recurrent layers.
      per: "token": an answer at each token, such as the next one; "sequence": one, at the last token, as LEAF has it.
    """
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}[network]
    stack = [kind(hidden if number else embedding, hidden, batch_first=True) for number in range(layers)]
    return Recurrent(vocabulary, embedding, stack, classes, per)


class CausalAttention(nn.Module):
    """Causal attention: each token attends to itself and earlier tokens.

    Attributes:
      dropout: of the attention weights, in training.
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
    """Attention and two dense layers, each behind a normalisation and beside a path around it."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = CausalAttention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = named(fc1=nn.Linear(dim, 4 * dim), act=nn.GELU(), fc2=nn.Linear(4 * dim, dim))
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
    """A causal transformer of any size: GPT-2's, with an output layer of its own.

    Radford et al. 2019 ("Language models are unsupervised multitask learners", section 2.3): normalisation in front of each part,
    learnt positions, and initial values from N(0, 0.02^2), those that end a residual branch divided by sqrt(2 depth).

    Args:
      dim: numbers that stand for a token, a multiple of `heads`.
      depth: number of blocks.
      heads: heads of each attention layer.
      dropout: dropout after the embeddings, of the attention weights, and after each part of a block.
      per: "token": an answer at each token, such as the next one; "sequence": one, at the last token.
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
