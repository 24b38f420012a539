"""Properties of every registered backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import problems
from torchdeq import apply_norm, reset_deq
from torchdeq.dropout import VariationalDropout
from torchdeq.functional import fixed_point
from torchdeq.grad import (
    BACKWARDS,
    Backward,
    Implicit,
    Phantom,
    make_adjoint_solver,
    register_backward,
)
from torchdeq.packed import PackedFn
from torchdeq.solver import Anderson, ConvergenceWarning, StopRule

NAMES = list(BACKWARDS)
DOUBLE = torch.float64


def run(name: str, f: Any, z0: Any, stop: StopRule | None = None, **options: Any) -> Any:
    solver = None if name == "reversible" else Anderson()
    stop = stop or StopRule(40, 1e-6)
    return fixed_point(f, z0, solver=solver, stop=stop, backward=BACKWARDS[name](),
                       on_failure="ignore", **options)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_values_follow_the_grad_mode_in_nothing(name: str) -> None:
    f, z0 = problems.tanh_layer()
    x = torch.zeros_like(z0).requires_grad_()
    attached = run(name, lambda z: f(z) + x, z0).z
    with torch.no_grad():
        without_graph = run(name, lambda z: f(z) + x, z0).z
    assert attached.requires_grad
    assert not without_graph.requires_grad
    assert torch.equal(attached, without_graph)


@pytest.mark.parametrize("name", NAMES)
def test_the_kept_estimate_is_the_same_with_and_without_a_graph(name: str) -> None:
    f, z0 = problems.tanh_layer()
    x = torch.zeros_like(z0).requires_grad_()
    attached = run(name, lambda z: f(z) + x, z0, keep_estimate=True).z
    with torch.no_grad():
        without_graph = run(name, lambda z: f(z) + x, z0, keep_estimate=True).z
    assert torch.equal(attached, without_graph)
    assert torch.autograd.grad(attached.sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_without_anything_to_differentiate_there_is_no_graph(name: str) -> None:
    f, z0 = problems.tanh_layer()
    assert not run(name, f, z0).z.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_approaches_the_exact_gradient_where_the_map_contracts_strongly(name: str) -> None:
    A = problems.contraction(0.05, 6)
    b = torch.randn(3, 6, dtype=DOUBLE, requires_grad=True)
    z = run(name, lambda z: z @ A.mT + b, torch.zeros_like(b), StopRule(40, 0.0)).z
    g = torch.randn(3, 6, dtype=DOUBLE)
    (got,) = torch.autograd.grad(z, b, g)
    exact = torch.linalg.solve((torch.eye(6, dtype=DOUBLE) - A).mT, g.mT).mT
    assert float((got - exact).norm() / exact.norm()) < 0.06


@pytest.mark.parametrize("name", NAMES)
def test_modules_closures_and_arguments_receive_gradients_in_training_and_evaluation(
    name: str,
) -> None:
    net = nn.Linear(4, 4)
    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    for training in (True, False):
        net.train(training)
        z0 = torch.zeros(2, 4)
        z = run(name, lambda z, y: torch.tanh(0.3 * net(z) + x + y), z0, args=(y,)).z
        grads = torch.autograd.grad(z.square().sum(), (x, y, *net.parameters()))
        assert all(g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (2, 0), (), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_precision(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    z = run(name, lambda z: 0.5 * z + x, torch.zeros(shape, dtype=dtype), StopRule(4, 1e-1)).z
    assert z.shape == x.shape
    assert z.dtype == dtype
    (grad,) = torch.autograd.grad(z.sum(), x)
    assert grad.shape == x.shape
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_the_start(name: str) -> None:
    x = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    z0 = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    (grad,) = torch.autograd.grad(run(name, lambda z: torch.tanh(0.5 * z + x), z0).z.sum(), z0)
    assert torch.equal(grad, torch.zeros_like(z0)) == (name != "reversible")
    (first, second) = run(name, lambda a, b: (0.5 * b + x, 0.5 * a), (z0, z0.detach())).z
    (grad,) = torch.autograd.grad((first * second).sum(), z0)
    assert grad.abs().max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_f_uses_only_at_some_states_receives_its_gradient(name: str) -> None:
    """Only the first call, at zero, uses the tensor `near`; all others use `far`."""
    near = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    far = (0.3 * torch.randn(4, 4, dtype=DOUBLE)).requires_grad_()
    x = 2 + torch.rand(3, 4, dtype=DOUBLE)

    def f(z: Tensor) -> Tensor:
        if bool(z.abs().max() < 0.5):
            return x + near.tanh()
        return x + 0.4 * torch.tanh(z @ far)

    z = run(name, f, torch.zeros_like(x), StopRule(40, 0.0)).z
    got = torch.autograd.grad(z.square().sum(), (near, far), materialize_grads=True)
    end = z.detach()
    for _ in range(60):  # near the fixed point f does not use the other tensor
        end = f(end)
    exact = torch.autograd.grad(end.square().sum(), far)[0]
    tolerance = 0.5 if name == "phantom" else 1e-5  # phantom takes one step by default
    assert float((got[1] - exact).norm() / exact.norm()) < tolerance
    assert float(got[0].abs().max()) < 1e-4  # a reversible iteration has a small rest of it


@pytest.mark.parametrize("name", NAMES)
def test_a_cotangent_that_is_not_a_number_spoils_its_own_sample_alone(name: str) -> None:
    f, z0 = problems.tanh_layer(gain=0.5)
    x = torch.zeros_like(z0).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        g = torch.randn_like(z0)
        (clean,) = torch.autograd.grad(run(name, lambda z: f(z) + x, z0).z, x, g)
        g[1, 0] = torch.nan
        (got,) = torch.autograd.grad(run(name, lambda z: f(z) + x, z0).z, x, g)
    others = torch.arange(len(z0)) != 1
    torch.testing.assert_close(got[others], clean[others], rtol=1e-5, atol=1e-6)
    assert got[1].isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_several_cotangents_at_once(name: str) -> None:
    W = problems.contraction(0.7, 4).requires_grad_()
    x = torch.randn(2, 4, dtype=DOUBLE)
    z = run(name, lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x), StopRule(100, 1e-12)).z
    cotangents = torch.randn(5, 2, 4, dtype=DOUBLE)
    if name == "reversible":
        with pytest.raises(RuntimeError, match="one cotangent"):
            torch.autograd.grad(z, W, cotangents, is_grads_batched=True)
        return
    (together,) = torch.autograd.grad(z, W, cotangents, is_grads_batched=True, retain_graph=True)
    for g, got in zip(cotangents, together, strict=True):
        torch.testing.assert_close(got, torch.autograd.grad(z, W, g, retain_graph=True)[0])


def test_a_users_own_backward_is_known_by_name() -> None:
    @dataclass(frozen=True)
    class Twice(Backward):
        def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
            return Phantom(grad=2).attach(f, z)

    register_backward("twice", Twice)
    assert BACKWARDS["twice"] is Twice
    del BACKWARDS._entries["twice"]
    with pytest.raises(ValueError, match="built in"):
        register_backward("ift", Twice)
    with pytest.raises(TypeError, match="a dataclass derived from Backward"):
        register_backward("other", lambda f, z: [z])  # type: ignore[arg-type]


def test_sampled_states_have_backwards_of_their_own() -> None:
    f, z0 = problems.tanh_layer(gain=0.5)
    x = torch.zeros_like(z0).requires_grad_()
    states = fixed_point(lambda z: f(z) + x, z0, stop=StopRule(60, 1e-10),
                         record=[(3, Phantom()), (7, Phantom(grad=2, sup_gap=1))],
                         backward=Implicit()).states  # fmt: skip
    assert len(states) == 4
    residuals = [float((f(z) - z).norm().detach()) for z in states]
    assert residuals == sorted(residuals, reverse=True)
    assert all(z.requires_grad for z in states)

    def loss(x: Tensor) -> Tensor:
        states = fixed_point(lambda z: f(z) + x, z0, stop=StopRule(60, 1e-10),
                             record=[(3, Phantom())], backward=Implicit(),
                             on_failure="ignore").states  # fmt: skip
        return states[0].sum() + states[1].square().sum()

    torch.testing.assert_close(
        torch.func.grad(loss)(x.detach()), torch.autograd.grad(loss(x), x)[0]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("higher_order", [False, True])
def test_two_forward_passes_do_not_see_each_others_modules(name: str, higher_order: bool) -> None:
    """The backward of a pass sees the tensors that its own forward left on the module."""
    if higher_order and name != "ift":
        pytest.skip("only implicit differentiation has the option")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()
            self.drop = VariationalDropout(0.3)
            apply_norm(self.linear)

        def cell(self, z: Tensor) -> Tensor:
            return self.drop(torch.tanh(0.5 * self.linear(z) + self.x))

        def forward(self, x: Tensor) -> Tensor:
            reset_deq(self)
            self.x = x
            backward = Implicit(higher_order=True) if higher_order else BACKWARDS[name]()
            solver = None if name == "reversible" else Anderson()
            z: Tensor = fixed_point(self.cell, torch.zeros_like(x), solver=solver,
                                    stop=StopRule(12, 0.0), backward=backward).z  # fmt: skip
            return z

    model = Model()
    inputs = [torch.randn(3, 4, dtype=DOUBLE, requires_grad=True) for _ in range(2)]
    leaves = (inputs[0], *model.parameters())
    torch.manual_seed(1)
    alone = torch.autograd.grad(model(inputs[0]).square().sum(), leaves)
    torch.manual_seed(1)
    first = model(inputs[0])
    model(inputs[1])
    model.eval()
    torch.testing.assert_close(torch.autograd.grad(first.square().sum(), leaves), alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [False, True])
def test_what_comes_out_may_be_written_to(name: str, keep: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * b + x, 0.5 * a

    start = (torch.zeros(3, 4), torch.zeros(3, 4))
    grads: list[Tensor] = []
    for write in (False, True):
        a, b = run(name, pair, start, keep_estimate=keep).z
        a = a.mul_(2) if write else a * 2
        grads += torch.autograd.grad((a + b).sum(), x)
    torch.testing.assert_close(*grads)
    z = run(name, lambda z: 0.5 * z + x, torch.zeros(3, 4), keep_estimate=keep).z
    nn.ReLU(inplace=True)(z).sum().backward()


def test_evaluation_of_a_map_without_a_graph_is_the_estimate() -> None:
    with torch.no_grad():
        weight = torch.ones(4)

    @torch.no_grad()
    def f(z: Tensor) -> Tensor:
        return 0.5 * z + weight

    z = run("ift", f, torch.zeros(2, 4), keep_estimate=True).z
    assert not z.requires_grad
    with pytest.raises(RuntimeError, match="without a graph"):
        run("ift", f, torch.zeros(2, 4))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("solver", ["gmres", "anderson"])
def test_cotangents_of_any_size(scale: float, solver: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    backward = Implicit(solver=make_adjoint_solver(solver, {}), stop=StopRule(60, 1e-5))
    z = fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros(3, 8), backward=backward,
                    stop=StopRule(60, 1e-6)).z  # fmt: skip
    (one,) = torch.autograd.grad(z, x, torch.ones(3, 8), retain_graph=True)
    (got,) = torch.autograd.grad(z, x, torch.full((3, 8), scale))
    torch.testing.assert_close(got / scale, one, rtol=1e-4, atol=1e-6)


def test_half_precision_cotangents_do_not_overflow() -> None:
    x = torch.randn(2, 20000, dtype=torch.float16, requires_grad=True)
    z = run("ift", lambda z: 0.5 * z + x, torch.zeros_like(x), StopRule(30, 1e-2)).z
    (grad,) = torch.autograd.grad(z, x, torch.full_like(x, 1000.0))
    torch.testing.assert_close(grad, torch.full_like(x, 2000.0), rtol=1e-2, atol=0)


def test_a_tensor_replaced_in_a_closure_is_noticed() -> None:
    box = [torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)]
    z = fixed_point(lambda z: torch.tanh(0.5 * z + box[0]), torch.zeros(2, 3, dtype=DOUBLE),
                    backward=Implicit(higher_order=True)).z  # fmt: skip
    box[0] = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    with pytest.raises(RuntimeError, match="was replaced; pass it to f through args"):
        z.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward": "ift"}, "backward must be a Backward such as"),
        ({"stop": 5}, "stop must be a StopRule"),
        ({"record": [3]}, "record takes pairs"),
        ({"record": [(3, Phantom())], "keep_estimate": True}, "drop record"),
        ({"on_failure": "foo"}, "unknown failure policy 'foo'"),
        ({"args": torch.ones(3)}, "args must be a tuple of arguments, got Tensor"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fixed_point(lambda z: 0.5 * z, torch.zeros(2, 3), **options)
