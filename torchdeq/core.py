"""DEQ modules under their published path."""

from torchdeq.deq import DEQBase, DEQIndexing, DEQSliced, get_deq, register_deq, reset_deq

__all__ = ["DEQBase", "DEQIndexing", "DEQSliced", "get_deq", "register_deq", "reset_deq"]
