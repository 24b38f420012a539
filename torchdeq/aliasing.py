"""A check that `f` does not write into memory that a solver uses: inputs and earlier outputs.

A solver stores states without copying them, so each output of `f` must have memory of its own.
Torch counts the writes into a tensor and its views by a version counter, which the check compares.
Two kinds of tensors have no common counter: inference tensors, and tensors that use the same memory
without torch knowing it (through `.data`, NumPy or DLPack).
"""

from __future__ import annotations

from sys import getrefcount
from weakref import ref

import torch
from torch import Tensor

from torchdeq._torch import (
    function_transforms_active,
    has_other_owners,
    share_counter,
    versions,
)

_WROTE = (
    "f wrote into its input, or into a tensor that it returned before: return a new tensor each "
    "time, e.g. end with .clone()"
)
_HIDDEN = (
    "f returned memory of its input or of an earlier output through something that hides writes "
    "from torch (.data, NumPy, DLPack): return a new tensor each time, e.g. end with .clone()"
)
_MANY = 64  # with more outputs than this, drop the entries of deleted tensors


class WriteGuard:
    """A check for each call of `f`: raises if `f` wrote into its input or an earlier output.

    It cannot detect a write into the input through `.data`, NumPy or DLPack if `f` then returns
    other memory.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[ref[Tensor], int | None]] = {}  # by address
        self._countable: Tensor | None = None

    def prepare_input(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the input for `f`: aliases that count writes in the place of inference tensors."""
        # Outside inference mode, torch itself refuses writes into inference tensors; inside a
        # function transform, a write affects no other tensor.
        if not torch.is_inference_mode_enabled() or function_transforms_active():
            return tensors
        return [self._counting(t) if t.is_inference() else t for t in tensors]

    def _counting(self, t: Tensor) -> Tensor:
        """Return a tensor with a version counter that uses the memory of `t`."""
        if self._countable is None:
            with torch.inference_mode(False):
                self._countable = torch.empty(0, dtype=t.dtype, device=t.device)
        counting: Tensor = self._countable.view(0).set_(t)  # type: ignore[call-overload]
        return counting

    def check(self, inputs: list[Tensor], before: list[int | None], outputs: list[Tensor]) -> None:
        """Raise if `f` wrote into its input or an earlier output; copy outputs without a counter.

        An inference tensor has no counter. If `f` still refers to one that it returned, `f` could
        write into this output later, so a copy replaces the output.

        Args:
            inputs: the input, as `prepare_input` returned it.
            before: the versions of the input before the call.
            outputs: the outputs of `f`; no other list may refer to them. Copies replace outputs in
                this list.
        """
        if before != versions(inputs):
            raise RuntimeError(_WROTE)
        for i, now in enumerate(versions(outputs)):
            if now is None and _has_other_references(outputs, i):
                outputs[i] = outputs[i].clone()
                continue
            t = outputs[i]
            try:
                address, addresses = t.data_ptr(), [z.data_ptr() for z in inputs]
            except RuntimeError:  # a tensor of a function transform has no address
                continue
            if address in addresses:  # a view of the input, into which `f` has not written
                _check_alias(t, now, inputs[addresses.index(address)])
                continue
            if address in self._outputs:
                self._check_memory(t, now, address)
            elif len(self._outputs) >= _MANY:
                self._outputs = {k: v for k, v in self._outputs.items() if v[0]() is not None}
            if address:  # an empty tensor has no address
                self._outputs[address] = ref(t), now

    def _check_memory(self, t: Tensor, now: int | None, address: int) -> None:
        """Raise if the earlier output at this address is still used and may have changed."""
        reference, before = self._outputs[address]
        old = reference()
        if old is not None:  # as long as the tensor exists, torch does not reuse its memory
            _check_alias(t, now, old)
            if now != before:
                raise RuntimeError(_WROTE)


def _check_alias(t: Tensor, now: int | None, old: Tensor) -> None:
    """Raise unless two tensors with the same memory have a common version counter."""
    if t is not old and t.numel() and (now is None or not share_counter(old, t)):
        raise RuntimeError(_HIDDEN)


def _references(tensors: list[Tensor], i: int) -> int:
    """Return Python's count of references to a tensor in a list."""
    return getrefcount(tensors[i])


_LIST_ONLY = _references([torch.empty(0)], 0)  # the count for a tensor to which only a list refers


def _has_other_references(tensors: list[Tensor], i: int) -> bool:
    """Return whether anything but the list refers to a tensor, or to its memory."""
    return _references(tensors, i) > _LIST_ONLY or has_other_owners(tensors[i])
