"""Published import paths; the code lives elsewhere."""

from torchdeq.flags import add_deq_args
from torchdeq.initial import mixed_init
from torchdeq.memory import mem_gc

__all__ = ["add_deq_args", "mem_gc", "mixed_init"]
