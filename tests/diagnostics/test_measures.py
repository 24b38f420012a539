"""Paths, gradients, costs, landscapes and the solves inside a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import problems
from torchdeq import Implicit, Phantom, StopRule, diagnostics, doctor, get_deq
from torchdeq.diagnostics import (
    PeakMemory,
    call_cost,
    contraction_along_path,
    find_solves,
    gradient_quality,
    landscape,
    path_independence,
    recorded_solves,
    saved_bytes,
)


def test_a_scaled_rotation_contracts_by_its_scale_at_every_step() -> None:
    f, z0, _ = problems.affine(problems.rotation(0.9))
    path = contraction_along_path(f, z0, steps=12)
    assert path.residuals.shape == (3, 12)
    torch.testing.assert_close(path.factors, torch.full_like(path.factors, 0.9))
    torch.testing.assert_close(path.rate, torch.full_like(path.rate, 0.9))


def test_a_contraction_is_path_independent_and_a_bistable_map_is_not() -> None:
    f, z0 = problems.tanh_layer()
    unique = path_independence(f, z0)
    assert float(unique.distances.max()) < 1e-4
    assert bool(unique.independent(1e-6).all())
    zero = path_independence(lambda z: 0.5 * z, torch.ones(2, 3), stop=StopRule(20, 1e-3, "rel"))
    assert float(zero.distances.max()) < 1e-2  # relative to the start, not to the solution 0
    double = path_independence(
        lambda z: torch.tanh(3 * z), torch.full((8, 1), 0.5, dtype=torch.float64)
    )
    assert not bool(double.independent(1e-6).all())
    assert float(double.distances.max()) == pytest.approx(2.0, abs=1e-3)  # from one to the other


def test_the_quality_of_a_phantom_gradient_is_that_of_the_dense_formula() -> None:
    A = problems.contraction(0.9)
    x = torch.randn(1, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(1, 8, dtype=torch.float64)

    def quality(backward: Any) -> Any:
        return gradient_quality(
            lambda z: z @ A.mT + x, torch.zeros(1, 8, dtype=torch.float64), backward,
            loss=lambda z: (w * z).sum(),
        )  # fmt: skip

    exact = torch.linalg.solve(torch.eye(8, dtype=torch.float64) - A.mT, w[0])
    for steps in (1, 3):
        phantom = sum((torch.linalg.matrix_power(A.mT, k) @ w[0] for k in range(steps)),
                      torch.zeros_like(w[0]))  # fmt: skip
        got = quality(Phantom(grad=steps))
        cosine = float(phantom @ exact / phantom.norm() / exact.norm())
        assert got.cosine == pytest.approx(cosine, abs=1e-6)
        assert got.norm_ratio == pytest.approx(float(phantom.norm() / exact.norm()), rel=1e-6)
        assert got.inputs == 1
    assert quality(Implicit()).cosine == pytest.approx(1.0, abs=1e-9)


def test_a_map_without_parameters_is_compared_by_its_adjoint_vector() -> None:
    f, z0, _ = problems.affine(problems.contraction(0.5))
    got = gradient_quality(f, z0, Implicit())
    assert got.inputs == 0
    assert got.cosine == pytest.approx(1.0, abs=1e-9)
    assert gradient_quality(f, z0, Phantom(grad=1)).cosine < 0.999


def test_an_early_stop_shows_in_the_gradient() -> None:
    linear = nn.Linear(6, 6).double()
    x = torch.randn(4, 6, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(linear(z) + x)

    z0 = torch.zeros_like(x)
    late = gradient_quality(f, z0, Implicit(), stop=StopRule(200, 1e-8))
    early = gradient_quality(f, z0, Implicit(), stop=StopRule(1, 0.0))
    assert late.cosine > 1 - 1e-6 > early.cosine
    assert all(p.grad is None for p in linear.parameters())


def test_costs_are_positive_and_saved_bytes_exact() -> None:
    W = torch.randn(8, 8, requires_grad=True)
    cost = call_cost(lambda z: torch.tanh(z @ W), torch.randn(4, 8), repeats=1)
    assert cost.f > 0
    assert cost.vjp is not None
    assert cost.jvp is not None
    # tanh saves its output, the product its two factors.
    assert cost.saved_bytes == 4 * (4 * 8 + 4 * 8 + 8 * 8)
    h = torch.randn(16, requires_grad=True)
    assert saved_bytes(lambda: h.exp()) == 16 * 4


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    with PeakMemory(torch.device("cpu")) as one_by_one:
        for _ in range(5):
            torch.ones(1000)
    with PeakMemory(torch.device("cpu")) as together:
        kept = [torch.ones(1000) for _ in range(5)]
    assert one_by_one.peak < 2 * 4000 <= 5 * 4000 <= together.peak < 6 * 4000
    del kept


def test_a_landscape_is_the_residual_on_a_plane() -> None:
    f, z0, exact = problems.affine(problems.contraction(0.5))
    got = landscape(f, exact, extent=2.0, points=5)
    assert got.residuals.shape == (3, 5, 5)
    assert float(got.residuals[:, 2, 2].max()) < 1e-12
    size = exact.norm(dim=1, keepdim=True)
    z = exact + size * (got.x[4] * got.a + got.x[1] * got.b)
    torch.testing.assert_close(got.residuals[:, 1, 4], (f(z) - z).norm(dim=1))
    torch.testing.assert_close((got.a * got.b).sum(1), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="directions must be"):
        landscape(f, exact, directions=(z0[:, :2], z0[:, :2]))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.deq = get_deq(f_max_iter=7, ift=True)
        self.head = nn.ModuleDict({"deq": get_deq(f_max_iter=9, grad=3, n_states=3)})

    def forward(self, x: Tensor, budget: int | None = None) -> Tensor:
        (z,), _ = self.deq(lambda z: torch.tanh(self.first(z) + x), torch.zeros_like(x))
        states, _, aux = self.head["deq"](
            lambda a, u: ((torch.tanh(self.second(a) + u),), a), (z,), args=(z,), has_aux=True,
            f_max_iter=budget,
        )  # fmt: skip
        out: Tensor = states[-1][0] + aux
        return out


def test_the_solves_of_a_model_are_found_and_can_be_examined() -> None:
    model, x = TwoLayers(), torch.randn(2, 4)
    first, second = find_solves(model, x, budget=6)
    assert (first.name, second.name) == ("deq", "head.deq")
    assert (first.config.f_max_iter, second.config.f_max_iter) == (7, 6)
    assert first.training
    assert not model.deq._forward_pre_hooks
    path = contraction_along_path(*second.problem, steps=3)
    assert path.residuals.shape == (2, 3)
    diagnosis = second.doctor(seconds=30.0)
    assert diagnosis.solvers[0].name == "fixed_point_iter"
    assert diagnosis.backwards[0].name == "phantom, 3 steps (yours)"


@pytest.mark.parametrize(
    "measure",
    [
        diagnostics.eigenvalues,
        diagnostics.singular_directions,
        diagnostics.non_normality,
        diagnostics.contraction_along_path,
        partial(diagnostics.path_independence, starts=1),
        diagnostics.landscape,
        diagnostics.call_cost,
        partial(diagnostics.gradient_quality, backward=Phantom(grad=1)),
        partial(doctor, seconds=0.5),
    ],
)
def test_modules_have_their_buffers_and_attributes_again(measure: Callable[..., object]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(3), 0
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
            self.mean: Tensor
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, z: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
            return 0.3 * self.norm(self.spectral(z))

    net = Counting()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    mean = net.mean
    measure(net, torch.randn(4, 3))
    after = net.state_dict()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []
    assert net.mean is mean
    assert net.calls == 0


def test_a_model_without_a_deq_is_an_error_that_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="has no DEQ inside"), recorded_solves(nn.Linear(2, 2)):
        pass


def test_an_unsolved_reference_shows_in_its_residual() -> None:
    b = torch.full((2, 3), 0.1, dtype=torch.float64, requires_grad=True)
    quality = gradient_quality(lambda z: z * z + 1 + b, torch.zeros_like(b), Phantom(grad=1))
    assert quality.reference_residual > 0.01  # z^2 + 1 = z has no real solution


def test_factors_of_a_path_that_overflows_are_nan_and_not_small() -> None:
    path = contraction_along_path(lambda z: 1e20 * z * z, torch.ones(1, 2), steps=6)
    assert not bool((path.factors[:, 1:] < 1).any())


def test_a_measure_does_not_write_to_the_caller_s_state() -> None:
    z = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="f wrote into its input"):
        contraction_along_path(lambda z: z.mul_(0.5).add_(1), z)
    assert not bool(z.any())


def test_directions_of_a_landscape_must_span_a_plane() -> None:
    a = torch.ones(2, 3)
    for second in (2 * a, 0 * a):
        with pytest.raises(ValueError, match="span a plane"):
            landscape(lambda z: 0.5 * z, torch.ones(2, 3), directions=(a, second), points=3)
