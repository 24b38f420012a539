"""Eigenvalues and singular directions, against dense linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import problems
from tests.diagnostics.maps import dense_jacobian, jordan, linear_maps
from torchdeq.diagnostics import eigenvalues, non_normality, singular_directions


def sorted_values(A: Tensor, count: int) -> Tensor:
    values = torch.linalg.eigvals(A)
    order = values.abs().sort(dim=-1, descending=True, stable=True).indices
    return values.gather(-1, order)[..., :count]


def assert_same_spectrum(got: Tensor, dense: Tensor, atol: float = 1e-8) -> None:
    """Compare moduli, and match every value with its nearest one."""
    torch.testing.assert_close(got.abs(), dense.abs(), atol=atol, rtol=0)
    distance = (got[..., :, None] - dense[..., None, :]).abs().amin(-1)
    assert float(distance.max()) <= atol


@pytest.mark.parametrize(
    "A",
    [
        problems.rotation(0.9, 8),
        problems.repelling(8),
        problems.contraction(0.8, 30),
        torch.triu(problems.contraction(5.0, 12)),
        0.9 * torch.eye(7, dtype=torch.float64),
        torch.ones(9, 9, dtype=torch.float64),
        torch.block_diag(problems.rotation(0.7, 4), 0.7 * torch.eye(3, dtype=torch.float64)),
        torch.zeros(5, 5, dtype=torch.float64),
    ],
    ids=["pairs", "symmetric", "random", "triangular", "multiple", "rank one", "tied", "zero"],
)
def test_all_eigenvalues_of_a_small_map_equal_the_dense_ones(A: Tensor) -> None:
    f, z = linear_maps([A, 0.5 * A])
    got = eigenvalues(f, z, count=len(A))
    assert got.values.shape == (2, len(A))
    assert bool(got.converged.all())
    assert_same_spectrum(got.values, sorted_values(torch.stack([A, 0.5 * A]), len(A)))


@pytest.mark.parametrize("length", [2, 3])
def test_a_defective_eigenvalue_is_as_good_as_rounding_allows(length: int) -> None:
    f, z = linear_maps([jordan(0.8, length)])
    got = eigenvalues(f, z, count=length).values
    assert float((got - 0.8).abs().max()) < 20 * (1e-16) ** (1 / length)


@given(seed=st.integers(0, 2**16), scale=st.floats(0.1, 2.0))
def test_eigenvalues_of_random_maps_equal_the_dense_ones_sample_by_sample(
    seed: int, scale: float
) -> None:
    matrices = [scale * problems.contraction(1.0, 10, seed + i) for i in range(3)]
    f, z = linear_maps(matrices)
    got = eigenvalues(f, z, count=10).values
    assert_same_spectrum(got, sorted_values(torch.stack(matrices), 10), atol=1e-6)


def test_a_coupled_system_has_one_spectrum() -> None:
    map_of, _, W, x = problems.graph(nodes=8, d=3)
    f = map_of(W, x)
    z = torch.randn(8, 3, dtype=torch.float64)
    got = eigenvalues(f, z, count=24, coupled=True)
    assert got.values.shape == (1, 24)
    assert_same_spectrum(got.values, sorted_values(dense_jacobian(f, z)[None], 24), atol=1e-7)


def test_leading_eigenvalues_of_a_large_map_survive_restarts() -> None:
    lead = torch.block_diag(problems.rotation(0.95, 2), 0.9 * torch.eye(1, dtype=torch.float64))
    A = torch.block_diag(lead, problems.contraction(0.5, 297))
    Q = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64)).Q
    A = Q @ A @ Q.mT
    f, z = linear_maps([A])
    got = eigenvalues(f, z, count=3, max_products=300)
    assert bool(got.converged.all())
    assert_same_spectrum(got.values, sorted_values(A[None], 3), atol=1e-6)


def test_a_nonlinear_map_of_several_tensors() -> None:
    W = problems.contraction(0.9, 6)
    x = torch.randn(2, 3, dtype=torch.float64)

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(torch.cat((a, b), 1) @ W.mT)
        return h[:, :3] + x, h[:, 3:] * b

    z = (torch.randn_like(x), torch.randn_like(x))
    got = eigenvalues(f, z, count=6).values

    def one(i: int, v: Tensor) -> Tensor:
        rows = torch.cat(z, 1).clone()
        rows[i] = v
        return torch.cat(f(rows[:, :3], rows[:, 3:]), 1)[i]

    dense = torch.stack([
        torch.autograd.functional.jacobian(lambda v, i=i: one(i, v), torch.cat(z, 1)[i])
        for i in range(2)
    ])  # fmt: skip
    assert_same_spectrum(got, sorted_values(dense, 6))


def test_the_random_generator_and_the_grad_mode_are_left_alone() -> None:
    f, z = linear_maps([problems.rotation(0.9, 4)])
    before = torch.get_rng_state()
    first = eigenvalues(f, z)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.values, eigenvalues(f, z).values)
    assert torch.is_grad_enabled()


def test_a_sample_with_nan_has_no_eigenvalues_and_harms_no_other() -> None:
    f, z = linear_maps([problems.rotation(0.9, 4), problems.rotation(0.5, 4)])
    factor = torch.tensor([[1.0], [float("nan")]], dtype=torch.float64)
    got = eigenvalues(lambda z: f(z) * factor, z)
    torch.testing.assert_close(got.radius[0], torch.tensor(0.9, dtype=torch.float64))
    assert bool(got.radius[1].isnan())
    assert not bool(got.converged[1].any())


@pytest.mark.parametrize(
    "A",
    [problems.contraction(0.95, 12), problems.non_normal(8), problems.rotation(0.99, 6),
     torch.eye(5, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)],
    ids=["random", "non-normal", "rotation", "identity", "constant"],
)  # fmt: skip
def test_singular_directions_equal_those_of_a_dense_decomposition(A: Tensor) -> None:
    f, z = linear_maps([A, 0.3 * A])
    count = len(A)
    got = singular_directions(f, z, count=count, max_products=4 * count)
    M = torch.eye(count, dtype=torch.float64) - torch.stack([A, 0.3 * A])
    dense = torch.linalg.svdvals(M).flip(-1)
    torch.testing.assert_close(got.values, dense, atol=1e-9, rtol=1e-9)
    images = torch.einsum("bij,bcj->bci", M, got.right)
    torch.testing.assert_close(images, got.values[..., None] * got.left, atol=1e-9, rtol=0)
    eye = torch.eye(count, dtype=torch.float64).expand(2, -1, -1)
    for vectors in (got.left, got.right):
        torch.testing.assert_close(vectors @ vectors.mT, eye, atol=1e-9, rtol=0)


def test_a_shift_direction_is_found_in_few_products() -> None:
    d = 200
    P = torch.eye(d, dtype=torch.float64) - torch.ones(d, d, dtype=torch.float64) / d
    A = torch.eye(d, dtype=torch.float64) + (0.3 * problems.contraction(1.0, d) - 0.5 * P) @ P
    f, z = linear_maps([A])  # A 1 = 1
    got = singular_directions(f, z, max_products=60)
    assert float(got.values) < 1e-3
    ones = torch.ones(d, dtype=torch.float64) / d**0.5
    assert float((got.right[0, 0] @ ones).abs()) > 0.999


def test_singular_directions_of_a_coupled_system() -> None:
    map_of, _, W, x = problems.graph(nodes=5, d=3)
    f = map_of(W, x)
    z = torch.randn(5, 3, dtype=torch.float64)
    got = singular_directions(f, z, count=2, coupled=True)
    M = torch.eye(15, dtype=torch.float64) - dense_jacobian(f, z)
    torch.testing.assert_close(got.values[0], torch.linalg.svdvals(M).flip(0)[:2])


def test_non_normality_is_norm_radius_and_growth() -> None:
    A, B = problems.non_normal(8), problems.rotation(0.9, 8)
    f, z = linear_maps([A, B])
    got = non_normality(f, z)
    torch.testing.assert_close(got.norm, torch.linalg.matrix_norm(torch.stack([A, B]), 2))
    powers = max(float(torch.linalg.matrix_norm(torch.linalg.matrix_power(A, k), 2))
                 for k in range(1, 20))  # fmt: skip
    assert got.norm[0] - 1e-9 <= got.growth[0] <= powers + 1e-9
    torch.testing.assert_close(got.ratio[1], torch.tensor(1.0, dtype=torch.float64))


def test_errors_say_what_is_expected() -> None:
    f, z = linear_maps([problems.rotation(0.9, 4)])
    with pytest.raises(ValueError, match="count, the number of eigenvalues"):
        eigenvalues(f, z, count=0)
    with pytest.raises(ValueError, match="without numbers"):
        eigenvalues(lambda z: z, torch.zeros(2, 0))


def test_maps_without_forward_mode_use_two_reverse_passes() -> None:
    z = torch.randn(2, 3, dtype=torch.float64)
    got = singular_directions(_ReverseCosine.apply, z, count=3)
    expected = (1 + z.sin()).abs().sort(1).values
    torch.testing.assert_close(got.values, expected)


class _ReverseCosine(torch.autograd.Function):
    """The cosine with reverse mode only."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return torch.cos(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return -torch.sin(z) * g


