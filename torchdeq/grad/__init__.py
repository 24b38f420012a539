"""Backward passes: how a solved state becomes a differentiable one."""

from typing import TYPE_CHECKING

from torchdeq.grad.base import BACKWARDS, Backward, IteratingBackward, register_backward
from torchdeq.grad.factory import Writer, make_adjoint_solver, make_backwards
from torchdeq.grad.implicit import Implicit
from torchdeq.grad.phantom import Phantom

if TYPE_CHECKING:  # a published name, which torchdeq.compat.paths sets
    from torchdeq.compat.backward import backward_factory

BACKWARDS.seal()

__all__ = [
    "BACKWARDS",
    "Backward",
    "Implicit",
    "IteratingBackward",
    "Phantom",
    "Writer",
    "backward_factory",
    "make_adjoint_solver",
    "make_backwards",
    "register_backward",
]
