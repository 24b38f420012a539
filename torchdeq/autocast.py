"""Autocast applies to `f` only: the arithmetic of a solver keeps the precision of the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


class AutocastState:
    """A snapshot of the autocast mode, which can be suspended and restored.

    Autocast caches the weights that it has cast. Before torch 2.13 (2.9.1 is affected too), calls
    with grad mode reuse weights that were cast without grad mode, and then have no gradient. With
    such a torch, the cache is cleared after a solve, before anything is differentiated.
    """

    def __init__(self, device: torch.device) -> None:
        kind = device.type
        self.enabled = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if self.enabled else None
        self._kind, self._cache = kind, torch.is_autocast_cache_enabled()

    def suspended(self) -> AbstractContextManager[Any]:
        """Return a block without autocast."""
        if not self.enabled:
            return nullcontext()
        return self._clearing_cache(torch.autocast(self._kind, enabled=False))

    def restored(self) -> AbstractContextManager[Any]:
        """Return a block with the autocast mode of the snapshot."""
        if not self.enabled:
            return nullcontext()
        block = torch.autocast(self._kind, dtype=self.dtype, cache_enabled=self._cache)
        if torch.is_grad_enabled():
            self._clear_cache()
        elif torch.is_autocast_enabled(self._kind):  # outside a solve: a solve clears the cache
            return self._clearing_cache(block)
        return block

    @contextmanager
    def _clearing_cache(self, block: AbstractContextManager[Any]) -> Iterator[None]:
        """Run a block and clear the cache after it."""
        try:
            with block:
                yield
        finally:
            self._clear_cache()

    def _clear_cache(self) -> None:
        """Clear the cache of weights if this torch reuses weights without gradient."""
        if self._cache and casts_lose_gradients():
            torch.clear_autocast_cache()


@cache
def casts_lose_gradients() -> bool:
    """Return whether calls with grad mode reuse weights that autocast cast without grad mode."""
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.inference_mode(False), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(x, weight)
        with torch.enable_grad():
            return not torch.mm(x, weight).requires_grad