@pytest.mark.parametrize(
    ("A", "dtype", "radius"),
    [
        (torch.diag(torch.ones(19), 1), torch.float64, 0.0),
        (jordan(0.9, 6), torch.float64, 0.9),
        (torch.tensor([[0.5, 1e6], [0.0, 0.4]]), torch.float32, 0.5),
        (torch.diag(torch.tensor([0.9, 0.3])) + 0.1, torch.bfloat16, 0.7 + 0.1**0.5),
    ],
    ids=["nilpotent", "chain", "non-normal", "bfloat16"],
)
def test_an_eigenvalue_that_rounding_has_moved_is_not_called_converged(
    A: Tensor, dtype: torch.dtype, radius: float
) -> None:
    f, z = linear_maps([A.to(dtype)])
    got = eigenvalues(f, z, count=2)
    assert abs(float(got.radius) - radius) > 1e-4  # otherwise the test says nothing
    assert not bool(got.converged[:, 0].any())


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_numbers_whose_squares_leave_the_range_of_float32(scale: float) -> None:
    A = problems.contraction(0.9, 6)
    f, z = linear_maps([(scale * A).float()])
    exact = sorted_values(A[None], 6).abs()
    torch.testing.assert_close(eigenvalues(f, z).values.abs() / scale, exact, rtol=1e-4, atol=1e-4)
    norm = non_normality(f, z).norm / scale
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(A, 2)[None], rtol=1e-4, atol=0)
    if scale > 1:
        smallest = singular_directions(f, z).values.double() / scale
        exact = torch.linalg.svdvals(A)[None, -1:]
        torch.testing.assert_close(smallest, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("measure", [eigenvalues, singular_directions, non_normality])
def test_a_missing_derivative_is_an_error_and_not_a_zero(measure: Callable[..., object]) -> None:
    linear, z = torch.nn.Linear(3, 3), torch.ones(2, 3)
    for f in (lambda z: 0.5 * z.detach(), lambda z: linear(z.detach())):
        with pytest.raises(RuntimeError, match="without a graph"):
            measure(f, z)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside inference_mode"):
        measure(linear, z)
    measure(lambda z: linear.bias.expand_as(z), z)  # constant: its Jacobian is zero
