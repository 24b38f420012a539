"""Published import path of `deq_decorator`."""

from torchdeq.compat.decorator import deq_decorator

__all__ = ["deq_decorator"]
