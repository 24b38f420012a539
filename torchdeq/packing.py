"""The layout of a state: its tensors of shape (B, ...) side by side in one (B, D) matrix.

Solvers see a matrix with one row per sample. A state of one tensor is viewed, never copied; a state
of several tensors is concatenated, once per evaluation of `f`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from torchdeq.pytree import State, map_children, walk


@dataclass(frozen=True)
class Leaf:
    """The place of one tensor of the state in the rows of the matrix."""

    path: str
    dim: int  # dimensions of the tensor, with the batch; 0 for a single number
    shape: tuple[int, ...]  # the shape of one sample, as f sees it
    size: int  # numbers per sample
    order: tuple[int, ...] | None  # dimensions in the order of memory; None if not permuted

    @classmethod
    def of(cls, path: str, t: Tensor) -> Leaf:
        """Return the leaf of a tensor at a path of the state."""
        shape = tuple(t.shape[1:])
        return cls(path, t.dim(), shape, prod(shape), _channels_last(t))

    def to_rows(self, t: Tensor) -> Tensor:
        """Return (b, size), contiguous, from (b, ...): a view if `t` is laid out as the start."""
        if self.dim == 2:
            return t.contiguous()
        if self.order is not None:
            t = t.permute(self.order)
        return t.reshape(t.shape[0] if self.dim else 1, self.size).contiguous()

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return (b, ...) from (b, size)."""
        if self.dim == 2:
            return rows
        if self.dim == 0:
            return rows.reshape(())
        if self.order is None:
            return rows.reshape(rows.shape[0], *self.shape)
        rows = rows.reshape(rows.shape[0], *(self.shape[d - 1] for d in self.order[1:]))
        return rows.permute([self.order.index(d) for d in range(self.dim)])


class Packing:
    """The layout of a state, fixed by its start `z0`.

    `(N,)` is `N` samples of one number, a 0-d tensor one sample; every other tensor has the batch
    first. All tensors share batch size, device and one floating-point dtype.

    Args:
        z0: the start.
    """

    joint = False  # whether the matrix has one row for the whole batch, (1, B D)

    def __init__(self, z0: State) -> None:
        tensors = list(_tensors(z0))
        if not tensors:
            raise ValueError(
                "the state z0 holds no tensor; pass a tensor, or a tuple or dict of them"
            )
        for path, t in tensors:
            _check_tensor(path, t, *tensors[0])
        self.leaves = tuple(Leaf.of(path, t) for path, t in tensors)
        self.template = fill_template(z0, iter(self.leaves))  # the structure, without the tensors
        first = tensors[0][1]
        if first.is_meta:
            raise ValueError(
                "the state is on the meta device, where tensors have no values to solve for"
            )
        self.dtype, self.device = first.dtype, first.device
        self.batch = _batch(first)
        self.sizes = [leaf.size for leaf in self.leaves]
        self._width = sum(self.sizes)
        self._offsets = [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    def as_one_system(self) -> Self:
        """Return the layout whose matrix has one row, (1, B D): the same numbers in memory."""
        joint = copy(self)
        joint.joint = True
        return joint

    def pack(self, z: State) -> Tensor:
        """Return the state as a matrix."""
        return self.join([t for _, t in _tensors(z)])

    def unpack(self, z: Tensor) -> State:
        """Return the matrix as a state of the start's structure; its tensors are views of `z`."""
        return self.rebuild(self.split(z))

    def rebuild(self, tensors: list[Tensor]) -> State:
        """Return a state of the start's structure around other tensors."""
        return fill_template(self.template, iter(tensors))

    def join(self, tensors: list[Tensor], into: Tensor | None = None) -> Tensor:
        """Return the tensors as a matrix; `into` is a buffer for the matrix."""
        if self.joint:
            into = None if into is None else into.view(self.batch, self._width)
            return self._join(tensors, into).reshape(1, -1)
        return self._join(tensors, into)

    def _join(self, tensors: list[Tensor], into: Tensor | None) -> Tensor:
        if len(tensors) > 1:
            rows = [leaf.to_rows(t) for leaf, t in zip(self.leaves, tensors, strict=True)]
            return torch.cat(rows, dim=1, out=into)
        row = self.leaves[0].to_rows(tensors[0])
        if into is not None:
            into.copy_(row)
        return row

    def split(self, z: Tensor) -> list[Tensor]:
        """Return the tensors of the state, in order, as views of the matrix."""
        if self.joint:
            z = z.view(self.batch, self._width)
        if len(self.leaves) == 1:
            return [self.leaves[0].from_rows(z)]
        # Not split(): autograd forbids writing into one of several views created at once.
        parts = (z.narrow(1, at, size) for at, size in zip(self._offsets, self.sizes, strict=True))
        return [leaf.from_rows(rows) for leaf, rows in zip(self.leaves, parts, strict=True)]


def check_block(t: Tensor, what: str) -> None:
    """Raise `TypeError` unless `t` is a block of real numbers in the memory of this process."""
    if t.is_complex():
        raise TypeError(
            f"{what} is complex ({t.dtype}), and solvers compute with real numbers: use "
            "torch.view_as_real(z) as the state and torch.view_as_complex inside f"
        )
    if hasattr(t, "to_local"):
        raise TypeError(
            f"{what} is a {type(t).__name__}, spread over devices: solve for z.to_local() and let "
            "f communicate"
        )
    if t.is_nested:
        raise TypeError(
            f"{what} is a nested tensor: pad it with torch.nested.to_padded_tensor(z, 0.0)"
        )
    if t.layout is not torch.strided:
        raise TypeError(f"{what} is sparse ({t.layout}): make it dense, z.to_dense()")


def _tensors(z: State) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state, each with its path as error messages show it."""
    for path, leaf in walk(z):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"the state z0 must hold tensors only: got {type(leaf).__name__} at z0{path}"
            )
        yield f" at {path}" if path else "", leaf


def fill_template(template: State, leaves: Iterator[Any]) -> State:
    """Return the containers of `template` around other leaves."""
    if isinstance(template, (Tensor, Leaf)):
        return next(leaves)
    return map_children(template, lambda child: fill_template(child, leaves))


def _check_tensor(path: str, t: Tensor, first_path: str, first: Tensor) -> None:
    check_block(t, f"the state{path}")
    if not t.is_floating_point():
        raise TypeError(
            f"the state must be floating point: got {t.dtype}{path}; cast it with .float()"
        )
    if t.dtype.itemsize < 2:
        raise TypeError(
            f"no solver computes in {t.dtype}{path}: cast the state to torch.float32 and let f "
            "convert it"
        )
    if t.dtype != first.dtype:
        raise TypeError(
            f"the tensors of a state must share one dtype: got {first.dtype}{first_path} and "
            f"{t.dtype}{path}; cast them to one"
        )
    if t.device != first.device:
        raise ValueError(
            f"the tensors of a state must share one device: got {first.device}{first_path} and "
            f"{t.device}{path}"
        )
    if _batch(t) != _batch(first):
        raise ValueError(
            "the tensors of a state must share one batch size: got "
            f"{tuple(first.shape)}{first_path} and {tuple(t.shape)}{path}"
        )


def _channels_last(t: Tensor) -> tuple[int, ...] | None:
    """Return the order in memory of a channels-last tensor, None for every other layout."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if t.dim() not in formats or t.is_contiguous():
        return None
    try:
        if not t.is_contiguous(memory_format=formats[t.dim()]):
            return None
    except RuntimeError:  # vmap cannot tell for a slice
        return None
    return (0, *range(2, t.dim()), 1)


def _batch(t: Tensor) -> int:
    return t.shape[0] if t.dim() else 1
