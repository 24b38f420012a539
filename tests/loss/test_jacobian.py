"""Jacobian regularisation: its value, its gradient, and its use beside an implicit loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests import problems
from tests.loss.jacobians import jacobians, leaf
from torchdeq import Implicit, StopRule, fixed_point
from torchdeq.loss import jac_reg


def test_has_the_scale_of_0_1_0() -> None:
    z, W = leaf(3, 4, 5), torch.randn(5, 5, dtype=torch.float64)
    f0 = torch.tanh(z @ W)
    torch.manual_seed(4)
    expected = torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        v = torch.randn(3, 4, 5, dtype=torch.float64)
        vJ = torch.autograd.grad(f0, z, v, retain_graph=True)[0]
        expected += vJ.norm() ** 2
    torch.manual_seed(4)
    torch.testing.assert_close(jac_reg(f0, z, vecs=2), expected / 2 / 60)


def test_is_unbiased() -> None:
    z, W = leaf(2, 4), torch.randn(4, 4, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W)

    exact = jacobians(f, z).square().sum() / z.numel()
    got = jac_reg(f(z), z, vecs=2000, create_graph=False)
    torch.testing.assert_close(got, exact, rtol=0.1, atol=0)


def test_can_be_differentiated_twice_over() -> None:
    z, W = leaf(2, 3), leaf(3, 3)

    def loss(W: Tensor) -> Tensor:
        torch.manual_seed(0)
        return jac_reg(torch.tanh(z @ W), z, vecs=2)

    assert torch.autograd.gradcheck(loss, (W,))
    assert torch.autograd.gradgradcheck(loss, (W,))


def test_without_create_graph_nothing_is_attached_and_the_graph_of_f_stays() -> None:
    z, W = leaf(2, 3), leaf(3, 3)
    f0 = torch.tanh(z @ W)
    assert not jac_reg(f0, z, create_graph=False).requires_grad
    assert torch.autograd.grad(f0.sum(), W)[0].norm() > 0


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_a_state_of_several_tensors_counts_as_one(kind: type) -> None:
    a, b = leaf(2, 3), leaf(2, 2)
    M = torch.randn(5, 5, dtype=torch.float64)
    image = torch.tanh(torch.cat((a, b), 1) @ M).split([3, 2], 1)
    if kind is dict:
        got = {"b": image[1], "a": image[0]}
        value = jac_reg(got, {"a": a, "b": b}, vecs=1500, create_graph=False)
    else:
        value = jac_reg(list(image), kind((a, b)), vecs=1500, create_graph=False)
    J = jacobians(lambda z: torch.tanh(z @ M), torch.cat((a, b), 1))
    torch.testing.assert_close(value, J.square().sum() / 10, rtol=0.1, atol=0)


def test_a_part_that_f_does_not_use_or_make_has_zero_derivatives() -> None:
    a, b = leaf(2, 3), leaf(2, 3)
    assert jac_reg((2 * a, torch.zeros(2, 3, dtype=torch.float64)), (a, b)) > 0


def test_half_precision_is_summed_in_single() -> None:
    z = leaf(64, 64, dtype=torch.float16)
    value = jac_reg(10 * z, z, create_graph=False)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, torch.tensor(100.0), rtol=0.1, atol=0)


def test_an_image_of_lower_precision_is_welcome() -> None:
    z, linear = leaf(4, 8, dtype=torch.float32), nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = jac_reg(linear(z), z)
    assert value.dtype == torch.float32
    value.backward()
    assert linear.weight.grad is not None


def test_an_empty_batch_costs_nothing() -> None:
    z = leaf(0, 3)
    assert jac_reg(2 * z, z) == 0


@pytest.mark.parametrize("attached", [False, True])
def test_trains_beside_an_implicit_loss(attached: bool) -> None:
    """Compare with unrolling; attached, the term is differentiated through the fixed point too."""
    W = (0.5 * problems.contraction(0.9, 4)).requires_grad_()
    x = torch.randn(3, 4, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W.mT + x)

    def loss(z: Tensor) -> Tensor:
        at = z if attached else z.detach().requires_grad_()
        torch.manual_seed(6)
        return z.square().sum() + 0.7 * jac_reg(f(at), at, vecs=2)

    z = fixed_point(f, torch.zeros_like(x), stop=StopRule(100, 1e-13),
                    backward=Implicit(stop=StopRule(100, 1e-13))).z  # fmt: skip
    got = torch.autograd.grad(loss(z), W)[0]
    unrolled = torch.zeros_like(x)
    for _ in range(80):
        unrolled = f(unrolled)
    torch.testing.assert_close(got, torch.autograd.grad(loss(unrolled), W)[0])
    without = torch.autograd.grad(f(z.detach()).square().sum(), W)[0]
    assert not torch.allclose(got, without)


def test_says_what_is_missing() -> None:
    z, other = leaf(2, 3), leaf(2, 3)
    with pytest.raises(ValueError, match="z0 does not require grad"):
        jac_reg(2 * z, z.detach())
    with pytest.raises(ValueError, match="f0 has no graph"):
        jac_reg((2 * z).detach(), z)
    with pytest.raises(ValueError, match="does not depend on z0"):
        jac_reg(2 * other, z)
    with pytest.raises(ValueError, match=r"got \(2, 1\), expected \(2, 3\)"):
        jac_reg(z[:, :1], z)
    with pytest.raises(ValueError, match="vecs"):
        jac_reg(2 * z, z, vecs=0)
