"""The formulas of the norms, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from tests.norm.layers import SIZES, every_norm, raw
from torchdeq.norm import NORMS, SpectralNorm, WeightNorm, apply_norm, reset_norm
from torchdeq.norm.spectral import leading_singular_vectors

LAYERS: list[tuple[Any, int]] = [
    (lambda: nn.Linear(5, 4), 0),
    (lambda: nn.Conv1d(2, 4, 3), 0),
    (lambda: nn.Conv2d(4, 6, 3, groups=2), 0),
    (lambda: nn.Conv3d(2, 3, (1, 2, 3)), 0),
    (lambda: nn.ConvTranspose1d(2, 4, 3), 1),
    (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), 1),
    (lambda: nn.ConvTranspose3d(2, 3, 2), 1),
]


def rows(weight: Tensor, dim: int) -> Tensor:
    """Return the weight as a matrix, its rows first."""
    return weight.movedim(dim, 0).flatten(1)


@pytest.mark.parametrize(("make", "dim"), LAYERS)
def test_weight_norm_scales_every_row_to_its_length(make: Any, dim: int) -> None:
    layer = make().double()
    before = layer.weight.detach().clone()
    apply_norm(layer)
    reset_norm(layer)
    torch.testing.assert_close(layer.weight, before)
    with torch.no_grad():
        layer.weight_g.uniform_(0.5, 2)
        layer.weight_v.normal_()
    reset_norm(layer)
    v, g = rows(layer.weight_v, dim), layer.weight_g.flatten()
    expected = v * (g / v.square().sum(1).sqrt())[:, None]
    torch.testing.assert_close(rows(layer.weight, dim), expected)


@pytest.mark.parametrize(("make", "dim"), LAYERS)
def test_spectral_norm_divides_by_the_largest_singular_value(make: Any, dim: int) -> None:
    layer = make().double()
    before = layer.weight.detach().clone()
    apply_norm(layer, "spectral_norm", target_norm=0.9)
    expected = 0.9 * before / torch.linalg.svdvals(rows(before, dim))[0]
    for _ in range(3):  # right from the start, and it stays right
        torch.testing.assert_close(layer.weight, expected)
        reset_norm(layer)
    with torch.no_grad():
        layer.weight_g.uniform_(0.5, 2)
    reset_norm(layer)
    scale = layer.weight_g / torch.linalg.svdvals(rows(before, dim))[0]
    torch.testing.assert_close(layer.weight, before * scale)


@given(h=st.integers(1, 90), w=st.integers(1, 90), rank=st.integers(1, 90), seed=st.integers(0, 99))
def test_finds_the_leading_singular_vectors(h: int, w: int, rank: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, rank, dtype=torch.float64, generator=gen) for n in (h, w))
    matrix = a @ b.mT
    u, v = leading_singular_vectors(matrix)
    sigma = torch.linalg.svdvals(matrix)[0]
    torch.testing.assert_close(u @ matrix @ v, sigma, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.stack([u.norm(), v.norm()]), torch.ones(2).double())


def test_a_large_matrix_with_close_singular_values_is_estimated_well() -> None:
    matrix = torch.randn(600, 700)
    u, v = leading_singular_vectors(matrix)
    torch.testing.assert_close(
        u @ matrix @ v, torch.linalg.matrix_norm(matrix, 2), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    "matrix", [torch.zeros(3, 4), torch.full((3, 4), torch.nan), torch.eye(70)]
)
def test_degenerate_matrices_have_unit_vectors(matrix: Tensor) -> None:
    for x in leading_singular_vectors(matrix):
        torch.testing.assert_close(x.norm(), torch.tensor(1.0))


@every_norm
@pytest.mark.parametrize("clip_value", [0.5, 1.0, 3.0])
def test_the_clip_bounds_the_factor_and_no_scale_fixes_it(
    norm_type: str, clip_value: float
) -> None:
    layer: Any = nn.Linear(6, 5).double()
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([0.1, 0.3, 1, 3, 10]).double()[:, None])
    V = layer.weight.detach().clone()
    apply_norm(
        layer, norm_type, learn_scale=False, target_norm=0.7, clip=True, clip_value=clip_value
    )
    assert not hasattr(layer, "weight_g")
    reset_norm(layer)
    expected = V * (0.7 / SIZES[norm_type](V)).clamp(max=clip_value)
    torch.testing.assert_close(layer.weight, expected)


def parts(norm: Any, weight: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {k: v.clone() for k, v in norm.split(weight, 0).items()}


@pytest.mark.parametrize("cls", NORMS.values(), ids=list(NORMS))
@pytest.mark.parametrize("options", [{}, {"learn_scale": False}, {"clip": True, "clip_value": 0.8}])
def test_gradients_reach_the_parameters_exactly_to_second_order(cls: Any, options: Any) -> None:
    norm = cls(["weight"], [0], **options)
    start = parts(norm, torch.randn(4, 3, dtype=torch.float64))
    if "g" in start:
        start["g"] *= torch.tensor([[0.5], [0.6], [1.5], [1.2]])  # below and beyond the clip
    trained = [k for k in start if k == norm.raw or k == "g"]

    def weight(*values: Tensor) -> Tensor:
        result: Tensor = norm.weight(start | dict(zip(trained, values, strict=True)), 0)
        return result

    inputs = [start[k].clone().requires_grad_() for k in trained]
    assert gradcheck(weight, inputs)
    assert gradgradcheck(weight, inputs)
    assert gradcheck(weight, inputs, check_forward_ad=True)


def test_the_gradient_of_the_spectral_norm_is_that_of_the_singular_value() -> None:
    layer: Any = nn.Linear(6, 5, bias=False).double()
    apply_norm(layer, "spectral_norm")
    G = torch.randn(5, 6, dtype=torch.float64)
    (layer.weight * G).sum().backward()
    W = layer.weight_orig.detach().clone().requires_grad_()
    (W / torch.linalg.matrix_norm(W, 2) * G).sum().backward()
    torch.testing.assert_close(layer.weight_orig.grad, W.grad)


class StrictClamp(torch.autograd.Function):
    """A clamp without gradient at its bound, as in torch 2.15."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x < bound)
        return x.minimum(x.new_full((), bound))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


