"""Flow along a video: every solve starts from the state of the pair before, moved along."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.checks import check_at_least
from deq_zoo.flow.config import STRIDE
from deq_zoo.flow.layers import Injection, pixel_grid
from deq_zoo.flow.model import SETTLED, DEQFlow, Side, State
from deq_zoo.images.videos import read_video
from torchdeq import StopRule, solve
from torchdeq.solver import FixedPointIter

# The flow must settle, the hidden state need not. A power of two rounds nothing.
_HID_WEIGHT = 2.0**-6
_DISTANCES = 1 << 22  # in memory at a time


def carried(state: State) -> State:
    """Return a `z0` for the next pair of a video.

    Every place of the grid moves on by its flow. A place of the new grid takes flow and hidden
    state of the nearest place that arrived inside the image. If no place did, z0 is zero.
    """
    flow = state.flow
    N, _, h, w = flow.shape
    grid = pixel_grid(flow)
    ends = (grid + flow).flatten(2).mT  # (N, hw, 2)
    inside = ((ends > 0) & (ends < ends.new_tensor([w, h]))).all(-1)  # False for NaN
    places = grid.flatten(2).mT.expand(N, -1, -1)
    source = _nearest(places, torch.where(inside[..., None], ends, torch.inf))
    any_inside = inside.any(1)[:, None, None, None]
    moved = (each.flatten(2).gather(2, source[:, None].expand(-1, each.shape[1], -1))
             .view(each.shape) for each in state)  # fmt: skip
    return State(*(torch.where(any_inside, each, 0) for each in moved))


def _nearest(places: Tensor, points: Tensor) -> Tensor:
    """Return (N, n): for each place (N, n, 2) the index of the nearest of points (N, m, 2)."""
    rows = max(1, _DISTANCES // points.shape[1])
    nearest = []
    for part in places.split(rows, dim=1):
        gap = part[:, :, None] - points[:, None]
        nearest.append(gap.square().sum(-1).argmin(-1))
    return torch.cat(nearest, dim=1)


class Frame(NamedTuple):
    """The result for a frame of a video.

    Args:
        flow: (N, 2, H, W) from the frame before to this one, in pixels.
        nfe: evaluations of f.
        reused: whether the solve started from the state of the pair before.
        change: root mean square change of the flow in the last evaluation of f, in pixels; the
            largest of the batch.
    """

    flow: Tensor
    nfe: int
    reused: bool
    change: float


class FlowStream:
    """Flow from each frame of a video to the next; the state moves along.

    Plain iteration stops when the root mean square change of the flow over the grid is below
    `tolerance`, so that a good `z0` saves evaluations. The tolerance is in pixels of the image
    and does not depend on its size.

    Args:
        model: in evaluation mode.
        tolerance: pixels.
        max_iter: most evaluations for a pair; 0 is the model's own budget in evaluation.
        reuse: whether to start from the state of the pair before; False starts every solve at zero.
        cut: mean change of grey levels, at an eighth of the size, that begins a new scene.
        pad: see `DEQFlow.forward`.
    """

    def __init__(
        self,
        model: DEQFlow,
        tolerance: float = SETTLED,
        max_iter: int = 0,
        reuse: bool = True,
        cut: float = 50.0,
        pad: Side = "both",
    ) -> None:
        check_at_least(0, tolerance=tolerance, max_iter=max_iter)
        self.model, self.reuse, self.cut, self.pad = model, reuse, cut, pad
        self.tolerance, self.max_iter = tolerance, max_iter or model.deq.eval_f_max_iter
        self.reset()

    def reset(self) -> None:
        """Forget the video, as at the beginning of a new one."""
        self._last: Tensor | None = None
        self._state: State | None = None

    @torch.no_grad()
    def push(self, frame: Tensor) -> Frame | None:
        """Take a frame (N, 3, H, W); return None for the first frame of a size."""
        last, self._last = self._last, frame
        if last is None or last.shape != frame.shape:
            self._state = None
            return None
        if self._is_cut(last, frame):
            self._state = None
        reused = self.reuse and self._state is not None
        z0 = carried(self._state) if reused else self.model.zero_state(frame, self.pad)  # type: ignore[arg-type]
        given = self.model.inject(last, frame, self.pad)
        self._state, nfe, change = self.settle(z0, given)
        rows, columns = self.model.box(frame, self.pad)
        flow = self.model.decode(self._state)[..., rows, columns]
        return Frame(flow, nfe, reused, change)

    def settle(self, z0: State, given: Injection) -> tuple[State, int, float]:
        """Iterate from `z0` until the flow settles; return evaluations and last change, too."""
        block, latest = self.model.update_block, z0

        def f(hid: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal latest
            latest = State(*block(hid / _HID_WEIGHT, flow, given))
            return latest.hid * _HID_WEIGHT, latest.flow

        places = z0.flow.shape[2] * z0.flow.shape[3]
        pixels = STRIDE / places**0.5  # root mean square, in pixels, of a change of norm 1
        stop = StopRule(self.max_iter, self.tolerance / pixels)
        weighted = (z0.hid * _HID_WEIGHT, z0.flow)
        solution = solve(f, weighted, FixedPointIter(), stop, on_failure="ignore")
        hid, flow = solution.z
        change = pixels * float(solution.stats["abs_lowest"].max())
        # Pairs that did not settle get the last state, as the model itself returns it.
        failed = solution.stats.failed[:, None, None, None]
        state = State(
            torch.where(failed, latest.hid, hid / _HID_WEIGHT),
            torch.where(failed, latest.flow, flow),
        )
        return state, solution.stats.nfe, change

    def _is_cut(self, last: Tensor, frame: Tensor) -> bool:
        a, b = (F.avg_pool2d(x.float(), STRIDE, ceil_mode=True) for x in (last, frame))
        return bool((a - b).abs().mean() > self.cut)

    def __call__(self, frames: Iterable[Tensor]) -> Iterator[Frame]:
        """Yield the flow from each frame to the next."""
        for frame in frames:
            result = self.push(frame)
            if result is not None:
                yield result


def read_frames(path: str | Path) -> Generator[Tensor, None, None]:
    """Yield the frames (1, 3, H, W) of a video file, as bytes."""
    for frame in read_video(path):
        yield frame.pixels.permute(2, 0, 1)[None].contiguous()
