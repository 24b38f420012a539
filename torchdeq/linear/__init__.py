"""Matrix-free linear solvers for adjoint and Newton systems."""

from torchdeq.linear.base import LINEAR, LinearSolver, register_linear_solver
from torchdeq.linear.bicgstab import BiCGStab
from torchdeq.linear.gmres import GMRES
from torchdeq.linear.neumann import Neumann
from torchdeq.linear.system import LinearSolution, Matvec, System

LINEAR.seal()

__all__ = [
    "GMRES",
    "LINEAR",
    "BiCGStab",
    "LinearSolution",
    "LinearSolver",
    "Matvec",
    "Neumann",
    "System",
    "register_linear_solver",
]
