"""Implicit gradients with explicit inputs: every order, both modes, every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from torchdeq.dropout import VariationalDropout, reset_dropout
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, Phantom
from torchdeq.solver import Anderson, Broyden, FixedPointIter, StopRule

D = 4
TIGHT = StopRule(300, 1e-13)
EXACT = Implicit(stop=StopRule(200, 1e-12), higher_order=True)
PLAIN = Implicit(stop=StopRule(200, 1e-12))  # transforms imply higher_order


def deq(W: Tensor, b: Tensor, x: Tensor, backward: Any = PLAIN) -> Tensor:
    """Return the equilibrium of a closure over all three tensors."""
    z0 = torch.zeros_like(x)
    z: Tensor = fixed_point(
        lambda z: torch.tanh(z @ W.mT + x + b), z0, stop=TIGHT, backward=backward
    ).z
    return z


def exactly(W: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return deq(W, b, x, EXACT)


def unrolled(W: Tensor, b: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(150):
        z = torch.tanh(z @ W.mT + x + b)
    return z


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    W = 0.5 * torch.randn(D, D, dtype=torch.float64) / D**0.5
    return W, torch.randn(D, dtype=torch.float64), torch.randn(3, D, dtype=torch.float64)


def close(got: Any, expected: Any, atol: float = 1e-8) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-7)


@pytest.mark.parametrize("solver", [FixedPointIter(), Anderson(), Broyden()])
def test_passes_gradcheck_and_gradgradcheck(inputs: tuple[Tensor, ...], solver: Any) -> None:
    leaves = tuple(t.clone().requires_grad_() for t in inputs)

    def run(W: Tensor, b: Tensor, x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(z @ W.mT + x + b)  # noqa: E731
        return fixed_point(f, torch.zeros_like(x), solver=solver, stop=TIGHT, backward=EXACT).z

    assert gradcheck(run, leaves)
    assert gradgradcheck(run, leaves)


def test_passes_gradcheck_in_forward_mode(inputs: tuple[Tensor, ...]) -> None:
    leaves = tuple(t.clone().requires_grad_() for t in inputs)
    assert gradcheck(deq, leaves, check_forward_ad=True, check_backward_ad=False)
    assert gradgradcheck(exactly, leaves, check_fwd_over_rev=True)


def test_third_order(inputs: tuple[Tensor, ...]) -> None:
    _, b, x = inputs

    def third(run: Callable[..., Tensor]) -> Tensor:
        W = inputs[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(run(W, b, x).sum(), W, create_graph=True)
        (g,) = torch.autograd.grad(g.square().sum(), W, create_graph=True)
        return torch.autograd.grad((g**3).sum(), W)[0]

    close(third(exactly), third(unrolled))


def test_the_hessian_equals_finite_differences(inputs: tuple[Tensor, ...]) -> None:
    W, b, x = inputs
    H = hessian(lambda W: deq(W, b, x).square().sum())(W).view(D * D, D * D)
    gradient = grad(lambda W: unrolled(W, b, x).square().sum())
    for i in range(D * D):
        step = torch.zeros(D * D, dtype=torch.float64)
        step[i] = 1e-5
        numeric = (gradient(W + step.view(D, D)) - gradient(W - step.view(D, D))) / 2e-5
        close(H[i], numeric.flatten(), atol=1e-6)


@pytest.mark.parametrize(
    "transform",
    [
        jacrev,
        jacfwd,
        lambda f: jacrev(jacrev(f)),
        lambda f: jacrev(jacfwd(f)),
        lambda f: jacfwd(jacfwd(f)),
        lambda f: lambda W: vjp(f, W)[1](torch.ones(3, D, dtype=torch.float64))[0],
        lambda f: lambda W: jvp(f, (W,), (torch.ones_like(W),)),
        lambda f: lambda W: vmap(f)(torch.stack((W, 0.9 * W))),
        lambda f: lambda W: vmap(lambda t: jvp(f, (W,), (t,))[1])(torch.stack((W, 2 * W))),
        lambda f: lambda W: grad(lambda s: vmap(f)(torch.stack((s, s))).sum())(W),
    ],
    ids=["jacrev", "jacfwd", "rr", "rf", "ff", "vjp", "jvp", "vmap", "vmap_jvp", "grad_vmap"],
)
def test_function_transforms(inputs: tuple[Tensor, ...], transform: Any) -> None:
    W, b, x = inputs
    got = transform(lambda W: deq(W, b, x))(W)
    close(got, transform(lambda W: unrolled(W, b, x))(W))


def test_per_sample_gradients_equal_a_loop(inputs: tuple[Tensor, ...]) -> None:
    W, b, x = inputs
    loss = lambda W, x: deq(W, b, x[None]).square().sum()  # noqa: E731
    got = vmap(grad(loss), (None, 0))(W, x)
    for row, g in zip(x, got, strict=True):
        leaf = W.clone().requires_grad_()
        (expected,) = torch.autograd.grad(unrolled(leaf, b, row[None]).square().sum(), leaf)
        close(g, expected)


def test_a_level_of_forward_mode(inputs: tuple[Tensor, ...]) -> None:
    W, b, x = inputs
    tangent = torch.randn_like(W)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(W, tangent)
        got, expected = (forward_ad.unpack_dual(run(dual, b, x)).tangent for run in (deq, unrolled))
    close(got, expected)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D).double()
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def forward(self, x: Tensor, higher_order: bool = False) -> Tensor:
        backward = EXACT if higher_order else PLAIN
        return fixed_point(
            lambda z: torch.tanh(self.linear(z) + x), torch.zeros_like(x), stop=TIGHT,
            backward=backward,
        ).z  # fmt: skip


def test_functional_call_with_other_parameters(inputs: tuple[Tensor, ...]) -> None:
    """`functional_call` restores the module's own parameters before the backward pass."""
    x, cell = inputs[2], Cell()
    other = {name: 1.1 * p.detach() for name, p in cell.named_parameters()}

    def reference(p: dict[str, Tensor]) -> Tensor:
        return unrolled(p["linear.weight"], p["linear.bias"], x).square().sum()

    expected = grad(reference)(other)
    close(grad(lambda p: functional_call(cell, p, (x,)).square().sum())(other), expected)
    for order in (True, False):
        leaves = {name: p.clone().requires_grad_() for name, p in other.items()}
        value = functional_call(cell, leaves, (x, order)).square().sum()
        got = torch.autograd.grad(value, list(leaves.values()))
        close(list(got), list(expected.values()))


