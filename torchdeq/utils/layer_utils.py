"""Published import path of `deq_decorator`."""

from torchdeq.legacy import deq_decorator

__all__ = ["deq_decorator"]
