"""The smallest model: its trunk, the offsets it reads off the correlation, its coarse masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from deq_zoo.errors import ZooError
from deq_zoo.flow import DEQFlow, FlowConfig, correlate
from deq_zoo.flow.layers import convex_upsample, pixel_grid
from deq_zoo.flow.offsets import Offsets
from deq_zoo.flow.trunk import Trunk
from deq_zoo.flow.video import FlowStream
from deq_zoo.preset import find_preset
from tests.zoo.flow.frames import assert_pairs_are_independent, draw_frames

PLAIN = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 2}


def make_pocket(**config: Any) -> DEQFlow:
    torch.manual_seed(0)
    return DEQFlow(FlowConfig(size="pocket", **config), PLAIN).eval()


def test_it_fits_in_two_megabytes_in_half_precision() -> None:
    weights = find_preset("flow-nano").task.build().state_dict()
    assert sum(2 * weight.numel() for weight in weights.values()) < 2_000_000


@pytest.mark.parametrize(("height", "width"), [(64, 64), (67, 90), (1, 5)])
@torch.no_grad()
def test_images_of_any_size_get_a_finite_flow(height: int, width: int) -> None:
    out = make_pocket()(draw_frames(2, height, width))
    assert out.prediction.shape == (2, 2, height, width)
    assert out.prediction.isfinite().all()


@torch.no_grad()
def test_a_pair_does_not_depend_on_its_batch_mates() -> None:
    assert_pairs_are_independent(make_pocket().double())


@torch.no_grad()
def test_features_have_no_common_part_and_one_length() -> None:
    trunk = Trunk(12, 8, (8, 8, 12)).double()
    shared = trunk(torch.randn(2, 3, 64, 80, dtype=torch.float64))
    assert shared.shape == (2, 12, 8, 10)
    got = trunk.features(shared)
    plain = trunk.to_features(shared)
    for n in range(2):
        centred = plain[n] - plain[n].flatten(1).mean(1)[:, None, None]
        for y, x in ((0, 0), (3, 7), (7, 9)):
            v = centred[:, y, x]
            assert_close(got[n, :, y, x], 12**0.5 * v / v.dot(v).sqrt())


@torch.no_grad()
def test_grey_frames_without_texture_have_finite_features_and_flow() -> None:
    frame = torch.full((1, 3, 64, 64), 128, dtype=torch.uint8)
    assert make_pocket()((frame, frame)).prediction.isfinite().all()


def test_offsets_are_the_means_of_softmax_weights() -> None:
    levels, radius, (h, w) = 2, 1, (3, 4)
    offsets = Offsets(levels, radius).double()
    with torch.no_grad():
        offsets.sharpness.copy_(torch.tensor([0.7, 2.0]))
    corr = torch.randn(1, 18, h, w, dtype=torch.float64)
    got = offsets(corr)
    assert got.shape == (1, 6, h, w)
    for level, beta in enumerate((0.7, 2.0)):
        weight = (beta * corr[0, 9 * level : 9 * level + 9, 1, 2]).exp()
        p = (weight / weight.sum()).view(3, 3)  # rows: along x, columns: along y
        x = float(p[2].sum() - p[0].sum()) * 2**level
        y = float(p[:, 2].sum() - p[:, 0].sum()) * 2**level
        assert_close(got[0, 2 * level : 2 * level + 2, 1, 2], got.new_tensor([x, y]))
        assert_close(got[0, 4 + level, 1, 2], p.square().sum())


@torch.no_grad()
def test_offsets_find_a_shift_of_features() -> None:
    fmap1 = F.normalize(torch.randn(1, 24, 12, 14), dim=1) * 24**0.5
    fmap2 = fmap1.roll((1, -2), (2, 3))  # one row down, two columns to the left
    corr = correlate(fmap1, fmap2, levels=1, radius=3)(pixel_grid(fmap1))
    offsets = Offsets(1, 3)
    offsets.sharpness.fill_(20.0)
    x, y, sure = offsets(corr)[0, :, 3:-3, 3:-3]
    assert_close(x, torch.full_like(x, -2.0), atol=1e-2, rtol=0)
    assert_close(y, torch.full_like(y, 1.0), atol=1e-2, rtol=0)
    assert sure.min() > 0.99


def test_a_coarse_mask_blends_nine_flows_and_a_resize_does_the_rest() -> None:
    flow, mask = torch.randn(2, 2, 5, 6), torch.randn(2, 9 * 16, 5, 6)
    got = convex_upsample(flow, mask)
    assert got.shape == (2, 2, 40, 48)
    fine = torch.zeros(2, 2, 20, 24)
    near = F.pad(flow, (1, 1, 1, 1))
    weight = mask.view(2, 9, 4, 4, 5, 6).softmax(1)
    for y in range(20):
        for x in range(24):
            (i, r), (j, s) = divmod(y, 4), divmod(x, 4)
            for k in range(9):
                neighbour = near[:, :, i + k // 3, j + k % 3]
                fine[:, :, y, x] += 8 * weight[:, k, r, s, i, j, None] * neighbour
    assert_close(got, F.interpolate(fine, scale_factor=2, mode="bilinear"))


def test_gradients_reach_every_weight() -> None:
    model = make_pocket().train()
    out = model(draw_frames(2, 64, 72))
    out.prediction.square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name


def test_a_video_reuses_its_states() -> None:
    frames = [draw_frames(1, 64, 72)[0] for _ in range(3)]
    results = list(FlowStream(make_pocket())(frames))
    assert [each.reused for each in results] == [False, True]


def test_what_the_size_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="pocket has no batch norm"):
        FlowConfig(size="pocket", freeze_bn=True)
    task = find_preset("flow-nano").task
    with pytest.raises(ZooError, match="no model of size pocket"):
        task.to_authors({})