def test_an_ensemble_of_modules(inputs: tuple[Tensor, ...]) -> None:
    x, cell = inputs[2], Cell()
    stacked = {
        name: torch.stack((p.detach(), 0.9 * p.detach())) for name, p in cell.named_parameters()
    }
    got = vmap(grad(lambda p: functional_call(cell, p, (x,)).sum()))(stacked)
    for i in range(2):
        one = {name: p[i] for name, p in stacked.items()}
        expected = grad(lambda p: unrolled(p["linear.weight"], p["linear.bias"], x).sum())(one)
        close({name: g[i] for name, g in got.items()}, expected)


def test_structured_states_and_explicit_args() -> None:
    w = (0.3 * torch.randn(3, 3, dtype=torch.float64)).requires_grad_()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def f(z: dict[str, Tensor], w: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"a": torch.tanh(z["b"] @ w + x), "b": 0.5 * torch.sin(z["a"])}

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z0 = {"a": torch.zeros_like(x), "b": torch.zeros_like(x)}
        z = fixed_point(f, z0, (w, x), stop=TIGHT, backward=EXACT).z
        return z["a"], z["b"]

    assert gradcheck(run, (w, x))
    assert gradgradcheck(run, (w, x))


def test_phantom_gradients_under_transforms(inputs: tuple[Tensor, ...]) -> None:
    W, b, x = inputs
    phantom = Phantom(grad=3)

    def reference(W: Tensor) -> Tensor:
        with torch.no_grad():
            z = unrolled(inputs[0], b, x)
        for _ in range(3):
            z = torch.tanh(z @ W.mT + x + b)
        return z

    got = grad(lambda W: deq(W, b, x, phantom).sum())(W)
    close(got, grad(lambda W: reference(W).sum())(W))
    assert vmap(lambda x: deq(W, b, x[None], phantom))(x).shape == (3, 1, D)


