"""Causal attention by content and distance, as in Transformer-XL."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.plain_layers import is_plain
from torchdeq import VariationalDropout


class Context(NamedTuple):
    """The inputs of one attention layer besides the state, equal in all evaluations of f.

    Args:
        u: (B, Lq, 3D) the injection into queries, keys and values.
        k: (B, H, Lm, d) keys of the memory.
        v: (B, H, Lm, d) values of the memory.
        r: (H, d, Lk) keys of the distances, from Lk - 1 down to 0.
        mask: (Lq, Lk) 0 where a query may look, else -inf; None if queries may look everywhere.
    """

    u: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    mask: Tensor | None


class RelativeAttention(nn.Module):
    r"""Multi-head attention with distances as in Transformer-XL (Dai et al., 2019).

    $$s_{ij} = \frac{(q_i + b_w)^\top k_j + (q_i + b_r)^\top r_{i-j}}{\sqrt d}, \qquad
    a_i = W_o \, N\Big(\sum_j \mathrm{softmax}_j(s_{ij}) \, v_j\Big) + b_o$$

    with $[q; k; v] = W x + u$.

    Args:
        width: D.
        heads: H, of width d = D / H.
        norm: N, between the heads and the output.
        dropout: probability of dropping an attention weight, the same ones in every evaluation.
    """

    def __init__(self, width: int, heads: int, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{width} features cannot be divided among {heads} heads")
        self.heads = heads
        self.qkv_net = nn.Linear(width, 3 * width, bias=False)
        self.r_net = nn.Linear(width, width, bias=False)
        self.o_net = nn.Linear(width, width)
        self.norm = norm
        self.r_w_bias = nn.Parameter(torch.empty(heads, width // heads).uniform_(-0.05, 0.05))
        self.r_r_bias = nn.Parameter(torch.empty(heads, width // heads).uniform_(-0.05, 0.05))
        self.drop = VariationalDropout(dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the output (B, Lq, D) for the normalised state (B, Lq, D)."""
        q, k, v = self._project(x, context.u)
        k, v = torch.cat((context.k, k), dim=2), torch.cat((context.v, v), dim=2)
        q = q + self.r_w_bias[:, None]
        bias = self._by_distance(q + (self.r_r_bias - self.r_w_bias)[:, None], context)
        if self.training and self.drop.dropout:
            scores = torch.matmul(q, k.mT) / sqrt(q.shape[-1]) + bias
            heads = torch.matmul(self.drop(scores.softmax(-1)), v)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: Tensor = self.o_net(self.norm(heads.transpose(1, 2).flatten(2)))
        return out

    def keys(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, L, d) of normalised states (B, L, D) and injections."""
        width = x.shape[-1]
        if is_plain(self.qkv_net):
            both = F.linear(x, self.qkv_net.weight[width:]) + u[..., width:]
        else:
            both = (self.qkv_net(x) + u)[..., width:]
        k, v = both.unflatten(2, (2, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)
        return k, v

    def distances(self, positions: Tensor) -> Tensor:
        """Return the keys (H, d, Lk) of a table of distances (Lk, D)."""
        r: Tensor = self.r_net(positions).unflatten(1, (self.heads, -1)).permute(1, 2, 0)
        return r

    def _project(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, L, d)."""
        if is_plain(self.qkv_net):
            flat = torch.addmm(u.flatten(0, 1), x.flatten(0, 1), self.qkv_net.weight.mT)
        else:
            flat = (self.qkv_net(x) + u).flatten(0, 1)
        d = x.shape[2] // self.heads
        q, k, v = flat.view(*x.shape[:2], 3, self.heads, d).permute(2, 0, 3, 1, 4)
        return q, k, v

    def _by_distance(self, q: Tensor, context: Context) -> Tensor:
        """Return the part (B, H, Lq, Lk) of the scores that depends on distance, masked."""
        batch, heads, length, d = q.shape
        rows = q.transpose(0, 1).reshape(heads, batch * length, d) / sqrt(d)
        scores = torch.bmm(rows, context.r).view(heads, batch, length, context.r.shape[2])
        scores = shift_to_keys(scores).transpose(0, 1)
        return scores if context.mask is None else scores + context.mask


def shift_to_keys(scores: Tensor) -> Tensor:
    """Return scores by key from scores by distance: row i moves left by Lq - 1 - i.

    Distances come from the largest down to 0. One padded copy is enough: in memory, rows that are
    one longer begin one later each. Entries after the position of the query have no meaning.
    """
    length, keys = scores.shape[-2:]
    if length == 1:
        return scores
    moved = F.pad(scores, (1, 0)).flatten(-2)[..., length:]
    return moved.view(*scores.shape[:-2], length, keys)


def sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """Return the table (length, width) of the distances length - 1, ..., 0: sines, then cosines."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distance = torch.arange(length - 1, -1, -1, device=like.device, dtype=dtype)
    power = torch.arange(0, width, 2, device=like.device, dtype=dtype) / width
    angles = torch.outer(distance, 10000**-power)
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)


def causal_mask(length: int, past: int, window: int, like: Tensor) -> Tensor | None:
    """Return the mask (Lq, Lk): 0 from a query to itself and the `window` - 1 tokens before it.

    All other entries are -inf. A `window` of 0 has no limit; None means that nothing is hidden.
    """
    keys = past + length
    if length == 1 and (not window or keys <= window):
        return None
    query = torch.arange(past, keys, device=like.device)[:, None]
    distance = query - torch.arange(keys, device=like.device)
    hidden = distance < 0 if not window else (distance < 0) | (distance >= window)
    return like.new_zeros(length, keys).masked_fill(hidden, float("-inf"))
