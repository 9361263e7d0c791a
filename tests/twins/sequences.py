"""Models for sequences, token by token, from their equations and a state dict."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def gpt_logits(state, tokens, *, depth, heads):
    """(length, classes) logits of one sequence (length,): attention as a loop over heads, positions and those before them."""

    def dense(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def normalised(name, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]

    def attention(name, x):
        length, dim = x.shape
        q, k, v = dense(f"{name}.qkv", x).split(dim, dim=-1)
        mixed = torch.zeros_like(x)
        width = dim // heads
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            for position in range(length):
                scores = [q[position, part] @ k[other, part] / math.sqrt(width) for other in range(position + 1)]
                shares = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
                mixed[position, part] = sum(share * v[other, part] for other, share in enumerate(shares))
        return dense(f"{name}.proj", mixed)

    x = torch.stack([state["embedding.weight"][token] + state["pos_embed"][t] for t, token in enumerate(tokens)])
    for block in (f"blocks.{number}" for number in range(depth)):
        x = x + attention(f"{block}.attn", normalised(f"{block}.norm1", x))
        x = x + dense(f"{block}.mlp.fc2", F.gelu(dense(f"{block}.mlp.fc1", normalised(f"{block}.norm2", x))))
    return dense("head", normalised("norm", x))


def recurrent_logits(state, tokens, *, kind, layers):
    """(length, classes) logits of one sequence (length,) by stacked GRU or LSTM cells.

    Cho et al. 2014 (arXiv:1406.1078) in the form of cuDNN, whose reset gate stands behind the product; Hochreiter and
    Schmidhuber 1997 with forget gates.
    """
    x = [state["embedding.weight"][token] for token in tokens]
    for layer in range(layers):
        leaves = [state[f"layers.{layer}.{name}_l0"] for name in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]
        h = c = torch.zeros(leaves[2].shape[1])
        for t, x_t in enumerate(x):
            inner, outer = leaves[0] @ x_t + leaves[1], leaves[2] @ h + leaves[3]
            if kind == "gru":
                (r_x, z_x, n_x), (r_h, z_h, n_h) = inner.chunk(3), outer.chunk(3)
                r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
                h = (1 - z) * torch.tanh(n_x + r * n_h) + z * h
            else:
                i, f, g, o = (inner + outer).chunk(4)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            x[t] = h
    return torch.stack(x) @ state["fc.weight"].T + state["fc.bias"]
