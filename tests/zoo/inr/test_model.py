"""Fields: equations, shapes, derivatives, copies and errors."""

from __future__ import annotations

import pickle
from copy import deepcopy
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.inr import (
    DEQField,
    FieldConfig,
    OnePassField,
    laplacian,
    make_field,
    value_and_gradient,
)
from deq_zoo.inr.layers import FILTERS
from deq_zoo.inr.model import KINDS
from torchdeq import remove_norm, reset_norm

EXACT = {
    "ift": True, "higher_order": True, "f_max_iter": 300, "f_tol": 1e-13, "f_stop_mode": "rel",
    "b_max_iter": 300, "b_tol": 1e-13, "on_failure": "ignore",
}  # fmt: skip


def make_small(filter: Any = "siren_like", layers: int = 1, **options: Any) -> DEQField:
    torch.manual_seed(0)
    config = FieldConfig(filter=filter, width=8, layers=layers, input_scale=3.0)
    return DEQField(2, 2, config, {**EXACT, **options}).double()


def iterate_formula(field: DEQField, x: Tensor, steps: int) -> Tensor:
    """Iterate the field's equations, unrolled; only the weights come from the model."""
    C, L = field.config.width, field.config.layers
    a = x @ field.injection.x_map.weight.T + field.injection.x_map.bias
    if field.config.filter == "siren_like":
        u = a
    else:
        u = a.sin()
        if field.config.filter == "gabor":
            square = (x[:, None] - field.injection.mu).square().sum(-1)
            u = u * torch.exp(-0.5 * field.injection.gamma * square)
    z = x.new_zeros(len(x), C)
    for _ in range(steps):
        v = z + (u[:, :C].sin() if field.config.filter == "siren_like" else u[:, :C])
        for k in range(L):
            layer = field.f.layers[k]["z_map"]  # type: ignore[index]
            W = layer.weight_v * (layer.weight_g / layer.weight_v.norm(dim=1, keepdim=True))
            part, mixed = u[:, (k + 1) * C : (k + 2) * C], v @ W.T + layer.bias
            v = (mixed + part).sin() if field.config.filter == "siren_like" else mixed * part
        z = v
    return z @ field.output_map.weight.T + field.output_map.bias


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("filter", FILTERS)
def test_values_and_derivatives_are_those_of_the_unrolled_equations(
    filter: str, layers: int
) -> None:
    field = make_small(filter, layers)
    x = (2 * torch.rand(3, 2, dtype=torch.float64) - 1).requires_grad_()

    def compute_reference(x: Tensor) -> Tensor:
        return iterate_formula(field, x, 150 // layers)

    for function in (field.exact, lambda x: field(x).prediction):
        y, gradient = value_and_gradient(function, x)
        y_ref, gradient_ref = value_and_gradient(compute_reference, x)
        assert_close(y, y_ref, rtol=0, atol=1e-10)
        assert_close(gradient, gradient_ref, rtol=0, atol=1e-9)
        parameters = list(field.parameters())
        slope = (gradient.norm(dim=2) - 1).square().mean()
        slope_ref = (gradient_ref.norm(dim=2) - 1).square().mean()
        result = torch.autograd.grad(slope, parameters, allow_unused=True)
        wanted = torch.autograd.grad(slope_ref, parameters, allow_unused=True)
        for a, b in zip(result, wanted, strict=True):
            a, b = (torch.zeros(1) if t is None else t for t in (a, b))
            assert_close(a, b.expand_as(a).to(a.dtype), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("filter", FILTERS)
def test_gradient_and_laplacian_are_those_of_finite_differences(filter: str) -> None:
    field = make_small(filter)
    x, h = 2 * torch.rand(4, 2, dtype=torch.float64) - 1, 1e-4

    @torch.no_grad()
    def evaluate_at(dx: float, dy: float) -> Tensor:
        return field.exact(x + x.new_tensor((dx, dy)))

    y, gradient = value_and_gradient(field.exact, x, create_graph=False)
    assert not y.requires_grad
    assert not gradient.requires_grad
    along = torch.stack(
        (evaluate_at(h, 0) - evaluate_at(-h, 0), evaluate_at(0, h) - evaluate_at(0, -h)), dim=-1
    ) / (2 * h)
    assert_close(gradient, along, rtol=1e-5, atol=1e-6)
    second = (
        evaluate_at(h, 0) + evaluate_at(-h, 0) + evaluate_at(0, h) + evaluate_at(0, -h) - 4 * y
    ) / h**2
    assert_close(laplacian(field.exact, x, create_graph=False), second, rtol=1e-4, atol=1e-4)


def test_the_laplacian_of_a_quadratic_is_known() -> None:
    x = torch.rand(6, 3, dtype=torch.float64)

    def field(x: Tensor) -> Tensor:
        return torch.stack((x.square().sum(1), x[:, 0] * x[:, 1]), dim=1)

    wanted = torch.tensor([6.0, 0.0], dtype=torch.float64).expand(6, 2)
    assert_close(laplacian(field, x, create_graph=False), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 4), (2, 1, 2)])
