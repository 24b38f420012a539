"""Published import path of `add_deq_args`."""

from torchdeq.flags import add_deq_args

__all__ = ["add_deq_args"]