@every_norm
def test_the_gradient_of_the_scale_at_the_clip_is_whole_on_every_torch(
    norm_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "clamp", lambda x, max: StrictClamp.apply(x, max))
    layer: Any = nn.Linear(3, 2).double()
    # A matrix of norm 1 with exact singular vectors, so that g / N is exactly 1: at the clip.
    layer.weight = nn.Parameter(torch.tensor([[1.0, 0, 0], [0, 0.5, 0]], dtype=torch.float64))
    G = torch.tensor([[1.0, -2, 3], [4, 5, -6]], dtype=torch.float64)
    apply_norm(layer, norm_type, clip=True)
    for vector in layer.buffers():
        vector.copy_(torch.eye(len(vector))[0])  # u and v of the spectral norm
    reset_norm(layer.eval())
    size = layer.weight_g.detach()  # of each row, or of the matrix
    assert torch.equal(layer.weight, raw(layer))
    (layer.weight * G).sum().backward()
    torch.testing.assert_close(layer.weight_g.grad, (raw(layer) * G / size).sum(1, keepdim=True))


@every_norm
@pytest.mark.parametrize("learn_scale", [True, False])
def test_a_layer_of_zeros_stays_finite_and_learns(norm_type: str, learn_scale: bool) -> None:
    layer: Any = nn.Linear(4, 3)
    apply_norm(layer, norm_type, learn_scale=learn_scale)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, y = torch.randn(16, 4), torch.randn(16, 3)
    for step in range(5):
        reset_norm(layer)
        assert step > 0 or torch.equal(layer.weight, torch.zeros(3, 4))
        loss = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
    reset_norm(layer)
    assert layer.weight.isfinite().all()
    assert layer.weight.norm(dim=1).min() > 0


