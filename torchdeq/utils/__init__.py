"""Published import paths; the code lives elsewhere."""

from torchdeq.utils import arg_utils, config, init, layer_utils, mem
from torchdeq.utils.arg_utils import add_deq_args
from torchdeq.utils.init import mixed_init
from torchdeq.utils.mem import mem_gc

__all__ = [
    "add_deq_args",
    "arg_utils",
    "config",
    "init",
    "layer_utils",
    "mem",
    "mem_gc",
    "mixed_init",
]