def test_points_come_in_any_shape(kind: Any, shape: tuple[int, ...]) -> None:
    filter: Any = "gabor" if kind == "mfn" else "siren_like"
    config = FieldConfig(kind=kind, filter=filter, width=6, layers=2, input_scale=2.0)
    field = make_field(3, 2, config, {"on_failure": "ignore"}).eval()
    x = 2 * torch.rand(*shape, 3) - 1
    with torch.no_grad():
        out = field(x)
        assert out.prediction.shape == (*shape, 2)
        every_other = field(x.expand(2, *x.shape).transpose(0, -2)) if x.dim() > 1 else None
    assert bool(out.prediction.isfinite().all())
    assert (out.stats is None) == (kind != "deq")
    assert every_other is None or bool(every_other.prediction.isfinite().all())


@pytest.mark.parametrize("filter", FILTERS)
def test_the_value_of_a_point_does_not_depend_on_the_others(filter: str) -> None:
    field = make_small(filter).eval()
    x = 2 * torch.rand(9, 2, dtype=torch.float64) - 1
    with torch.no_grad():
        together = field(x).prediction
        alone = torch.cat([field(point[None]).prediction for point in x])
    assert_close(together, alone, rtol=0, atol=1e-12)


def test_negative_gamma_is_an_envelope_of_one() -> None:
    field = make_small("gabor").eval()
    x = 2 * torch.rand(3, 2, dtype=torch.float64) - 1
    with torch.no_grad():
        field.injection.gamma.fill_(-5.0)
        u = field.injection(x)
        field.injection.gamma.zero_()
        assert_close(u, field.injection(x))


def test_warm_steps_and_a_solve_agree_at_the_fixed_point() -> None:
    field = make_small(ift=False, higher_order=False, grad=3)
    x = 2 * torch.rand(7, 2, dtype=torch.float64) - 1
    solved = field(x)
    warm = field(x, solved.state.detach(), f_max_iter=0)
    assert warm.stats.nfe == 0
    assert_close(warm.prediction, solved.prediction, rtol=0, atol=1e-11)
    for a, b in zip(
        torch.autograd.grad(warm.prediction.sum(), list(field.parameters())),
        torch.autograd.grad(solved.prediction.sum(), list(field.parameters())),
        strict=True,
    ):
        assert_close(a, b, rtol=0, atol=1e-10)


def test_initial_weights_lie_in_their_ranges() -> None:
    torch.manual_seed(0)
    field = make_field(2, 3, FieldConfig(width=256, input_scale=128.0))
    assert isinstance(field, DEQField)
    A, c = field.injection.x_map.weight, field.injection.x_map.bias
    assert 62 < A.abs().max().item() <= 64  # 128 / sqrt(2) / sqrt(2)
    assert 3.0 < c.abs().max().item() <= torch.pi
    assert field.output_map.weight.abs().max() <= 1 / sqrt(256)
    layer: Any = field.f.layers[0]
    assert_close(layer["z_map"].weight_g[:, 0], layer["z_map"].weight_v.norm(dim=1))
    gabor = make_field(1, 1, FieldConfig(filter="gabor", width=4096, layers=1))
    assert isinstance(gabor, DEQField)
    assert gabor.injection.gamma.mean().item() == pytest.approx(3.0, rel=0.1)
    assert 0.99 < gabor.injection.mu.abs().max().item() <= 1


def test_siren_by_its_formula() -> None:
    torch.manual_seed(0)
    config = FieldConfig(kind="siren", width=16, layers=3, input_scale=30.0)
    field: Any = make_field(2, 1, config).double()
    a, b, c, d = field.linear_maps
    assert a.weight.abs().max() <= 1 / 2
    assert b.weight.abs().max() <= sqrt(6 / 16) / 30
    x = 2 * torch.rand(5, 2, dtype=torch.float64) - 1
    h = torch.sin(30 * (x @ a.weight.T + a.bias))
    h = torch.sin(30 * (h @ b.weight.T + b.bias))
    h = torch.sin(30 * (h @ c.weight.T + c.bias))
    assert_close(field(x).prediction, h @ d.weight.T + d.bias)


