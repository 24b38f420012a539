"""Our solutions beside those of SciPy's nonlinear and linear solvers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.linalg
import torch
from torch import Tensor

from tests import problems
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS, StopRule, make_solver, solve

D = 12
THEIRS = {
    "root": lambda g, z: scipy.optimize.root(g, z, tol=1e-12).x,
    "anderson": lambda g, z: scipy.optimize.anderson(g, z, f_tol=1e-11),
    "broyden1": lambda g, z: scipy.optimize.broyden1(g, z, f_tol=1e-11),
    "newton_krylov": lambda g, z: scipy.optimize.newton_krylov(g, z, f_tol=1e-11),
}


def chandrasekhar(z: Tensor) -> Tensor:
    """The H-equation as a fixed point, c = 0.9: a classic test of nonlinear solvers."""
    mu = (torch.arange(D, dtype=torch.float64) + 0.5) / D
    K = 0.9 / (2 * D) * mu[:, None] / (mu[:, None] + mu)
    return 1 / (1 - z @ K.mT)


def tanh_layer(z: Tensor) -> Tensor:
    f, _ = problems.tanh_layer(batch=1, d=D, gain=1.2)
    return f(z)


@pytest.mark.parametrize("f", [chandrasekhar, tanh_layer])
@pytest.mark.parametrize("theirs", list(THEIRS))
@pytest.mark.parametrize("name", list(SOLVERS))
def test_agrees_with_scipy(name: str, theirs: str, f: Any) -> None:
    start = np.full(D, 0.5)

    def g(z: Any) -> Any:
        t = torch.from_numpy(np.asarray(z, dtype=np.float64))[None]
        return (f(t) - t)[0].numpy()

    expected = THEIRS[theirs](g, start)
    found = solve(f, torch.from_numpy(start)[None], make_solver(name, {}), StopRule(400, 1e-10))
    np.testing.assert_allclose(found.z[0].numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("name", list(LINEAR))
def test_linear_solvers_agree_with_scipy(name: str) -> None:
    A = torch.eye(D, dtype=torch.float64) - problems.contraction(0.9, D)
    b = torch.randn(3, D, dtype=torch.float64)
    x, stats = LINEAR[name]().solve(lambda v: v @ A.mT, b, StopRule(500, 1e-11, "rel"))
    assert stats.converged.all()
    for row, rhs in zip(x, b, strict=True):
        theirs, failed = scipy.sparse.linalg.gmres(A.numpy(), rhs.numpy(), rtol=1e-12)
        assert not failed
        np.testing.assert_allclose(row.numpy(), theirs, atol=1e-8)
