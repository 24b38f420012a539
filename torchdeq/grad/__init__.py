"""Backward passes: how a solved state becomes a differentiable one."""

from torchdeq.grad.base import BACKWARDS, Backward
from torchdeq.grad.implicit import Implicit
from torchdeq.grad.phantom import Phantom

__all__ = ["BACKWARDS", "Backward", "Implicit", "Phantom"]