def test_mfn_by_its_formula() -> None:
    config = FieldConfig(kind="mfn", filter="fourier", width=4, layers=2, input_scale=2.0)
    field: Any = make_field(1, 1, config).double()
    x = 2 * torch.rand(5, 1, dtype=torch.float64) - 1
    g = torch.sin(x @ field.injection.x_map.weight.T + field.injection.x_map.bias).chunk(3, dim=1)
    z = g[0]
    for layer, g_l in zip(field.maps, g[1:], strict=True):
        z = (z @ layer.weight.T + layer.bias) * g_l
    assert_close(field(x).prediction, z @ field.output_map.weight.T + field.output_map.bias)


def test_positional_encoding_has_octaves_along_each_axis() -> None:
    field: Any = make_field(2, 1, FieldConfig(kind="relu_pe", width=4, input_scale=3))
    assert sorted(map(tuple, field.B.tolist())) == sorted(
        [(0.5, 0), (1, 0), (2, 0), (0, 0.5), (0, 1), (0, 2)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fields_copy_pickle_and_reload(kind: Any) -> None:
    filter: Any = "fourier" if kind == "mfn" else "siren_like"
    config = FieldConfig(kind=kind, filter=filter, width=6, input_scale=2.0)
    field = make_field(2, 1, config)
    x = 2 * torch.rand(4, 2) - 1
    field(x).prediction.sum().backward()
    wanted = field.eval()(x).prediction
    other = make_field(2, 1, config).eval()
    other.load_state_dict(field.state_dict())
    for again in (deepcopy(field), pickle.loads(pickle.dumps(field)), other):
        assert_close(again(x).prediction, wanted)


def test_norms_are_optional_and_removable() -> None:
    x = 2 * torch.rand(4, 2, dtype=torch.float64) - 1
    field = make_small().eval()
    wanted = field(x).prediction
    remove_norm(field)
    assert "f.layers.0.z_map.weight" in field.state_dict()
    assert_close(field(x).prediction, wanted)
    assert "f.layers.0.z_map.weight" in make_small(norm_type="none").state_dict()
    spectral = make_small(norm_type="spectral_norm")
    reset_norm(spectral)
    assert spectral(x).prediction.shape == (4, 2)


def test_several_states_are_returned_in_training_only() -> None:
    field = make_small(ift=False, higher_order=False, n_states=2, f_max_iter=20, grad=3)
    x = torch.rand(3, 2, dtype=torch.float64)
    out = field(x)
    assert [v.shape for v in out.predictions] == [(3, 2)] * 2
    assert out.stats.nfe == 20
    assert len(field.eval()(x).predictions) == 1


def test_half_precision_keeps_the_frequencies() -> None:
    torch.manual_seed(0)
    field = make_field(1, 1, FieldConfig(width=16, input_scale=1000.0), {"on_failure": "ignore"})
    x = 2 * torch.rand(32, 1) - 1
    with torch.no_grad():
        wanted = field.eval()(x).prediction
        with torch.autocast("cpu", torch.bfloat16):
            result = field(x).prediction.float()
    assert_close(result, wanted, rtol=0, atol=0.05)


def test_a_field_that_cannot_be_says_why() -> None:
    with pytest.raises(ValueError, match="did you mean 'siren'"):
        FieldConfig(kind="sirens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown filter"):
        FieldConfig(filter="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width must be at least 1"):
        FieldConfig(width=0)
    with pytest.raises(ValueError, match="input_scale must be positive"):
        FieldConfig(input_scale=0.0)
    with pytest.raises(ValueError, match="fourier or gabor"):
        make_field(2, 1, FieldConfig(kind="mfn"))
    with pytest.raises(ValueError, match="needs coordinates"):
        make_field(0, 1, FieldConfig(width=4))
    field = OnePassField(2, 1, FieldConfig(width=4))
    with pytest.raises(ValueError, match=r"\(\.\.\., 2\), got \(3, 1\)"):
        field(torch.zeros(3, 1))
    with pytest.raises(TypeError, match="floating point"):
        field(torch.zeros(3, 2, dtype=torch.long))
