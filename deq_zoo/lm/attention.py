"""Attention by content and distance: every query sees itself and what came before."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdeq import VariationalDropout


class Context(NamedTuple):
    """What one attention layer sees besides the state: the same in every evaluation of f.

    Args:
        u: (B, Lq, 3D) the injection into queries, keys and values.
        k: (B, H, Lm, d) keys of the memory.
        v: (B, H, Lm, d) its values.
        r: (H, d, Lk) keys of the distances, from Lk - 1 down to 0.
        mask: (Lq, Lk) 0 where a query may look, else -inf; None if it may look everywhere.
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
        dropout: of the attention weights, the same ones in every evaluation of f.
    """

    def __init__(self, width: int, heads: int, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{width} features cannot be shared by {heads} heads")
        self.heads = heads
        self.qkv_net = nn.Linear(width, 3 * width, bias=False)
        self.r_net = nn.Linear(width, width, bias=False)
        self.o_net = nn.Linear(width, width)
        self.norm = norm
        self.r_w_bias = nn.Parameter(torch.empty(heads, width // heads).uniform_(-0.05, 0.05))
        self.r_r_bias = nn.Parameter(torch.empty(heads, width // heads).uniform_(-0.05, 0.05))
        self.drop = VariationalDropout(dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B, Lq, D) from the normalised state (B, Lq, D)."""
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
        """(B, H, L, d) keys and values of normalised states (B, L, D) with their injection."""
        width = x.shape[-1]
        both = F.linear(x, self.qkv_net.weight[width:]) + u[..., width:]
        k, v = both.unflatten(2, (2, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)
        return k, v

    def distances(self, positions: Tensor) -> Tensor:
        """(H, d, Lk) the keys of a table (Lk, D)."""
        r: Tensor = self.r_net(positions).unflatten(1, (self.heads, -1)).permute(1, 2, 0)
        return r

    def _project(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, d) queries, keys and values."""
        flat = torch.addmm(u.flatten(0, 1), x.flatten(0, 1), self.qkv_net.weight.mT)
        d = x.shape[2] // self.heads
        q, k, v = flat.view(*x.shape[:2], 3, self.heads, d).permute(2, 0, 3, 1, 4)
        return q, k, v

    def _by_distance(self, q: Tensor, context: Context) -> Tensor:
        """(B, H, Lq, Lk) what distance adds to the scores, and where not to look."""
        batch, heads, length, d = q.shape
        rows = q.transpose(0, 1).reshape(heads, batch * length, d) / sqrt(d)
        scores = torch.bmm(rows, context.r).view(heads, batch, length, context.r.shape[2])
        scores = shifted(scores).transpose(0, 1)
        return scores if context.mask is None else scores + context.mask


def shifted(scores: Tensor) -> Tensor:
    """Scores by distance, from the largest to 0, as scores by key: row i moves left by Lq - 1 - i.

    One padded copy does it: in memory, rows that are one longer begin one later each. What comes
    after a query's own position has no meaning.
    """
    length, keys = scores.shape[-2:]
    if length == 1:
        return scores
    moved = F.pad(scores, (1, 0)).flatten(-2)[..., length:]
    return moved.view(*scores.shape[:-2], length, keys)


def sinusoids(length: int, width: int, like: Tensor) -> Tensor:
    """(length, width) the distances length - 1, ..., 0: sines of all frequencies, then cosines."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distance = torch.arange(length - 1, -1, -1, device=like.device, dtype=dtype)
    power = torch.arange(0, width, 2, device=like.device, dtype=dtype) / width
    angles = torch.outer(distance, 10000**-power)
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)


def causal_mask(length: int, past: int, window: int, like: Tensor) -> Tensor | None:
    """(Lq, Lk) 0 from a query to itself and the `window` - 1 tokens before it, else -inf."""
    keys = past + length
    if length == 1 and (not window or keys <= window):
        return None
    query = torch.arange(past, keys, device=like.device)[:, None]
    distance = query - torch.arange(keys, device=like.device)
    hidden = distance < 0 if not window else (distance < 0) | (distance >= window)
    return like.new_zeros(length, keys).masked_fill(hidden, float("-inf"))