def test_power_iteration_follows_the_weight_in_training_only() -> None:
    layer: Any = nn.Linear(30, 20).double()
    apply_norm(layer, "spectral_norm", learn_scale=False, n_power_iterations=3)
    with torch.no_grad():
        layer.weight_orig.copy_(torch.randn(20, 30))
    u, v = layer.weight_u.clone(), layer.weight_v.clone()
    layer.eval()
    reset_norm(layer)
    assert torch.equal(layer.weight_u, u)
    sigma = u @ layer.weight_orig @ v
    torch.testing.assert_close(layer.weight, layer.weight_orig / sigma)
    layer.train()
    with torch.no_grad():  # gradients have nothing to do with it
        reset_norm(layer)
    for _ in range(3):
        v = nn.functional.normalize(layer.weight_orig.mT @ u, dim=0)
        u = nn.functional.normalize(layer.weight_orig @ v, dim=0)
    torch.testing.assert_close(layer.weight_u, u)
    torch.testing.assert_close(layer.weight_v, v)
    for _ in range(100):
        reset_norm(layer)
    torch.testing.assert_close(
        torch.linalg.matrix_norm(layer.weight, 2), torch.tensor(1.0).double(), rtol=1e-3, atol=0
    )


def largest_norm_in_training(seed: int, **options: Any) -> float:
    """Return the largest spectral norm of a weight in 100 steps of Adam towards large outputs."""
    torch.manual_seed(seed)
    layer: Any = nn.Linear(32, 32)
    apply_norm(layer, "spectral_norm", target_norm=0.9, **options)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x, y = torch.randn(64, 32), 3 * torch.randn(64, 32)
    largest = 0.0
    for _ in range(100):
        reset_norm(layer)
        largest = max(largest, float(torch.linalg.matrix_norm(layer.weight.detach(), 2)))
        loss = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return largest


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("clip", [True, False])
def test_training_keeps_a_fixed_norm_below_one(seed: int, clip: bool) -> None:
    assert largest_norm_in_training(seed, learn_scale=False, clip=clip, n_power_iterations=20) < 1


def test_training_raises_a_learnt_norm_although_its_factor_is_clipped() -> None:
    assert largest_norm_in_training(0, clip=True, n_power_iterations=20) > 1.5


def test_a_second_forward_pass_leaves_the_graph_of_the_first_alone() -> None:
    layer: Any = nn.Linear(4, 3)
    apply_norm(layer, "spectral_norm")
    reset_norm(layer)
    first = layer.weight
    reset_norm(layer)
    layer.weight_u.zero_()  # as DDP's broadcast may
    first.sum().backward()
    assert layer.weight_orig.grad is not None
    assert layer.weight_orig.grad.norm() > 0


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_precision(norm_type: str, dtype: torch.dtype) -> None:
    layer: Any = nn.Conv2d(3, 4, 3).to(dtype)
    apply_norm(layer, norm_type)
    reset_norm(layer)
    assert all(t.dtype is dtype for t in (layer.weight, *layer.state_dict().values()))
    size = SIZES[norm_type](layer.weight.float().flatten(1))
    expected = layer.weight_g.float().flatten(1) if NORMS[norm_type].keeps_weight else 1.0
    assert ((size / expected - 1).abs() < 2e-2).all()


@every_norm
def test_autocast_does_not_touch_the_weights(norm_type: str) -> None:
    layer: Any = nn.Linear(16, 16)
    apply_norm(layer, norm_type)
    layer.eval()
    reset_norm(layer)
    expected = layer.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reset_norm(layer)
    assert torch.equal(layer.weight, expected)


def test_layouts_other_than_contiguous_give_the_same_weights() -> None:
    for norm_type in NORMS:
        plain, other = nn.Conv2d(4, 5, 3), nn.Conv2d(4, 5, 3)
        other.load_state_dict(plain.state_dict())
        other = other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        apply_norm(plain, norm_type)
        apply_norm(other, norm_type)
        torch.testing.assert_close(other.weight, plain.weight)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (WeightNorm, {"clip_value": 0.0}, "clip_value must be positive, got 0.0"),
        (WeightNorm, {"target_norm": -1.0}, "target_norm must be at least 0, got -1.0"),
        (WeightNorm, {"dims": [0, 1]}, "each name needs its dimension"),
        (SpectralNorm, {"n_power_iterations": 0}, "whole number >= 1, got 0"),
    ],
)
def test_refuses_nonsense(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**({"names": ["weight"], "dims": [0]} | options))
