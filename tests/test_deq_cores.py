"""Cores and solvers that a program registers or defines itself."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers import DOUBLE, Layer
from torchdeq import get_deq, register_deq, register_solver
from torchdeq.core import DEQBase, DEQSliced, ForwardPass
from torchdeq.deq import CORES, Output
from torchdeq.grad import backward_factory
from torchdeq.solver import SOLVERS
from torchdeq.utils.layer_utils import deq_decorator


def test_a_core_with_a_forward_of_its_own_may_name_its_attributes_like_options() -> None:
    class Own(DEQBase):
        def __init__(self, args: Any = None, **kwargs: Any) -> None:
            super().__init__(args, **kwargs)
            self.indexing = [5, 5, 5]  # slices, as in 0.1.0: no value of the option
            self.gamma = "mine"
            self.tau = self.args.get("tau", 1.0)

        def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return [self.tau * func(z_init)] * len(self.indexing), {}

    deq = Own(tau=0.5)
    deq.tau = 7.0
    states, _ = deq(torch.cos, torch.zeros(2))
    assert (deq.gamma, len(states)) == ("mine", 3)
    torch.testing.assert_close(states[0], torch.full((2,), 7.0))

    class Around(DEQSliced):
        def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(func, z_init, **kwargs)

    layer = Layer()
    around = Around(grad=3)
    around.tau = 0.5
    expected, _ = get_deq(grad=3, tau=0.5)(layer, layer.z0)
    torch.testing.assert_close(around(layer, layer.z0)[0], expected, rtol=0, atol=0)
    around.tau = 7.0
    with pytest.raises(ValueError, match="tau must lie"):
        around(layer, layer.z0)


class TestRegistration:
    """Tests of solvers and cores that a program registers after it has built its parser."""

    @pytest.fixture(autouse=True)
    def _clean(self) -> Any:
        yield
        for registry, name in ((SOLVERS, "halving"), (CORES, "mine"), (CORES, "old")):
            registry._entries.pop(name, None)

    def test_an_old_style_solver_function(self) -> None:
        def halving(func: Any, x0: Tensor, max_iter: int = 50, tol: float = 1e-3,
                    stop_mode: str = "abs", tau: float = 0.5, **kwargs: Any) -> Any:  # fmt: skip
            z = x0
            for _ in range(max_iter):
                z = tau * func(z) + (1 - tau) * z
            return z, [], {}

        register_solver("halving", halving)
        deq = get_deq(argparse.Namespace(f_solver="halving", f_max_iter=60, ift=True))
        assert deq.f_solver is halving
        layer = Layer()
        (z,), info = deq(layer, layer.z0, solver_kwargs={"tau": 0.7})
        assert info.nfe == 60
        torch.testing.assert_close(z, layer.iterate(100), rtol=0, atol=1e-6)

    def test_a_core_with_an_option_of_its_own(self) -> None:
        class Mine(DEQBase):
            def __init__(self, args: Any = None, extra_steps: int = 2, **options: Any) -> None:
                super().__init__(args, **options)
                self.extra_steps = extra_steps

            def train_states(self, call: ForwardPass, budget: int) -> Output:
                (backward,) = call.backwards(1)
                solution = call.solve(call.z0, budget + self.extra_steps, backward)
                return solution.states, solution.stats

        register_deq("mine", Mine)
        layer = Layer(0.99)
        for deq in (
            get_deq(core="mine", extra_steps=5, f_tol=0.0, f_max_iter=4),
            get_deq({"core": "mine", "extra_steps": 5, "f_tol": 0.0, "f_max_iter": 4}),
            get_deq(argparse.Namespace(core="mine", extra_steps=5, f_tol=0.0, f_max_iter=4, lr=1)),
        ):
            assert deq(layer, layer.z0)[1].nfe == 9
        with pytest.raises(TypeError, match="unknown option 'extra_steps'"):
            get_deq(core="sliced", extra_steps=5)
        with pytest.raises(TypeError, match="a core must be a class"):
            register_deq("other", lambda config: None)  # type: ignore[arg-type]

    def test_a_core_that_takes_any_keyword(self) -> None:
        class Open(DEQSliced):
            def __init__(self, args: Any = None, **kwargs: Any) -> None:
                super().__init__(args, **kwargs)
                self.own = self.args.get("own", 1)

        register_deq("mine", Open)
        assert get_deq(core="mine", own=4).own == 4
        assert get_deq({"core": "mine", "own": 4, "tau": 0.5}).own == 4
        with pytest.warns(UserWarning, match="'f_maxiter' is not an option"):
            get_deq(core="mine", f_maxiter=4)

    def test_a_core_written_for_0_1_0(self) -> None:
        class Old(DEQBase):
            def __init__(self, args: Any = None, shift: int = 1, **kwargs: Any) -> None:
                super().__init__(args=args, **kwargs)
                self.shift = self.args.get("shift", shift)
                self.produce_grad = backward_factory(
                    grad_type="ift", b_solver=self.b_solver,
                    b_solver_kwargs={"max_iter": self.b_max_iter, "tol": self.b_tol,
                                     "stop_mode": self.b_stop_mode},
                )  # fmt: skip

            def _solve_fixed_point(self, deq_func: Any, z_init: Tensor, f_max_iter: int) -> Any:
                with torch.no_grad():
                    z_star, _, info = self.f_solver(
                        deq_func, x0=z_init, max_iter=f_max_iter, tol=self.f_tol,
                        stop_mode=self.f_stop_mode,
                    )  # fmt: skip
                return z_star, info

            def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                deq_func, z = deq_decorator(func, z_init, no_stat=self.no_stat)
                z_star, info = self._solve_fixed_point(deq_func, z, self.f_max_iter + self.shift)
                out = self.produce_grad(self, deq_func, deq_func.detach(z_star))
                return [deq_func.vec2list(each) for each in out], info

        register_deq("old", Old)
        x = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
        deq = get_deq(core="old", shift=2, f_solver="anderson", f_tol=1e-12, f_max_iter=80,
                      b_tol=1e-12, b_max_iter=80)  # fmt: skip

        def pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * torch.cos(b) + x, 0.5 * torch.sin(a)

        zero = torch.zeros_like(x).detach()
        ((a, b),), _ = deq(pair, (zero, zero))
        reference = (zero, zero)
        for _ in range(100):
            reference = pair(*reference)
        torch.testing.assert_close((a, b), reference)
        got, expected = (torch.autograd.grad((u * v).sum(), x)[0] for u, v in ((a, b), reference))
        torch.testing.assert_close(got, expected)
