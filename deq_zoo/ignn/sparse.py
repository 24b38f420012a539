"""Sparse matrices by rows: construction, products that differentiate, Perron roots."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Both:
    """A sparse matrix and its transpose, in a container that autograd does not look into."""

    forth: Tensor
    back: Tensor


class _Propagate(torch.autograd.Function):
    """A sparse product whose derivatives of every order are sparse products."""

    @staticmethod
    def forward(both: Both, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # no library has it in bfloat16
            return both.forth @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Both, Tensor], output: Tensor) -> None:
        ctx.both = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, multiply(Both(ctx.both.back, ctx.both.forth), grad)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Tensor:
        return multiply(ctx.both, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, int], both: Both, x: Tensor) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[1], -1)  # (N, d, V): a wider product
        return multiply(both, x.flatten(1)).view(x.shape), x.dim() - 1


def multiply(both: Both, x: Tensor) -> Tensor:
    """Return `forth @ x`, differentiable in `x`."""
    product: Tensor = _Propagate.apply(both, x)  # type: ignore[no-untyped-call]
    return product


def sparse_rows(row: Tensor, column: Tensor, values: Tensor, n: int) -> Tensor:
    """Return (n, n) from places and values; values of the same place add up."""
    edges = torch.sparse_coo_tensor(
        torch.stack((row, column)), values, (n, n), check_invariants=False
    ).coalesce()
    row, column = edges.indices()
    starts = torch.zeros(n + 1, dtype=torch.int64, device=row.device)
    starts[1:] = torch.bincount(row, minlength=n).cumsum(0)
    return _csr(starts, column, edges.values(), n)


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Return one matrix with square matrices as its blocks."""
    starts, columns = [blocks[0].crow_indices()[:1]], []
    n = edges = 0
    for block in blocks:
        starts.append(block.crow_indices()[1:] + edges)
        columns.append(block.col_indices() + n)
        n, edges = n + block.shape[0], edges + block.values().shape[0]
    return _csr(torch.cat(starts), torch.cat(columns), torch.cat([b.values() for b in blocks]), n)


def _csr(starts: Tensor, columns: Tensor, values: Tensor, n: int) -> Tensor:
    _use_csr()
    small = max(n, len(values)) < 2**31  # the size of integers that fast libraries take
    kind = torch.int32 if small else torch.int64
    return torch.sparse_csr_tensor(
        starts.to(kind), columns.to(kind), values, (n, n), check_invariants=False
    )


@cache
def _use_csr() -> None:
    """Make the first tensor of this layout, at which torch warns that the layout is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.eye(1).to_sparse_csr()


def sparse_weight(W: Tensor) -> Both | None:
    """Return W and its transpose by rows if products are faster so than with the dense W."""
    supported = W.dtype in (torch.float32, torch.float64)  # by the library of sparse products
    if W.device.type != "cpu" or W.dim() != 2 or len(W) < _WIDE or not supported:
        return None
    _use_csr()
    W = W.detach()
    if int(torch.count_nonzero(W)) > _SPARSE * W.numel():
        return None
    both = [M.to_sparse_csr() for M in (W, W.mT.contiguous())]
    forth, back = (_csr(M.crow_indices(), M.col_indices(), M.values(), len(W)) for M in both)
    return Both(forth, back)


def times_transposed(x: Tensor, W: Tensor, rows: Both | None) -> Tensor:
    """Return `x W^T`, by sparse rows of W if given; differentiable in x and in all of W."""
    if rows is None or x.dtype != rows.forth.dtype:
        return x @ W.mT
    product: Tensor = _TimesTransposed.apply(x, W, rows)  # type: ignore[no-untyped-call]
    return product


_WIDE, _SPARSE = 256, 0.06  # from here on, sparse rows win
_BLOCK = 128  # rows of x whose product stays in the cache


class _TimesTransposed(torch.autograd.Function):
    """`x W^T` with W mostly zero: a sparse gradient for x, a dense one for W."""

    @staticmethod
    def forward(x: Tensor, W: Tensor, rows: Both) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.autocast(x.device.type, enabled=False):
            for a in range(0, len(x), _BLOCK):
                out[a : a + _BLOCK] = (rows.forth @ x[a : a + _BLOCK].mT.contiguous()).mT
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Both], output: Tensor) -> None:
        x, W, ctx.rows = inputs
        ctx.save_for_backward(x, W)
        ctx.save_for_forward(x, W)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, W = ctx.saved_tensors
        turned = Both(ctx.rows.back, ctx.rows.forth)
        wants_x, wants_W, _ = ctx.needs_input_grad
        dx = times_transposed(grad, W.mT, turned) if wants_x else None
        return dx, grad.mT @ x if wants_W else None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dW: Tensor | None, _: None) -> Tensor:
        x, W = ctx.saved_tensors
        tangent = torch.zeros_like(x) if dx is None else times_transposed(dx, W, ctx.rows)
        return tangent if dW is None else tangent + x @ dW.mT

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None, Any], x: Tensor, W: Tensor, rows: Both
    ) -> tuple[Tensor, int]:
        x = x.expand(info.batch_size, -1, -1) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if in_dims[1] is not None:
            return x @ W.movedim(in_dims[1], 0).mT, 0
        flat = times_transposed(x.reshape(-1, x.shape[-1]), W, rows)
        return flat.view(*x.shape[:-1], -1), 0


@torch.no_grad()
def perron_roots(
    adjacency: Tensor, sizes: Sequence[int], steps: int = 4096, tol: float = 1e-11
) -> Tensor:
    """Return (G,) the largest eigenvalue of `|A|` for each block, by power iteration from ones.

    Half of the estimate is added to the diagonal, without which bipartite graphs would alternate.
    Where the gap to the next eigenvalue is tiny, `steps` ends the iteration and the estimate is too
    small: by 1.5e-5 on a path of 1,000 nodes. The margin of `Graphs` covers that but for 5e-6, for
    which `kappa < 1` leaves room.

    Args:
        adjacency: sparse rows, in blocks.
        sizes: of the blocks.
        steps: at most so many products.
        tol: relative change of all roots at which to stop; rounding stays below the default on
            graphs of a million nodes.
    """
    n, device = adjacency.shape[0], adjacency.device
    values = adjacency.values().abs().double()
    A = _csr(adjacency.crow_indices(), adjacency.col_indices(), values, n)
    owner = torch.repeat_interleave(torch.tensor(sizes, device=device))

    def length(v: Tensor) -> Tensor:
        return v.new_zeros(len(sizes)).index_add(0, owner, v.square()).sqrt()

    def unit(v: Tensor) -> Tensor:
        return v / length(v).clamp_min(1e-300)[owner]

    x = unit(torch.ones(n, dtype=torch.float64, device=device))
    root = x.new_zeros(len(sizes))
    for k in range(steps):
        y = (A @ x.unsqueeze(1)).squeeze(1)
        root, before = length(y), root
        if k % 16 == 0 and bool(((root - before).abs() <= tol * root).all()):
            break
        x = unit(y + 0.5 * root[owner] * x)
    return root
