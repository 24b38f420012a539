"""`f` on the rows of a stream: an error in `f` ends only the samples that cause it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdeq.packed import PackedFn, split_pair
from torchdeq.pytree import State, map_tensors, take_rows, tensors_of, walk
from torchdeq.solver.base import FixedPointFn

Halt = Callable[[State, Any], Tensor]


class OwnOutput:
    """The map of the caller, whose outputs never share memory with the arguments of the stream.

    The stream writes new samples into the rows of the arguments, so an output in the same memory
    would change with them. With `has_aux`, the second value of `f` is kept in `aux`.
    """

    def __init__(self, f: Callable[..., Any], has_aux: bool) -> None:
        self.f, self.has_aux = f, has_aux
        self.aux: Any = None
        self.addresses: frozenset[int] = frozenset()

    def guard(self, args: list[Tensor]) -> None:
        """Set the tensors whose memory no output may share."""
        self.addresses = frozenset(map(_address, args)) - {0}

    def __call__(self, *inputs: Any) -> State:
        out = self.f(*inputs)
        if self.has_aux:
            out, self.aux = split_pair(out)
            _check_aux(self.aux, len(tensors_of(inputs)[0]))
        return map_tensors(out, self._own) if self.addresses else out

    def _own(self, t: Tensor) -> Tensor:
        return t.clone() if _address(t) in self.addresses else t


class IsolatingFn(FixedPointFn):
    """The packed map of a stream.

    If `f` raises, it is called again for each sample alone: the image of samples for which it
    raises again is NaN, and `errors` has the error by the number of the row.
    """

    def __init__(self, packed: PackedFn, own: OwnOutput) -> None:
        super().__init__(packed, 0)
        self.own = own
        self.calls = 0  # of `f`, those for single samples included
        self.errors: dict[int, Exception] = {}

    def allow(self, evaluations: int) -> None:
        """Set how many evaluations the samples may still need, which sizes a solver's memory."""
        self.budget = self.nfe + evaluations

    def __call__(self, z: Tensor, into: Tensor | None = None) -> Tensor:
        self.spend()
        self.calls += 1
        try:
            fz = self.packed(z, into)
        except Exception:  # whatever it is, the samples that do not cause it go on
            fz = self._row_by_row(z)
            if into is not None:
                into.copy_(fz)
        return fz.detach() if fz.requires_grad else fz

    def _row_by_row(self, z: Tensor) -> Tensor:
        """Return f(z) computed for each row alone; rows for which `f` raises are NaN."""
        fz, aux = torch.full_like(z, torch.nan), {}
        for i in range(len(z)):
            row = torch.tensor([i], device=z.device)
            self.calls += 1
            try:
                fz[i] = self.packed.take(row)(z[i : i + 1].clone())[0]
                aux[i] = self.own.aux
            except Exception as error:
                self.errors[i] = error
        if self.own.has_aux and aux:
            anyone = next(iter(aux.values()))  # stands in for rows that failed; nobody sees it
            self.own.aux = cat_rows([aux.get(i, anyone) for i in range(len(z))])
        return fz

    def halted(self, halt: Halt, z: Tensor) -> Tensor:
        """Return (b,) which samples the rule of the caller halts at the states (b, D)."""
        unpack = self.packed.packing.unpack
        try:
            return _flags(halt(unpack(z), self.own.aux), len(z))
        except Exception:
            flags = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        for i in range(len(z)):
            row = torch.tensor([i], device=z.device)
            try:
                aux = take_rows(self.own.aux, row)
                flags[i] = _flags(halt(unpack(z.index_select(0, row)), aux), 1)[0]
            except Exception as error:
                self.errors.setdefault(i, error)
                flags[i] = True  # ends the sample, with this error
        return flags


def cat_rows(trees: list[Any]) -> Any:
    """Return trees of tensors (n, ...) with equal structure as one tree, along the batch."""
    columns = zip(*(tensors_of(tree) for tree in trees), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return map_tensors(trees[0], lambda _: next(joined))


def _check_aux(aux: Any, batch: int) -> None:
    """Raise `ValueError` unless every tensor of `aux` has a row for each sample."""
    for path, leaf in walk(aux):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != batch):
            raise ValueError(
                f"a stream needs the batch of {batch} as the first dimension of every tensor in "
                f"aux: got shape {tuple(leaf.shape)} at aux{path}"
            )


def _address(t: Tensor) -> int:
    """Return the address of the memory behind a tensor; 0 if it has none."""
    try:
        return t.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _flags(flags: object, batch: int) -> Tensor:
    """Return the answer of a halting rule; raise `TypeError` unless it is one flag per sample."""
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool or flags.shape != (batch,):
        got = (
            f"{flags.dtype} of shape {tuple(flags.shape)}"
            if isinstance(flags, Tensor)
            else type(flags).__name__
        )
        raise TypeError(f"halt must return a tensor of {batch} flags (torch.bool): got {got}")
    return flags
