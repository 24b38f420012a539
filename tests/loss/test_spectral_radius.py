"""The spectral radius of a Jacobian, against dense linear algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import problems
from tests.loss.jacobians import jacobians, leaf
from torchdeq.loss import power_method, spectral_radius


def radii(J: Tensor) -> Tensor:
    return torch.linalg.eigvals(J).abs().amax(-1)


def radius_of(A: Tensor, batch: int = 2, **options: Any) -> Tensor:
    """Return the radius of `z -> A z` by the library."""
    z = leaf(batch, len(A), dtype=A.dtype)
    return power_method(z @ A.mT, z, **options).radius


def radius_of_map(A: Tensor, **options: Any) -> Tensor:
    z = torch.zeros(2, len(A), dtype=A.dtype)
    return spectral_radius(lambda v: v @ A, z, **options).radius


def blocks(*parts: Tensor) -> Tensor:
    """Return a block-diagonal matrix in random coordinates that are not orthogonal."""
    A = torch.block_diag(*parts)
    T = torch.eye(len(A), dtype=A.dtype) + 0.3 * problems.contraction(1.0, len(A), seed=3)
    return T @ A @ torch.linalg.inv(T)


def turn(rho: float, phi: float) -> Tensor:
    t = torch.tensor(phi, dtype=torch.float64)
    return rho * torch.stack((torch.stack((t.cos(), -t.sin())), torch.stack((t.sin(), t.cos()))))


@pytest.mark.parametrize(
    "A",
    [
        problems.rotation(0.9, 2),
        problems.rotation(0.9, 12),
        problems.repelling(10),
        problems.contraction(0.8, 30),
        torch.triu(problems.contraction(5.0, 12)),
        torch.full((1, 1), -0.7, dtype=torch.float64),
        torch.ones(9, 9, dtype=torch.float64),  # rank one
        blocks(turn(0.9, 1.0), turn(0.5, 2.0), 0.8999 * torch.eye(1, dtype=torch.float64)),
        blocks(turn(0.8999, 1.0), turn(0.5, 2.0), -0.9 * torch.eye(1, dtype=torch.float64)),
        torch.diag(torch.tensor([0.9, -0.9, 0.9, 0.1], dtype=torch.float64)),
    ],
    ids=["turn", "turns", "symmetric", "random", "triangular", "number", "rank one",
         "pair leads", "number leads", "tied"],
)  # fmt: skip
def test_is_that_of_the_dense_jacobian(A: Tensor) -> None:
    torch.testing.assert_close(radius_of(A), radii(A).expand(2), rtol=1e-6, atol=0)
    single = radius_of(A.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, radii(A).float().expand(2), rtol=1e-4, atol=0)


@given(d=st.integers(1, 30), seed=st.integers(0, 2**16), gain=st.floats(1e-6, 1e6))
def test_is_exact_once_the_space_is_exhausted(d: int, seed: int, gain: float) -> None:
    A = gain * problems.contraction(1.0, d, seed)
    torch.testing.assert_close(radius_of(A, batch=1)[0], radii(A), rtol=1e-6, atol=0)


def test_a_jordan_chain_is_known_to_a_root_of_the_precision() -> None:
    eps = torch.finfo(torch.float64).eps
    for k in (2, 3, 4):
        nilpotent = torch.diag(torch.ones(k - 1, dtype=torch.float64), 1)
        for A in (nilpotent, blocks(nilpotent, nilpotent)):
            assert (radius_of(A) <= 20 * eps ** (1 / k)).all()
    got = radius_of(problems.non_normal(3))
    torch.testing.assert_close(got, torch.full_like(got, 0.5), rtol=1e-4, atol=0)


def test_a_zero_jacobian_has_radius_zero_and_a_vector_of_norm_one() -> None:
    z = leaf(3, 50)
    vector, radius = power_method(0 * z, z)
    assert torch.equal(radius, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(vector.norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_every_sample_has_its_own_radius() -> None:
    A = torch.stack([problems.rotation(rho, 6, seed) for seed, rho in enumerate((0.1, 0.9, 3.0))])
    z = leaf(3, 6)
    vector, radius = power_method(torch.bmm(A, z.unsqueeze(2)).squeeze(2), z)
    torch.testing.assert_close(radius, torch.tensor([0.1, 0.9, 3.0], dtype=torch.float64))
    assert vector.shape == z.shape


def test_the_vector_is_a_left_eigenvector() -> None:
    A = problems.contraction(0.9, 10) + torch.eye(10, dtype=torch.float64)
    values = torch.linalg.eigvals(A)
    assert values[values.abs().argmax()].imag == 0
    z = leaf(2, 10)
    vector, radius = power_method(z @ A.mT, z)
    torch.testing.assert_close(vector @ A, radius[:, None] * vector, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vector.norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert not vector.requires_grad


def test_the_vector_of_a_complex_pair_stays_in_its_plane() -> None:
    A = blocks(turn(0.9, 1.0), 0.2 * torch.eye(4, dtype=torch.float64))
    z = leaf(2, 6)
    v = power_method(z @ A.mT, z).vector
    span = torch.stack((v, v @ A, v @ A @ A), 1)  # the third lies in the plane of the others
    third = torch.linalg.svdvals(span)[:, 2]
    assert (third < 1e-8).all()


def test_restarts_lose_nothing_but_some_accuracy() -> None:
    A = problems.contraction(2.0, 300)
    B = blocks(turn(1.2, 0.7), torch.eye(1, dtype=torch.float64), 0.4 * A)
    for basis in (4, 6, 20):
        torch.manual_seed(0)
        got = radius_of_map(B, basis=basis)
        torch.testing.assert_close(got, radii(B).expand(2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("basis", [10, 40])
def test_a_restart_survives_exhausted_spaces_and_coinciding_eigenvectors(basis: int) -> None:
    chain = torch.diag(torch.ones(2, dtype=torch.float64), 1)
    zeros = torch.zeros(197, 197, dtype=torch.float64)
    nilpotent = torch.block_diag(chain, zeros)
    jordan = torch.block_diag(chain + 0.9 * torch.eye(3, dtype=torch.float64), zeros)
    hard = problems.contraction(1.0, 200)  # converges last, so the others must restart
    A = torch.stack((nilpotent, jordan, torch.eye(200, dtype=torch.float64), hard))
    z = torch.zeros(4, 200, dtype=torch.float64)
    got = spectral_radius(lambda v: torch.bmm(v[:, None], A)[:, 0], z, basis=basis).radius
    expected = torch.tensor([0.0, 0.9, 1.0, radii(hard)], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_never_takes_more_products_than_it_may_and_stops_when_it_is_done() -> None:
    calls = 0

    def product(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return v * scale

    for n_iters in (1, 2, 7, 60, 75):
        calls, scale = 0, torch.rand(500, dtype=torch.float64)
        spectral_radius(product, torch.zeros(2, 500, dtype=torch.float64), n_iters)
        assert calls == n_iters
    calls, scale = 0, 1e-3 * torch.rand(500, dtype=torch.float64)
    scale[3] = 1.0
    got = spectral_radius(product, torch.zeros(2, 500, dtype=torch.float64)).radius
    torch.testing.assert_close(got, torch.ones(2, dtype=torch.float64))
    assert calls == 8
    calls, scale = 0, torch.rand(5, dtype=torch.float64)
    spectral_radius(product, torch.zeros(2, 5, dtype=torch.float64))
    assert calls == 5


def test_images_sequences_and_single_numbers() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1).double()

    def f(z: Tensor) -> Tensor:
        return torch.tanh(conv(z))

    for layout in (torch.contiguous_format, torch.channels_last):
        z = torch.randn(2, 3, 4, 4, dtype=torch.float64).contiguous(memory_format=layout)
        z.requires_grad_()
        vector, radius = power_method(f(z), z)
        torch.testing.assert_close(radius, radii(jacobians(f, z)), rtol=1e-5, atol=0)
        assert vector.shape == z.shape
    z = leaf(3)
    torch.testing.assert_close(power_method(z * z, z).radius, 2 * z.detach().abs())
    z = leaf()
    torch.testing.assert_close(power_method(0.3 * z, z).radius, torch.full((1,), 0.3).double())


def test_pytrees() -> None:
    A = problems.rotation(0.9, 6)
    a, b = leaf(2, 4), leaf(2, 2)
    image = (torch.cat((a, b), 1) @ A.mT).split([4, 2], 1)
    vector, radius = power_method({"b": image[1], "a": image[0]}, {"a": a, "b": b})
    torch.testing.assert_close(radius, torch.full((2,), 0.9, dtype=torch.float64))
    assert {key: v.shape for key, v in vector.items()} == {"a": (2, 4), "b": (2, 2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_are_measured_in_single(dtype: torch.dtype) -> None:
    A = problems.rotation(0.9, 8).to(dtype)
    z = leaf(2, 8, dtype=dtype)
    vector, radius = power_method(z @ A.mT, z)
    assert radius.dtype == torch.float32
    assert vector.dtype == dtype
    torch.testing.assert_close(radius, torch.full((2,), 0.9), rtol=0.05, atol=0)


def test_autocast_does_not_reach_the_arithmetic() -> None:
    A = problems.rotation(0.9, 60).float()
    z = leaf(2, 60, dtype=torch.float32)
    f0 = z @ A.mT
    seen = []

    def product(v: Tensor) -> Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return v @ A

    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair = power_method(f0, z)
        spectral_radius(product, z, 3)
    assert seen == [torch.bfloat16] * 3  # the products themselves are the program's
    assert pair.radius.dtype == pair.vector.dtype == torch.float32
    torch.testing.assert_close(pair.radius, torch.full((2,), 0.9), rtol=0.05, atol=0)


def test_a_sample_that_is_not_finite_is_nan_and_alone() -> None:
    z = leaf(3, 50)
    scale = torch.full((3, 1), 0.9, dtype=torch.float64)
    scale[1] = torch.inf
    radius = power_method(z * scale, z).radius
    assert radius.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(radius[[0, 2]], torch.full((2,), 0.9, dtype=torch.float64))


def test_the_graph_stays_and_no_mode_matters() -> None:
    z = leaf(2, 5)
    f0 = torch.tanh(z)
    with torch.no_grad():
        first = power_method(f0, z).radius
    torch.testing.assert_close(power_method(f0, z).radius, first)
    assert torch.autograd.grad(f0.sum(), z)[0].shape == z.shape


def test_an_empty_batch_and_an_empty_state() -> None:
    z = leaf(0, 4)
    assert power_method(2 * z, z).radius.shape == (0,)
    assert torch.equal(spectral_radius(lambda v: v, torch.zeros(2, 0)).radius, torch.zeros(2))


def test_says_what_is_wrong() -> None:
    z = leaf(2, 3)
    with pytest.raises(ValueError, match="n_iters"):
        power_method(2 * z, z, n_iters=0)
    with pytest.raises(ValueError, match="basis"):
        spectral_radius(lambda v: v, z, basis=2)
    with pytest.raises(ValueError, match="z0 does not require grad"):
        power_method(2 * z, z.detach())
    with pytest.raises(ValueError, match="does not depend on z0"):
        power_method(2 * leaf(2, 3), z)
