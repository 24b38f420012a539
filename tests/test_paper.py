"""The paper's snippets and commands, typed as a reader would type them."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests import problems
from torchdeq import (
    add_deq_args,
    apply_norm,
    fp_correction,
    get_deq,
    jac_reg,
    mem_gc,
    mixed_init,
    register_deq,
    register_norm,
    register_solver,
    reset_deq,
    reset_norm,
)
from torchdeq.core import DEQBase, DEQSliced
from torchdeq.deq import CORES
from torchdeq.norm import NORMS, WeightNorm
from torchdeq.solver import SOLVERS


class Injection(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


class MiniDEQ(nn.Module):
    """The paper's small DEQ: a normalised layer, and a DEQ built from arguments."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.f = Injection()
        apply_norm(self.f, args=args)
        self.deq = get_deq(args, **kwargs)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        reset_norm(self.f)
        return self.deq(lambda z: self.f(z, x), torch.zeros_like(x), **kwargs)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    add_deq_args(parser)
    return parser.parse_args(line.split())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8)


COMMANDS = [
    "--ift --f_solver anderson --b_solver broyden",
    "--ift --hook_ift --f_solver fixed_point_iter --b_solver anderson",
    "--ift --b_max_iter 30 --b_tol 0.001",
    "--grad 5 --tau 0.6",
    "--f_solver broyden --f_max_iter 30 --f_tol 1e-4 --f_stop_mode rel",
    "--f_max_iter 0 --grad 12 --tau 1.0",
    "--f_max_iter 10 --grad 5 --tau 1.0",
    "--indexing 20 30",
    "--core indexing --indexing 20 30",
    "--n_states 4",
    "--n_losses 2 --grad 3",
    "--n_states 3 --grad 1 2 3 --gamma 0.8",
    "--grad 6 --sup_gap 2",
    "--grad 6 --sup_loc 1 3",
    "--eval_factor 1.5",
    "--eval_f_max_iter 60",
    "--norm_type spectral_norm",
    "--norm_type weight_norm --norm_clip --norm_clip_value 0.8",
    "--norm_no_scale",
    "--norm_type none",
    "--norm_type spectral_norm --norm_target_norm 0.9 --norm_no_scale --sn_n_power_iters 2",
    "--jac_loss_weight 0.5 --jac_loss_freq 0.5 --jac_incremental 0",
    "--sradius_mode",
    "--f_solver simple_fixed_point_iter --grad 3",
    "--backward reversible --f_max_iter 12",
    "--ift --b_solver gmres --higher_order",
]


