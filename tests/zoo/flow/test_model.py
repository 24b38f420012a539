"""The model's promises: any size, dtype and batch; weights shared; reuse of states."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from deq_zoo.flow import DEQFlow, FlowConfig, State
from deq_zoo.flow.layers import convex_upsample, pixel_grid
from tests.zoo.flow.frames import assert_pairs_are_independent, draw_frames
from torchdeq import reset_norm

PLAIN = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 3}


def make_nano(deq: Any = PLAIN, **config: Any) -> DEQFlow:
    torch.manual_seed(0)
    return DEQFlow(FlowConfig(size="nano", **config), deq).eval()


@pytest.mark.parametrize(("height", "width"), [(64, 64), (120, 72), (67, 90), (1, 5), (130, 8)])
@pytest.mark.parametrize("pad", ["both", "bottom"])
@torch.no_grad()
def test_images_of_any_size_get_a_finite_flow(height: int, width: int, pad: Any) -> None:
    out = make_nano()(draw_frames(2, height, width), pad=pad)
    assert len(out.predictions) == 1
    assert out.prediction.shape == (2, 2, height, width)
    assert out.prediction.isfinite().all()
    assert out.stats.nfe == 3
    assert out.state.flow.shape[2:] == (max(8, -(-height // 8)), max(8, -(-width // 8)))


@torch.no_grad()
def test_padding_repeats_the_border_where_it_should() -> None:
    model = make_nano()
    a, b = (x.float() for x in draw_frames(1, 67, 70))
    for pad, (top, bottom) in (("both", (2, 3)), ("bottom", (0, 5))):
        padded = [F.pad(x, (1, 1, top, bottom), mode="replicate") for x in (a, b)]
        whole = model((padded[0], padded[1])).prediction
        flow = model((a, b), pad=pad).prediction
        assert_close(flow, whole[..., top : whole.shape[2] - bottom, 1:-1])


@pytest.mark.parametrize("gma", [False, True])
@torch.no_grad()
def test_a_pair_does_not_depend_on_its_batch_mates(gma: bool) -> None:
    assert_pairs_are_independent(make_nano(gma=gma).double())


@torch.no_grad()
def test_one_evaluation_is_the_published_recurrence() -> None:
    model = make_nano().double()
    a, b = draw_frames()
    given = model.inject(a, b)
    hid, flow = torch.randn(1, 32, 8, 8).double(), torch.randn(1, 2, 8, 8).double()
    block = model.update_block
    context = F.relu(model.cnet(2 * a.double() / 255 - 1))
    m = block.encoder(given.correlation(pixel_grid(flow) + flow), flow)
    x, h = torch.cat((context, m), dim=1), hid
    gru = block.gru
    for z_conv, r_conv, q_conv in (
        (gru.convz1, gru.convr1, gru.convq1),
        (gru.convz2, gru.convr2, gru.convq2),
    ):
        z = torch.sigmoid(z_conv(torch.cat((h, x), dim=1)))
        r = torch.sigmoid(r_conv(torch.cat((h, x), dim=1)))
        q = torch.tanh(q_conv(torch.cat((r * h, x), dim=1)))
        h = (1 - z) * h + z * q
    got_hid, got_flow = block(hid, flow, given)
    assert_close(got_hid, h)
    assert_close(got_flow, flow + block.flow_head(h))


def test_convex_upsampling_is_a_mean_of_neighbours() -> None:
    flow, mask = torch.randn(2, 2, 3, 4).double(), torch.randn(2, 576, 3, 4).double()
    up = convex_upsample(flow, mask)
    assert up.shape == (2, 2, 24, 32)
    n, c, i, j, r, s = 1, 0, 2, 1, 5, 3
    weight = torch.stack([mask[n, k * 64 + r * 8 + s, i, j] for k in range(9)]).softmax(0)
    near = F.pad(flow, (1, 1, 1, 1))[n, c, i : i + 3, j : j + 3].flatten()
    assert_close(up[n, c, 8 * i + r, 8 * j + s], (weight * 8 * near).sum())
    even = convex_upsample(torch.ones(1, 2, 5, 5), torch.zeros(1, 576, 5, 5))
    assert_close(even[..., 8:-8, 8:-8], torch.full((1, 2, 24, 24), 8.0))


@pytest.mark.parametrize("storage", ["volume", "on_demand"])
def test_implicit_gradients_flow_in_either_storage(storage: Any) -> None:
    model = make_nano({"ift": True, "f_max_iter": 12, "f_tol": 0.0, "b_max_iter": 6,
                  "on_failure": "ignore"}, correlation=storage)  # fmt: skip
    model.train()(draw_frames()).prediction.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_frozen_statistics_stay_when_training_is_turned_on_again() -> None:
    model = make_nano(freeze_bn=True).train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = norms[0].running_mean.clone()  # type: ignore[union-attr]
    model(draw_frames(2))
    model.eval()
    model.train()
    model(draw_frames(2))
    assert not any(m.training for m in norms)
    assert model.training
    assert torch.equal(before, norms[0].running_mean)  # type: ignore[arg-type]
    assert make_nano().train().cnet.norm1.training


@torch.no_grad()
def test_a_state_can_be_taken_up_again() -> None:
    model, pair = make_nano(), draw_frames()
    half = model(pair, f_max_iter=2)
    rest = model(pair, half.state, f_max_iter=3)
    assert_close(rest.prediction, model(pair, f_max_iter=5).prediction)


@torch.no_grad()
def test_copies_pickles_and_state_dicts_are_the_same_function() -> None:
    model, pair = make_nano(gma=True), draw_frames()
    flow = model(pair).prediction
    assert torch.equal(copy.deepcopy(model)(pair).prediction, flow)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert torch.equal(again(pair).prediction, flow)
    other = DEQFlow(model.config, PLAIN).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(pair).prediction, flow)


@torch.no_grad()
def test_half_precision_keeps_coordinates_exact() -> None:
    pair = draw_frames()
    exact = make_nano()(pair).prediction
    half = make_nano().bfloat16()
    reset_norm(half)
    out = half(pair)
    assert out.state.flow.dtype == torch.float32
    assert float((out.prediction - exact).abs().mean()) < 0.1 * float(exact.abs().mean()) + 0.2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        flow = make_nano()(pair).prediction
    assert flow.dtype == torch.float32  # a flow of 200 pixels would be rounded to whole ones
    assert flow.isfinite().all()
    assert float((flow - exact).abs().mean()) < 0.1 * float(exact.abs().mean()) + 0.2


@torch.no_grad()
def test_evaluation_returns_the_state_of_least_residual() -> None:
    model = make_nano({"f_max_iter": 8, "eval_factor": 1.5, "on_failure": "ignore"}).double()
    pair = draw_frames(3, 67, 90)
    out = model(pair)
    given, z = model.inject(*pair), model.zero_state(pair[0])
    seen = []
    for _ in range(12):
        last, z = z, State(*model.update_block(*z, given))
        gap = torch.cat([(a - b).flatten(1) for a, b in zip(z, last, strict=True)], dim=1)
        seen.append((gap.norm(dim=1), z.flow))
    residuals = torch.stack([residual for residual, _ in seen])  # (12, 3)
    for n, k in enumerate(residuals.argmin(0).tolist()):
        assert_close(out.state.flow[n], seen[k][1][n])
    assert out.stats.nfe == 12


@torch.no_grad()
def test_the_spectral_radius_of_a_pair_of_states_is_reported() -> None:
    stats = make_nano()(draw_frames(), sradius_mode=True).stats
    assert stats["sradius"].shape == (1,)
    assert stats["sradius"].isfinite().all()


def test_mistakes_are_errors() -> None:
    model = make_nano()
    a, b = draw_frames()
    with pytest.raises(ValueError, match="unknown size 'hug'"):
        FlowConfig(size="hug")
    with pytest.raises(ValueError, match="both frames must have one size"):
        model((a, draw_frames(1, 72, 64)[1]))
    with pytest.raises(ValueError, match="both frames must have one size"):
        model((a[..., :60, :], b))  # which padding would make equal
    with pytest.raises(ValueError, match=r"z0 for these images .* \(1, 2, 8, 8\)"):
        model((a, b), model.zero_state(draw_frames(1, 72, 64)[0]))
    with pytest.raises(ValueError, match="auto, volume, on_demand, got 'none'"):
        FlowConfig(correlation="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"images must be \(batch, 3"):
        model((a[0], b[0]))
    with pytest.raises(ValueError, match="pad is both or bottom"):
        model((a, b), pad="top")
    with pytest.raises(ValueError, match="dropout"):
        FlowConfig(dropout=1.0)


def test_the_published_initialisation() -> None:
    torch.manual_seed(0)
    model = DEQFlow(FlowConfig(size="tiny"))
    block: Any = model.fnet.layer3[0]
    weight = block.conv2.weight
    assert_close(weight.std().item(), (2 / (128 * 9)) ** 0.5, rtol=0.02, atol=0)
    gru: Any = model.update_block.gru
    assert gru.convz1.weight_g.shape == (32, 1, 1, 1)
    assert_close(gru.convz1.weight_v.abs().max().item(), (96 * 5) ** -0.5, rtol=0.01, atol=0)


def test_states_have_names() -> None:
    z = make_nano().zero_state(draw_frames()[0])
    assert isinstance(z, State)
    assert not z.hid.any()
