"""The layout of a stream: samples without a batch dimension, packed as rows of matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdeq.packed import leaves_like
from torchdeq.packing import Leaf, Packing, fill_template
from torchdeq.pytree import State, map_tensors, walk

Rows = tuple[Tensor, list[Tensor]]  # starts (n, D), and each tensor of args (n, ...)


class Layout:
    """Structure, shapes, dtypes and device of the samples, fixed by a first one.

    Args:
        z0: the start of a sample, without a batch dimension.
        args: the further arguments of `f` for it.
    """

    def __init__(self, z0: State, args: tuple[Any, ...]) -> None:
        self.packing = Packing(map_tensors(z0, _batch_of_one))
        self.device = self.packing.device
        self._args = _arg_template(args)
        self._kinds = [(t.dtype, t.device) for _, t in walk(args)]

    @property
    def size(self) -> int:
        """Return D, the numbers in the state of one sample."""
        return sum(self.packing.sizes)

    def row(self, z0: State, args: tuple[Any, ...]) -> Rows:
        """Return one sample as rows of one; raise if it differs from the layout."""
        return self.rows(map_tensors(z0, _batch_of_one), map_tensors(args, _batch_of_one))

    def rows(self, z0: State, args: tuple[Any, ...]) -> Rows:
        """Return samples that are already a batch as rows; raise if they differ from the layout."""
        packing = self.packing
        states = list(leaves_like(packing.template, z0, "z0"))
        n = _batch(states[0])
        for t, leaf in zip(states, packing.leaves, strict=True):
            _check(f"z0{leaf.path}", t, n, leaf, packing.dtype, packing.device)
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"args must be a tuple of tensors, got {type(args).__name__}")
        tensors = list(leaves_like(self._args, tuple(args), "args"))
        for t, (path, leaf), kind in zip(tensors, walk(self._args), self._kinds, strict=True):
            _check(f"args{path}", t, n, leaf, *kind)
        return packing.join([t.detach() for t in states]), [t.detach() for t in tensors]

    def rebuild_args(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """Return the arguments of `f` around other tensors."""
        rebuilt: tuple[Any, ...] = fill_template(self._args, iter(tensors))
        return rebuilt

    def samples(self, z: Tensor) -> list[State]:
        """Return the rows of (n, D) as states without a batch dimension."""
        return split_samples(self.packing.unpack(z), len(z))


def split_samples(tree: Any, n: int) -> list[Any]:
    """Return a tree of tensors (n, ...) as n trees without the batch dimension."""
    return [map_tensors(tree, lambda t, i=i: t[i]) for i in range(n)]  # type: ignore[misc]


def join_rows(blocks: list[Rows]) -> Rows:
    """Return several blocks of rows as one."""
    if len(blocks) == 1:
        return blocks[0]
    columns = zip(*(args for _, args in blocks), strict=True)
    return torch.cat([z for z, _ in blocks]), [torch.cat(column) for column in columns]


def _batch_of_one(t: Tensor) -> Tensor:
    return t.unsqueeze(0)


def _batch(t: Tensor) -> int:
    return t.shape[0] if t.dim() else 1


def _arg_template(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the structure of the arguments, a `Leaf` for each tensor; raise for other values."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of tensors, got {type(args).__name__}")
    for path, leaf in walk(args):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"args of a request must be tensors, one row for each sample: got "
                f"{type(leaf).__name__} at args{path}; let f close over what all samples share"
            )
    template: tuple[Any, ...] = map_tensors(tuple(args), lambda t: Leaf.of("", t.unsqueeze(0)))
    return template


def _check(
    what: str, t: Tensor, n: int, leaf: Leaf, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `ValueError` unless a tensor is a batch of n samples like the first one."""
    if tuple(t.shape) != (n, *leaf.shape):
        raise ValueError(
            f"{what} of a sample has shape {tuple(t.shape[1:])}; the samples of this stream have "
            f"{leaf.shape}: pad it, or use another stream"
        )
    if t.dtype != dtype or t.device != device:
        raise ValueError(
            f"{what} of a sample is {t.dtype} on {t.device}; the samples of this stream are "
            f"{dtype} on {device}"
        )
