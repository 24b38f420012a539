"""Saved activations under saved-tensor hooks: unpack each once per backward pass, not per product.

A checkpoint around a DEQ keeps no activation and recomputes all of them whenever one is unpacked in
a new backward pass; `save_on_cpu` copies each from the host. Every product with the Jacobian is a
backward pass of its own, so the hooks would repeat this work for each product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from torchdeq import _torch


class _PackedActivation:
    """The object that the surrounding hooks return for one activation."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Activations:
    """The activations that a block saves, if saved-tensor hooks are active around it."""

    def __init__(self) -> None:
        self._hooks = _torch.saved_tensor_hooks()
        self._packed: list[ref[_PackedActivation]] = []
        self._unpacked: dict[int, Tensor] = {}
        self._keep_unpacked = False
        self._context = ExitStack()

    def __enter__(self) -> None:
        if self._hooks is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._context.enter_context(hooks)

    def __exit__(self, *error: object) -> None:
        self._context.close()

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Keep all activations unpacked inside a block; the next use of each one releases it."""
        if self._hooks is None:
            yield
            return
        alive = [packed for packed in (r() for r in self._packed) if packed is not None]
        self._unpacked = {id(packed): self._hooks[1](packed.value) for packed in alive}
        self._keep_unpacked = True
        try:
            yield
        finally:
            self._keep_unpacked = False

    def _pack(self, t: Tensor) -> _PackedActivation:
        assert self._hooks is not None
        packed = _PackedActivation(self._hooks[0](t))
        self._packed.append(ref(packed))
        return packed

    def _unpack(self, packed: _PackedActivation) -> Tensor:
        assert self._hooks is not None
        look_up = self._unpacked.get if self._keep_unpacked else self._unpacked.pop
        t = look_up(id(packed), None)
        return self._hooks[1](packed.value) if t is None else t
