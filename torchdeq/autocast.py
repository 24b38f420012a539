"""Autocast is for f: a solver's own arithmetic keeps the precision of the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


class AutocastState:
    """The autocast mode in force when this was made, to be suspended and restored.

    Autocast keeps the weights it has cast. Before torch 2.13 (2.9.1 still does so) weights cast
    without grad mode serve calls with grad mode too, which then have no gradient: there the weights
    of a solve are forgotten before anything is differentiated.
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
        return self._forgetting(torch.autocast(self._kind, enabled=False))

    def restored(self) -> AbstractContextManager[Any]:
        """Return a block with autocast as it was."""
        if not self.enabled:
            return nullcontext()
        again = torch.autocast(self._kind, dtype=self.dtype, cache_enabled=self._cache)
        if torch.is_grad_enabled():
            self._forget()
        elif torch.is_autocast_enabled(self._kind):  # a single call: no solve that forgets after it
            return self._forgetting(again)
        return again

    @contextmanager
    def _forgetting(self, block: AbstractContextManager[Any]) -> Iterator[None]:
        try:
            with block:
                yield
        finally:
            self._forget()

    def _forget(self) -> None:
        if self._cache and casts_lose_gradients():
            torch.clear_autocast_cache()


@cache
def casts_lose_gradients() -> bool:
    """Return whether a weight that autocast has cast without grad mode has no gradient later."""
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.inference_mode(False), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(x, weight)
        with torch.enable_grad():
            return not torch.mm(x, weight).requires_grad
