"""States carried along a video, and evaluations that this saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from deq_zoo.flow import DEQFlow, FlowConfig, State
from deq_zoo.flow.video import FlowStream, carried, read_frames
from tests.golden import find_data


class Towards(nn.Module):
    """An f that halves the distance to a flow, hid to zero."""

    def forward(self, hid: Tensor, flow: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        return hid / 2, (flow + given) / 2


class Oracle(DEQFlow):
    """A model whose flow of a pair is the difference of the frames' means."""

    def __init__(self) -> None:
        super().__init__(FlowConfig(size="nano"))
        self.update_block = Towards()  # type: ignore[assignment]

    def inject(self, image1: Tensor, image2: Tensor, pad: Any = "both") -> Any:
        step = (image2.float() - image1.float()).mean(dim=(1, 2, 3), keepdim=True)
        return step.expand_as(self.zero_state(image1).flow)


def make_oracle() -> DEQFlow:
    return Oracle().eval()


def carry_one_by_one(state: State) -> tuple[Tensor, Tensor]:
    """Move every pixel to where the flow points, nearest neighbours one by one."""
    _, _, h, w = state.flow.shape
    hid, flow = torch.zeros_like(state.hid), torch.zeros_like(state.flow)
    for n in range(len(flow)):
        ends = []
        for y in range(h):
            for x in range(w):
                u, v = state.flow[n, :, y, x].tolist()
                if 0 < x + u < w and 0 < y + v < h:
                    ends.append((x + u, y + v, x, y))
        for y in range(h):
            for x in range(w):
                *_, sx, sy = min(ends, key=lambda e: (e[0] - x) ** 2 + (e[1] - y) ** 2)
                flow[n, :, y, x] = state.flow[n, :, sy, sx]
                hid[n, :, y, x] = state.hid[n, :, sy, sx]
    return hid, flow


def test_a_carried_state_is_that_of_the_nearest_arrival() -> None:
    state = State(torch.randn(2, 3, 6, 7).double(), 2 * torch.randn(2, 2, 6, 7).double())
    result = carried(state)
    assert_close(tuple(result), carry_one_by_one(state))


def test_the_nearest_are_scipys() -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    flow = 1.5 * torch.randn(1, 2, 9, 11).double()
    y, x = torch.meshgrid(torch.arange(9), torch.arange(11), indexing="ij")
    at_x, at_y = x + flow[0, 0], y + flow[0, 1]
    kept = (at_x > 0) & (at_x < 11) & (at_y > 0) & (at_y < 9)
    want = [
        interpolate.griddata(
            (at_x[kept].numpy(), at_y[kept].numpy()),
            each[kept].numpy(),
            (x.numpy(), y.numpy()),
            method="nearest",
        )
        for each in flow[0]
    ]
    result = carried(State(flow, flow)).flow[0]
    assert_close(result, torch.stack([torch.tensor(each) for each in want]))


def test_a_still_state_is_carried_as_it_is_where_it_can() -> None:
    state = State(torch.randn(1, 4, 5, 5), torch.full((1, 2, 5, 5), 0.25))
    result = carried(state)
    assert torch.equal(result.hid, state.hid)
    gone = carried(State(state.hid, torch.full((1, 2, 5, 5), 100.0)))
    assert not gone.hid.any()
    assert not gone.flow.any()


def test_reuse_saves_evaluations_and_keeps_the_answer() -> None:
    frames = [torch.full((1, 3, 64, 72), 2.0 * k) for k in range(5)]  # a steady flow of 2
    model = make_oracle()
    warm = list(FlowStream(model, tolerance=0.01)(frames))
    cold = list(FlowStream(model, tolerance=0.01, reuse=False)(frames))
    assert [result.reused for result in warm] == [False, True, True, True]
    assert not any(result.reused for result in cold)
    assert warm[0].nfe == cold[0].nfe > 8
    assert all(result.nfe <= 2 for result in warm[1:])
    for a, b in zip(warm, cold, strict=True):
        assert_close(a.flow, b.flow, atol=0.02, rtol=0)


def test_the_flow_is_carried_once() -> None:
    model, seen = make_oracle(), []
    stream = FlowStream(model, max_iter=1)
    frames = [torch.full((1, 3, 64, 64), 100.0) + k for k in range(3)]
    stream.push(frames[0])
    stream.push(frames[1])
    stream._state = State(torch.zeros(1, 32, 8, 8), torch.full((1, 2, 8, 8), 0.5))
    settle = stream.settle
    stream.settle = lambda z0, given: seen.append(z0) or settle(z0, given)  # type: ignore[method-assign,func-returns-value]
    stream.push(frames[2])
    assert_close(seen[0].flow, torch.full((1, 2, 8, 8), 0.5))


def test_cuts_and_new_sizes_begin_anew() -> None:
    stream = FlowStream(make_oracle(), max_iter=2)
    dark, light = torch.zeros(1, 3, 64, 64), torch.full((1, 3, 64, 64), 255.0)
    assert stream.push(dark) is None
    first, second, cut = stream.push(dark), stream.push(dark), stream.push(light)
    assert first is not None
    assert second is not None
    assert cut is not None
    assert (first.reused, second.reused, cut.reused) == (False, True, False)
    assert stream.push(torch.zeros(1, 3, 72, 64)) is None
    stream.reset()
    assert stream.push(dark) is None
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        FlowStream(make_oracle(), tolerance=-1)


def test_a_pair_gets_the_evaluations_of_the_models_own_evaluation() -> None:
    model = make_oracle()
    model.deq.eval_f_max_iter = 3
    frames = [torch.full((1, 3, 64, 64), 9.0 * k) for k in range(2)]
    assert [result.nfe for result in FlowStream(model, tolerance=0.0)(frames)] == [3]
    assert [result.nfe for result in FlowStream(model, 0.0, max_iter=5)(frames)] == [5]


def test_the_tolerance_does_not_depend_on_the_size() -> None:
    nfe = []
    for width in (64, 256):
        stream = FlowStream(make_oracle(), tolerance=0.02)
        result = [stream.push(torch.full((1, 3, 64, width), 3.0 * k)) for k in range(2)][1]
        assert result is not None
        nfe.append(result.nfe)
    assert nfe[0] == nfe[1]


def test_a_real_video_is_read() -> None:
    pytest.importorskip("av")
    frames = read_frames(find_data("video") / "bikes.mp4")
    assert next(frames).shape == (1, 3, 272, 640)
    frames.close()


def test_what_is_no_video_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from deq_zoo.errors import DataError

    (tmp_path / "x.mp4").write_bytes(b"no video")
    with pytest.raises(DataError, match="as a video"):
        next(read_frames(tmp_path / "x.mp4"))


def test_the_first_pair_of_a_stream_is_that_of_the_model_alone() -> None:
    torch.manual_seed(0)
    model = DEQFlow(
        FlowConfig(size="nano"), {"f_solver": "simple_fixed_point_iter", "f_max_iter": 4}
    )
    frames = [torch.randint(0, 256, (1, 3, 64, 72)) for _ in range(2)]
    model.eval()
    stream = FlowStream(model, tolerance=1e-6)
    assert stream.push(frames[0]) is None
    frame = stream.push(frames[1])
    assert frame is not None
    with torch.no_grad():
        out = model((frames[0], frames[1]))
    assert_close(frame.flow, out.prediction, atol=1e-4, rtol=1e-4)