@pytest.mark.filterwarnings("ignore::torchdeq.ConvergenceWarning")
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_trains_and_evaluates(line: str, x: Tensor) -> None:
    args = parse(line)
    before = copy.deepcopy(vars(args))
    model = MiniDEQ(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    target, losses = torch.randn(4, 8).tanh(), []
    for _ in range(3):
        z_out, info = model(x)
        loss = fp_correction(F.mse_loss, (z_out, target), gamma=args.gamma)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        z_out, info = model.eval()(x)
    assert len(z_out) == 1
    assert info["abs_lowest"].shape == info["nstep"].shape
    assert vars(args) == before


def test_twelve_unrolled_steps_are_twelve_calls(x: Tensor) -> None:
    f, calls = problems.counted(lambda z: torch.tanh(0.5 * z + x))
    get_deq(parse("--f_max_iter 0 --grad 12 --tau 1.0"))(f, torch.zeros_like(x))
    assert len(calls) == 12


def test_truncated_backpropagation_through_time(x: Tensor) -> None:
    weight = torch.full((8,), 0.5, requires_grad=True)
    deq = get_deq(f_max_iter=10, f_tol=0.0, grad=5, tau=1.0)
    z_out, _ = deq(lambda z: torch.tanh(weight * z + x), torch.zeros_like(x))
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(10):
            z = torch.tanh(weight * z + x)
    for _ in range(5):
        z = torch.tanh(weight * z + x)
    got, expected = (torch.autograd.grad(t.sum(), weight)[0] for t in (z_out[-1], z))
    torch.testing.assert_close(got, expected)


def test_solver_options_of_one_call(x: Tensor) -> None:
    def f(z: Tensor) -> Tensor:
        return torch.tanh(0.5 * z + x)

    z0 = torch.zeros_like(x)
    get_deq(f_solver="anderson")(f, z0, solver_kwargs={"tau": 0.8, "m": 6})
    get_deq(f_solver="broyden")(f, z0, solver_kwargs={"l_thres": 5})
    get_deq(f_solver="broyden")(f, z0, solver_kwargs={"LBFGS_thres": 5})
    _, info = get_deq(f_tol=0.0)(f, z0, solver_kwargs={"f_max_iter": 7})
    assert info.nfe == 7


def test_random_iterations_and_mixed_initialisation(x: Tensor) -> None:
    deq = get_deq(f_tol=0.0, n_states=2)
    for budget in (4, 9):
        z0 = mixed_init(x.shape)
        assert 0 < (z0 == 0).float().mean() < 1
        z_out, info = deq(
            lambda z: torch.tanh(0.5 * z + x), z0, solver_kwargs={"f_max_iter": budget}
        )
        assert info.nfe == 2 * (budget // 2)
        assert len(z_out) == 2


def test_jacobian_regularisation_beside_an_implicit_loss(x: Tensor) -> None:
    model = MiniDEQ(ift=True)
    z_out, _ = model(x)
    z = z_out[-1].detach().requires_grad_()
    jac_loss = jac_reg(model.f(z, x), z, vecs=2)
    loss = z_out[-1].square().mean() + 0.5 * jac_loss
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_checkpointed_unrolling(x: Tensor) -> None:
    f = Injection()
    grads = []
    for step in (lambda z: mem_gc(f, (z, x)), lambda z: f(z, x)):
        z_out, _ = get_deq(f_max_iter=0, grad=5)(step, torch.zeros_like(x))
        grads.append(torch.autograd.grad(z_out[-1].sum(), list(f.parameters())))
    torch.testing.assert_close(*grads)


def test_fixed_point_reuse(x: Tensor) -> None:
    model = MiniDEQ(f_tol=1e-6)
    z_out, cold = model(x)
    reset_deq(model)
    _, warm = model.deq(lambda z: model.f(z, x), z_out[-1].detach())
    assert warm.nfe < cold.nfe


def test_forward_and_backward_are_monitored(x: Tensor) -> None:
    seen: list[Any] = []
    model = MiniDEQ(parse("--ift --f_solver anderson --b_solver broyden"))
    z_out, info = model(x, backward_writer=seen.append)
    z_out[-1].sum().backward()
    for stats in (info, *seen):
        assert set(stats) >= {"abs_lowest", "rel_lowest", "abs_trace", "rel_trace", "nstep"}
    assert len(seen) == 1


def test_what_is_registered_after_the_parser_was_built_is_usable_by_name(x: Tensor) -> None:
    parser = argparse.ArgumentParser()
    add_deq_args(parser)

    def solver(func: Any, x0: Tensor, max_iter: int, tol: float, stop_mode: str, **kw: Any) -> Any:
        for _ in range(max_iter):
            x0 = func(x0)
        return x0, [], {}

    class Norm(WeightNorm):
        pass

    class Core(DEQSliced):
        pass

    try:
        register_solver("late_solver", solver)
        register_norm("late_norm", Norm)
        register_deq("late_core", Core)
        line = (
            "--f_solver late_solver --b_solver late_solver --norm_type late_norm --core late_core"
        )
        model = MiniDEQ(parser.parse_args([*line.split(), "--ift"]))
        assert isinstance(model.deq, Core)
        assert isinstance(model.deq, DEQBase)
        assert "linear.weight_g" in model.f.state_dict()
        model(x)[0][-1].sum().backward()
    finally:
        for registry, name in (
            (SOLVERS, "late_solver"),
            (NORMS, "late_norm"),
            (CORES, "late_core"),
        ):
            registry._entries.pop(name, None)
