"""Solves and the plain loops that they must agree with, in value and in gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdeq.experimental import Reversible
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, make_adjoint_solver
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS, FixedPointIter, StopRule

DOUBLE = torch.float64
TIGHT = StopRule(200, 1e-13)
ADJOINTS = [*SOLVERS, *LINEAR]
Map = Callable[[Tensor], Tensor]
every_adjoint = pytest.mark.parametrize("name", ADJOINTS)
both_paths = pytest.mark.parametrize("higher_order", [False, True])


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DOUBLE)


def implicit(name: str = "gmres", tol: float = 1e-12, **options: Any) -> Implicit:
    return Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(200, tol), **options)


def solved(f: Map, z0: Tensor, backward: Any, args: tuple[Any, ...] = ()) -> Tensor:
    """Return the equilibrium by plain iteration, or by the reversible one."""
    if isinstance(backward, Reversible):
        return fixed_point(f, z0, args, stop=StopRule(20, 0.0), backward=backward).z
    return fixed_point(f, z0, args, solver=FixedPointIter(), stop=TIGHT, backward=backward).z


def looped(f: Map, z: Tensor, backward: Any = None, args: tuple[Any, ...] = ()) -> Tensor:
    """Return what `solved` must return, with its gradient: a plain loop."""
    call: Any = f
    if isinstance(backward, Reversible):
        older = z
        for _ in range(20):
            older, z = z, (1 - backward.tau) * older + backward.tau * call(z, *args)
        return z
    for _ in range(100):
        z = call(z, *args)
    return z


def close(got: Any, expected: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-8)


def saved_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of all tensors that autograd saves for the backward pass of `run`."""
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(sizes)
