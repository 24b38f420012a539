"""Published import path of `mixed_init`."""

from torchdeq.initial import mixed_init

__all__ = ["mixed_init"]
