"""The correlation lookup beside a direct one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.flow import correlate
from deq_zoo.flow.correlation import LEVELS, RADIUS, planes
from deq_zoo.flow.layers import pixel_grid

PLANES = planes(LEVELS, RADIUS)


def look_up_directly(
    fmap1: Tensor, fmap2: Tensor, coords: Tensor, count: int = LEVELS, radius: int = RADIUS
) -> Tensor:
    """Pool the volume, then sample every point of every window by itself."""
    N, D, h, w = fmap1.shape
    volume = torch.einsum("ndp,ndq->npq", fmap1.flatten(2), fmap2.flatten(2)) / D**0.5
    level = volume.reshape(N * h * w, 1, h, w)
    steps = torch.arange(-radius, radius + 1, dtype=coords.dtype)
    centre = coords.permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
    levels = []
    for k in range(count):
        if k:
            level = F.avg_pool2d(level, 2)
        x = centre[..., 0] / 2**k + steps[None, :, None]  # slow index along x
        y = centre[..., 1] / 2**k + steps[None, None, :]
        height, width = level.shape[2:]
        x, y = torch.broadcast_tensors((2 * x + 1) / width - 1, (2 * y + 1) / height - 1)
        at = torch.stack((x, y), dim=-1)
        levels.append(F.grid_sample(level, at, align_corners=False).reshape(N, h, w, -1))
    return torch.cat(levels, dim=-1).permute(0, 3, 1, 2)


def make_problem(N: int, h: int, w: int, D: int = 5, spread: float = 4.0) -> tuple[Tensor, ...]:
    fmaps = torch.randn(2, N, D, h, w, dtype=torch.float64)
    coords = pixel_grid(fmaps) + spread * torch.randn(N, 2, h, w, dtype=torch.float64)
    return fmaps[0], fmaps[1], coords


@pytest.mark.parametrize("storage", ["volume", "on_demand"])
@pytest.mark.parametrize(
    ("N", "h", "w"), [(1, 16, 16), (2, 9, 13), (1, 8, 8), (2, 11, 8), (0, 8, 9)]
)
def test_equals_sampling_a_pooled_volume(N: int, h: int, w: int, storage: Any) -> None:
    fmap1, fmap2, coords = make_problem(N, h, w)
    result = correlate(fmap1, fmap2, storage)(coords)
    assert result.shape == (N, PLANES, h, w)
    if N:  # the reference cannot sample nothing
        assert_close(result, look_up_directly(fmap1, fmap2, coords), atol=1e-10, rtol=0)


@pytest.mark.parametrize("storage", ["volume", "on_demand"])
@pytest.mark.parametrize(("levels", "radius"), [(3, 3), (1, 2), (4, 1)])
def test_other_levels_and_radii_equal_sampling_a_pooled_volume(
    levels: int, radius: int, storage: Any
) -> None:
    fmap1, fmap2, coords = make_problem(2, 9, 13)
    result = correlate(fmap1, fmap2, storage, levels, radius)(coords)
    assert result.shape[1] == planes(levels, radius) == levels * (2 * radius + 1) ** 2
    want = look_up_directly(fmap1, fmap2, coords, levels, radius)
    assert_close(result, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("storage", ["volume", "on_demand"])
def test_gradients_are_those_of_the_reference(storage: Any) -> None:
    inputs = [t.requires_grad_() for t in make_problem(2, 9, 10)]
    probe = torch.randn(2, PLANES, 9, 10, dtype=torch.float64)
    fmap1, fmap2, coords = inputs
    want = torch.autograd.grad((look_up_directly(fmap1, fmap2, coords) * probe).sum(), inputs)
    got = torch.autograd.grad((correlate(fmap1, fmap2, storage)(coords) * probe).sum(), inputs)
    assert_close(got, want, atol=1e-9, rtol=0)


def test_rows_on_demand_may_come_in_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    fmap1, fmap2, coords = make_problem(2, 9, 13)
    whole = correlate(fmap1, fmap2, "on_demand")(coords)
    monkeypatch.setattr("deq_zoo.flow.correlation._ON_DEMAND", 500)
    assert_close(correlate(fmap1, fmap2, "on_demand")(coords), whole)


def test_is_zero_far_outside_and_at_infinity() -> None:
    fmap1, fmap2, coords = make_problem(1, 8, 8)
    lookup = correlate(fmap1, fmap2)
    assert not lookup(coords + 1e7).any()
    assert not lookup(coords - 1e30).any()
    nowhere = coords.clone()
    nowhere[0, 0, 3, 3] = torch.nan
    result = lookup(nowhere)
    assert result[0, :, 3, 3].isnan().any()
    assert result.isfinite().all(1).sum() == 63  # its neighbours do not notice


def test_half_precision_features_are_correlated_in_single() -> None:
    fmap1, fmap2, coords = (t.bfloat16() for t in make_problem(1, 8, 8, spread=0.0))
    result = correlate(fmap1, fmap2)(coords)
    assert result.dtype == torch.float32
    assert_close(result, correlate(fmap1.float(), fmap2.float())(coords.float()))


def test_features_that_are_too_small_are_refused() -> None:
    fmap = torch.zeros(1, 4, 7, 9)
    with pytest.raises(ValueError, match="at least 8 x 8, got 7 x 9: pad the images to 64"):
        correlate(fmap, fmap)


def test_a_volume_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fmap1, fmap2, coords = make_problem(2, 9, 13)
    kept = correlate(fmap1, fmap2)
    assert kept.volume is not None
    monkeypatch.setattr("deq_zoo.flow.correlation._LARGEST", kept.volume.numel() - 1)
    result = correlate(fmap1, fmap2)
    assert result.volume is None
    assert correlate(fmap1, fmap2, "volume").volume is not None
    assert_close(result(coords), kept(coords))
