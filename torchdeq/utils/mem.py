"""Published import path of `mem_gc`."""

from torchdeq.memory import mem_gc

__all__ = ["mem_gc"]
