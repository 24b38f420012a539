"""Whether `f` writes into memory that a solver keeps: its input, or what it returned before.

A solver keeps states without copying them, so each output must be memory of its own. Writing is
found by the counter that torch keeps with a tensor and its views. Two kinds of tensors have no such
counter in common: those made in inference mode, and those that share memory behind torch's back
(`.data`, NumPy, DLPack).
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
    "f wrote into its input (or into the tensor it returned before): return a new tensor each "
    "time, e.g. end with .clone()"
)
_HIDDEN = (
    "f returned memory of its input or of an earlier output through something that hides writing "
    "from torch (.data, NumPy, DLPack): return a new tensor each time, e.g. end with .clone()"
)
_MANY = 64  # remembered outputs beyond which those that are gone are forgotten


class WriteGuard:
    """Raises if `f` wrote into its input or into an earlier output.

    Not found: writing into the input behind torch's back and returning something else.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[ref[Tensor], int | None]] = {}  # by address
        self._countable: Tensor | None = None

    def lend(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the input for `f`: tensors of inference mode as equals that count writing."""
        # Outside of inference mode torch itself refuses to write into such tensors; inside of a
        # function transform nobody else can see what is written.
        if not torch.is_inference_mode_enabled() or function_transforms_active():
            return tensors
        return [self._counting(t) if t.is_inference() else t for t in tensors]

    def _counting(self, t: Tensor) -> Tensor:
        """Return a tensor with a counter on the memory of one without, without a copy."""
        if self._countable is None:
            with torch.inference_mode(False):
                self._countable = torch.empty(0, dtype=t.dtype, device=t.device)
        counting: Tensor = self._countable.view(0).set_(t)  # type: ignore[call-overload]
        return counting

    def check(self, given: list[Tensor], before: list[int | None], outputs: list[Tensor]) -> None:
        """Raise if `f` wrote where it must not; copy outputs that it can write into unnoticed.

        Args:
            given: the input that was lent.
            before: its versions before the call.
            outputs: what `f` returned, in a list that alone refers to it; copies are put there.
        """
        if before != versions(given):
            raise RuntimeError(_WROTE)
        for i, now in enumerate(versions(outputs)):
            if now is None and _held_elsewhere(outputs, i):
                outputs[i] = outputs[i].clone()
                continue
            t = outputs[i]
            try:
                address, inputs = t.data_ptr(), [z.data_ptr() for z in given]
            except RuntimeError:  # a tensor of a function transform has no address
                continue
            if address in inputs:  # fine if torch knows: nothing was written
                _check_alias(t, now, given[inputs.index(address)])
                continue
            if address in self._outputs:
                self._check_memory(t, now, address)
            elif len(self._outputs) >= _MANY:
                self._outputs = {k: v for k, v in self._outputs.items() if v[0]() is not None}
            if address:  # a tensor without elements has none
                self._outputs[address] = ref(t), now

    def _check_memory(self, t: Tensor, now: int | None, address: int) -> None:
        """Raise if the earlier output at this address is still used and may have changed."""
        last, then = self._outputs[address]
        old = last()
        if old is not None:  # while it lives, nobody is given its memory anew
            _check_alias(t, now, old)
            if now != then:
                raise RuntimeError(_WROTE)


def _check_alias(t: Tensor, now: int | None, old: Tensor) -> None:
    """Raise unless torch sees that two tensors have the same memory, and so counts for both."""
    if t is not old and t.numel() and (now is None or not share_counter(old, t)):
        raise RuntimeError(_HIDDEN)


def _references(tensors: list[Tensor], i: int) -> int:
    return getrefcount(tensors[i])


_ALONE = _references([torch.empty(0)], 0)  # for a tensor in a list and nowhere else


def _held_elsewhere(tensors: list[Tensor], i: int) -> bool:
    """Return whether anything but the list refers to a tensor, or to its memory."""
    return _references(tensors, i) > _ALONE or has_other_owners(tensors[i])
