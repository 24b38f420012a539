"""Adaptive embedding and adaptive softmax, which share their tables."""

from __future__ import annotations

from math import sqrt
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows (..., D) of a table (V, D) that ids (...) name."""
    try:
        return F.embedding(ids, table)
    except IndexError:
        raise _out_of_range(ids, len(table)) from None


def _out_of_range(ids: Tensor, tokens: int) -> ValueError:
    return ValueError(f"tokens must lie in [0, {tokens}), got {int(ids.min())} to {int(ids.max())}")


class AdaptiveVocabulary(nn.Module):
    r"""The vectors of all tokens, for input and output: wide for frequent tokens, narrow for rare.

    Cluster i has the ids from $c_i$ to below $c_{i+1}$, and vectors of the width $E_i = E / k^i$:

    $$e(x) = \sqrt D \, P_i T_i[x - c_i], \qquad
    \log p(x) = \log \mathrm{head}(x \text{ or its cluster}) +
    \log \mathrm{softmax}(T_i P_i^\top h + b_i)_{x - c_i}$$

    The head is a softmax over the tokens of the first cluster and the other clusters, with a
    projection of its own. Its rows for the clusters are in reverse order, as published.

    Input and output share each table and projection as one parameter of this module: copies, moves
    and loading cannot separate them.

    Shapes: ids `(B, L)`, states `(B, L, D)`, log-probabilities `(B, L, V)`.

    Args:
        tokens: V.
        width: D.
        embed: E.
        cutoffs: ids at which the clusters after the first begin; none means a plain softmax.
        shrink: k. With 1 there is one table, and there are projections only if E differs from D.
    """

    def __init__(
        self, tokens: int, width: int, embed: int, cutoffs: tuple[int, ...] = (), shrink: int = 1
    ) -> None:
        super().__init__()
        self.width, self.shrink = width, shrink
        self.ends = (0, *cutoffs, tokens)
        if any(a >= b for a, b in zip(self.ends, self.ends[1:], strict=False)):
            raise ValueError(f"cutoffs must rise from 1 to below {tokens} tokens, got {cutoffs}")
        if shrink < 1 or embed // shrink ** len(cutoffs) < 1:
            raise ValueError(
                f"the last of {len(cutoffs) + 1} clusters has no width left: {embed} // {shrink} "
                f"** {len(cutoffs)}"
            )
        sizes = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        one_table = shrink == 1
        shapes = [(tokens, embed)]
        if not one_table:
            shapes = [(n, embed // shrink**i) for i, n in enumerate(sizes)]
        projected = not one_table or embed != width
        widths = [columns for _, columns in shapes] if projected else []
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.projections = nn.ParameterList(nn.Parameter(torch.empty(width, n)) for n in widths)
        self.head = nn.Parameter(torch.empty(width, embed)) if projected else None
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in sizes)
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), embed))
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))
        for weight in (*self.tables, *self.projections, self.head, self.cluster_weight):
            if weight is not None:
                nn.init.normal_(weight, std=0.01)

    @property
    def tokens(self) -> int:
        """Return the size of the vocabulary, V."""
        return self.ends[-1]

    @property
    def clusters(self) -> int:
        """Return the number of clusters after the first."""
        return len(self.ends) - 2

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of ids (B, L), for hooks to see."""
        return self.embed(ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of ids (B, L)."""
        self._check(ids)
        if self.shrink == 1:
            e = look_up(ids, self.tables[0])
            e = F.linear(e, self.projections[0]) if len(self.projections) else e
            return e * sqrt(self.width)
        flat = ids.reshape(-1)
        rows = [self._members(flat, i) for i in range(len(self.tables))]
        if sum(len(of_i) for of_i in rows) < len(flat):
            raise _out_of_range(flat, self.tokens)
        parts = [
            F.linear(F.embedding(flat[of_i] - self.ends[i], self.tables[i]), self.projections[i])
            for i, of_i in enumerate(rows)
        ]
        e = torch.cat(parts)[torch.cat(rows).argsort()]  # back in the order of the tokens
        return (e * sqrt(self.width)).view(*ids.shape, self.width)

    def nll(self, h: Tensor, target: Tensor) -> Tensor:
        """Return the negative log-likelihood (B, L) of every target, in the order of the tokens."""
        self._check(target)
        flat, goal = h.reshape(-1, self.width), target.reshape(-1)
        members = [self._members(goal, i) for i in range(1, self.clusters + 1)]
        choice = goal
        for i, rows in enumerate(members, start=1):
            choice = choice.index_fill(0, rows, self._head_row(i))
        loss = _cross_entropy(self._head_logits(flat), choice)
        for i, rows in enumerate(members, start=1):
            inside = _cross_entropy(self._tail_logits(flat[rows], i), goal[rows] - self.ends[i])
            loss = loss.index_add(0, rows, inside)
        return loss.view(target.shape)

    def log_prob(self, h: Tensor) -> Tensor:
        """Return the log-probability (B, L, V) of every token."""
        head = _at_least_single(self._head_logits(h)).log_softmax(-1)
        parts = [head[..., : self.ends[1]]]
        for i in range(1, self.clusters + 1):
            inside = _at_least_single(self._tail_logits(h, i)).log_softmax(-1)
            parts.append(head[..., self._head_row(i), None] + inside)
        return torch.cat(parts, dim=-1)

    def _head_row(self, i: int) -> int:
        """Return the row of cluster `i` in the head."""
        return self.ends[1] + self.clusters - i

    def _head_logits(self, h: Tensor) -> Tensor:
        table = torch.cat((self._rows(0), self.cluster_weight))
        bias = torch.cat((self.biases[0], self.cluster_bias))
        return F.linear(h if self.head is None else h @ self.head, table, bias)

    def _tail_logits(self, h: Tensor, i: int) -> Tensor:
        if self.projections:
            h = h @ self.projections[0 if self.shrink == 1 else i]
        return F.linear(h, self._rows(i), self.biases[i])

    def _rows(self, i: int) -> Tensor:
        """Return the vectors of cluster `i`."""
        if self.shrink > 1:
            return cast(Tensor, self.tables[i])
        return cast(Tensor, self.tables[0])[self.ends[i] : self.ends[i + 1]]

    def _members(self, flat: Tensor, i: int) -> Tensor:
        """Return the positions of the ids that belong to cluster `i`."""
        return ((flat >= self.ends[i]) & (flat < self.ends[i + 1])).nonzero().squeeze(1)

    def _check(self, ids: Tensor) -> None:
        """Raise `ValueError` unless ids have the right type and shape."""
        if ids.dim() != 2 or ids.dtype != torch.long:
            raise ValueError(
                f"tokens are int64 ids of shape (streams, length), got {ids.dtype} "
                f"{tuple(ids.shape)}"
            )


def _cross_entropy(logits: Tensor, goal: Tensor) -> Tensor:
    # -100, the padding of other programs, must raise an error and not have the loss 0.
    return F.cross_entropy(_at_least_single(logits), goal, reduction="none", ignore_index=-(2**62))


def _at_least_single(logits: Tensor) -> Tensor:
    """Return logits in single precision at least: half is too coarse to sum over a vocabulary."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
