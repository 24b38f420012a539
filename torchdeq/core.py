"""Published import path of the DEQ modules."""

from torchdeq.deq import DEQBase, DEQIndexing, DEQSliced, get_deq, register_deq, reset_deq
from torchdeq.forward_pass import ForwardPass

__all__ = [
    "DEQBase",
    "DEQIndexing",
    "DEQSliced",
    "ForwardPass",
    "get_deq",
    "register_deq",
    "reset_deq",
]