def test_running_statistics_and_dropout_masks_survive_the_second_evaluation() -> None:
    norm, drop = nn.BatchNorm1d(D).double(), nn.Dropout(0.5)
    x = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    backward = Implicit(stop=StopRule(200, 1e-10), higher_order=True, solver=Anderson())

    def f(z: Tensor) -> Tensor:
        return 0.3 * torch.tanh(drop(norm(z + x)))

    z = fixed_point(f, torch.zeros_like(x), stop=StopRule(5, 0.0), backward=backward).z
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    dropped = z == 0
    (g,) = torch.autograd.grad(z.square().sum(), x)
    assert all(torch.equal(t, before[name]) for name, t in norm.named_buffers())
    assert dropped.any()
    assert g.isfinite().all()


def test_what_cannot_work_says_so() -> None:
    x = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="compact=True cannot be combined"):
        fixed_point(
            lambda z, x: torch.tanh(0.5 * z + x), torch.zeros_like(x), (x,), backward=EXACT,
            compact=True,
        )  # fmt: skip


def test_a_mask_kept_by_a_module_is_new_after_every_reset() -> None:
    drop, x = VariationalDropout(0.5), torch.ones(2, 32, requires_grad=True)
    masks: list[Any] = []
    for _ in range(3):
        reset_dropout(drop)
        fixed_point(lambda z: drop(0.5 * z + x), torch.zeros(2, 32), on_failure="ignore",
                    backward=Implicit(higher_order=True))  # fmt: skip
        masks.append(drop.mask)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def nested(W: Tensor, x: Tensor, outer: Any, inner: Any) -> Tensor:
    """Return a fixed point whose map solves for another one."""

    def cell(y: Tensor) -> Tensor:
        f = lambda z: torch.tanh(0.5 * z @ W.mT + y)  # noqa: E731
        z: Tensor = fixed_point(f, torch.zeros_like(y), stop=TIGHT, backward=inner).z
        return z

    f = lambda z: 0.5 * cell(x + 0.3 * z) @ W  # noqa: E731
    z: Tensor = fixed_point(f, torch.zeros_like(x), stop=TIGHT, backward=outer).z
    return z


def nested_unrolled(W: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(50):
        inner = torch.zeros_like(x)
        for _ in range(50):
            inner = torch.tanh(0.5 * inner @ W.mT + x + 0.3 * z)
        z = 0.5 * inner @ W
    return z


def test_a_fixed_point_inside_another_is_exact_at_second_order(
    inputs: tuple[Tensor, ...],
) -> None:
    """The inner solve must capture the substitutes that the replay of the outer one has made."""
    W, x = inputs[0].clone().requires_grad_(), inputs[2].clone().requires_grad_()

    def second(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(W, x).square().sum(), (W, x), create_graph=True)
        return *first, *torch.autograd.grad([g.sin().sum() for g in first], (W, x))

    got = second(lambda W, x: nested(W, x, EXACT, EXACT))
    close(got, second(nested_unrolled))


def test_a_fixed_point_inside_another_under_transforms(inputs: tuple[Tensor, ...]) -> None:
    W, _, x = inputs

    def derivatives(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        per_sample = vmap(grad(lambda W, x: run(W, x[None]).square().sum()), (None, 0))
        return hessian(lambda x: run(W, x).square().sum())(x[:1]), per_sample(W, x)

    close(derivatives(lambda W, x: nested(W, x, PLAIN, PLAIN)), derivatives(nested_unrolled))
