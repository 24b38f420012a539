"""Saved activations under somebody's hooks: unpack each once per backward pass, not per product.

A checkpoint around a DEQ keeps no activation and computes all of them again whenever one is
unpacked in a new backward pass; `save_on_cpu` copies each from the host. Every product with the
Jacobian is a backward pass of its own, so without care a whole solve would be repeated for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from torchdeq import _torch


class _Packed:
    """What the hooks made of one activation."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Activations:
    """The activations that a block saves, if hooks on saved tensors are at work around it."""

    def __init__(self) -> None:
        self._hooks = _torch.saved_tensor_hooks()
        self._packed: list[ref[_Packed]] = []
        self._unpacked: dict[int, Tensor] = {}
        self._held = False
        self._block = ExitStack()

    def __enter__(self) -> None:
        if self._hooks is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._block.enter_context(hooks)

    def __exit__(self, *error: object) -> None:
        self._block.close()

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Enter a block in which every activation is at hand; each is released by its last use."""
        if self._hooks is None:
            yield
            return
        alive = [packed for packed in (r() for r in self._packed) if packed is not None]
        self._unpacked = {id(packed): self._hooks[1](packed.value) for packed in alive}
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _pack(self, t: Tensor) -> _Packed:
        assert self._hooks is not None
        packed = _Packed(self._hooks[0](t))
        self._packed.append(ref(packed))
        return packed

    def _unpack(self, packed: _Packed) -> Tensor:
        assert self._hooks is not None
        held = self._unpacked.get if self._held else self._unpacked.pop
        t = held(id(packed), None)
        return self._hooks[1](packed.value) if t is None else t
