"""Solves in distributed programs: shards stay gathered during a solve, processes stop together."""

from torchdeq.distributed.collectives import collective
from torchdeq.distributed.sharding import hold

__all__ = ["collective", "hold"]
