"""Backward passes: how a solved state becomes a differentiable one."""

from torchdeq.grad.base import BACKWARDS, Backward, register_backward
from torchdeq.grad.factory import backward_factory, make_adjoint_solver, make_backwards
from torchdeq.grad.implicit import Implicit
from torchdeq.grad.phantom import Phantom
from torchdeq.grad.reversible import Reversible

BACKWARDS.seal()

__all__ = [
    "BACKWARDS",
    "Backward",
    "Implicit",
    "Phantom",
    "Reversible",
    "backward_factory",
    "make_adjoint_solver",
    "make_backwards",
    "register_backward",
]
