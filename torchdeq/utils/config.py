"""Published import path of `DEQConfig`."""

from torchdeq.config import DEQConfig

__all__ = ["DEQConfig"]
