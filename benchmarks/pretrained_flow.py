"""Are small flow models of use on whole frames, and what does reuse along a video save?

`python -m benchmarks.pretrained_flow flow-quick=RUN flow-nano=RUN [--data-dir DATA]` scores runs or
pretrained models, each with the evaluations of f of its own evaluation: one frame twice, pure
shifts, warps, the stereo pair, the pairs of Middlebury and FlyingChairs in a folder, and videos
with and without reuse of the last state. The photographs are those of the test split, which no run
trains on. Rows of other runs in the file of results stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import deq_zoo
from benchmarks.flow_models import MOTION, error_of
from benchmarks.storing import RESULTS, store_part
from deq_zoo.flow import DEQFlow, warped
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.datasets import FlowSet, chairs, middlebury
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.flow.scenes import Scenes
from deq_zoo.flow.video import FlowStream, read_frames
from deq_zoo.flow.warps import PHOTOGRAPHS, Warps, motorcycle, photograph, synthetic_video

FILE = RESULTS / "pretrained_flow.json"
SIZE = (256, 320)
SHIFTS = ((1, 0), (3, -2), (6, 3), (-10, 6), (16, 9))  # pixels along x and y
TOLERANCES = (1.0, 0.5)  # pixels
Pairs = Sequence[Pair] | FlowSet
Method = Callable[[Pair], Tensor]


def shifted_pair(name: str, shift: tuple[int, int]) -> Pair:
    """Return two frames of a photograph, a whole number of pixels apart."""
    photo, (height, width), (x, y) = photograph(name), SIZE, shift
    top, left = (photo.shape[1] - height) // 2, (photo.shape[2] - width) // 2
    image1 = photo[:, top : top + height, left : left + width]
    image2 = photo[:, top - y : top - y + height, left - x : left - x + width]
    flow = torch.tensor([float(x), float(y)])[:, None, None].expand(2, *SIZE)
    return Pair(image1, image2, flow, torch.ones(SIZE, dtype=torch.bool))


def test_sets(data_dir: str | None) -> dict[str, Pairs]:
    """Return the test pairs by set."""
    names = PHOTOGRAPHS["test"]
    sets: dict[str, Pairs] = {"identical": [shifted_pair(name, (0, 0)) for name in names]}
    for shift in SHIFTS:
        sets[f"shift {shift}"] = [shifted_pair(name, shift) for name in names]
    sets["warps 64 x 96"] = Warps("test", (64, 96), MOTION).first(30)
    sets["warps 256 x 320"] = Warps("test", SIZE, MOTION).first(6)
    sets["scenes 256 x 320"] = Scenes("test").first(12, SIZE)
    sets["motorcycle"] = [motorcycle(half=True)]
    if data_dir is not None:
        sets["middlebury"] = middlebury(Path(data_dir) / "flow_middlebury")
        sets["chairs"] = chairs(Path(data_dir) / "flow_chairs", "all")
    return sets


@torch.no_grad()
def predict(model: DEQFlow, pair: Pair) -> Tensor:
    """Return the flow (2, H, W) of a pair."""
    flow: Tensor = model((pair.image1[None], pair.image2[None])).prediction[0]
    return flow


def score(method: Method, sets: dict[str, Pairs]) -> dict[str, float]:
    """Return the mean error over all pixels of every set."""
    return {name: error_of(method, pairs) for name, pairs in sets.items()}


def videos() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return smooth camera paths over the test photographs, with exact flows."""
    return [synthetic_video(12, SIZE, name, speed=6.0, reach=60.0) for name in ("coffee", "flower")]


def reuse(model: DEQFlow) -> Iterator[dict[str, Any]]:
    """Yield errors and evaluations along videos by tolerance, from zero and from the last pair.

    The first pair of a video, which has no pair before it, does not count.
    """
    clips = videos()
    budget = model.deq.eval_f_max_iter
    limits = [(0.0, n) for n in (1, 2, 3, 4, budget)] + [(each, budget) for each in TOLERANCES]
    for tolerance, most in limits:
        for carried in (False, True):
            scores, evaluations = FlowScores(), []
            for frames, flows in clips:
                stream = FlowStream(model, tolerance, max_iter=most, reuse=carried)
                for k, result in enumerate(stream(frame[None] for frame in frames)):
                    if k:
                        scores.add(result.flow[0], flows[k])
                        evaluations.append(result.nfe)
            row = {"tolerance": tolerance, "most": most, "reuse": carried}
            yield row | {"nfe": mean(evaluations), "aepe": scores.aepe}


def film(model: DEQFlow, file: Path, count: int = 12) -> Iterator[dict[str, Any]]:
    """Yield evaluations along a real video, and how well the next frame explains each frame.

    `grey` is the mean difference, in grey levels, between a frame and the next one as the flow
    shows it from the first; `grey_at_rest` is that without motion.
    """
    frames = [frame for frame, _ in zip(read_frames(file), range(count), strict=False)]
    for carried in (False, True):
        stream = FlowStream(model, 0.5, reuse=carried)
        evaluations, grey, rest = list[int](), list[float](), list[float]()
        for k, result in enumerate(stream(frames)):
            if k:
                a, b = frames[k].float(), frames[k + 1].float()
                seen = warped(b, result.flow)
                evaluations.append(result.nfe)
                grey.append(float((seen - a).abs().mean()))
                rest.append(float((b - a).abs().mean()))
        row = {"video": file.name, "tolerance": 0.5, "reuse": carried, "nfe": mean(evaluations)}
        yield row | {"grey": mean(grey), "grey_at_rest": mean(rest)}


def measure(model: DEQFlow, sets: dict[str, Pairs], data_dir: str | None) -> dict[str, Any]:
    """Return all numbers of a model."""
    began = time.process_time()
    errors = score(lambda pair: predict(model, pair), sets)
    seconds = time.process_time() - began
    rows = list(reuse(model))
    video = None if data_dir is None else Path(data_dir) / "video" / "bikes.mp4"
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "evaluations": model.deq.eval_f_max_iter,
        "errors": errors,
        "cpu_seconds": seconds,
        "reuse": rows,
        "film": list(film(model, video)) if video is not None and video.exists() else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="run folders, with names")
    parser.add_argument("--data-dir", help="folder with flow_middlebury, flow_chairs and video")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "pretrained_flow.json", help="file of the results"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    sets = test_sets(args.data_dir)
    at_rest = {"errors": score(lambda pair: torch.zeros_like(pair.flow), sets)}
    store_part(args.out, "no motion", at_rest, seeds=[])
    for each in args.runs:
        name, _, run = each.partition("=")
        model = deq_zoo.load(run)
        assert isinstance(model, DEQFlow)
        assert model.preset is not None
        result = measure(model, sets, args.data_dir)
        print(name, json.dumps(result, indent=1), flush=True)
        store_part(args.out, name, result, seeds=[model.preset.seed])


if __name__ == "__main__":
    main()
