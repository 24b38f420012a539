"""Autocast is for f: a solver's own arithmetic keeps the precision of the state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class AutocastState:
    """The autocast mode in force when this was made, to be suspended and restored."""

    def __init__(self, device: torch.device) -> None:
        kind = device.type
        self.enabled = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if self.enabled else None
        self._kind, self._cache = kind, torch.is_autocast_cache_enabled()

    def suspended(self) -> AbstractContextManager[Any]:
        """A block without autocast."""
        return torch.autocast(self._kind, enabled=False) if self.enabled else nullcontext()

    def restored(self) -> AbstractContextManager[Any]:
        """A block with autocast as it was."""
        if not self.enabled:
            return nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype, cache_enabled=self._cache)
