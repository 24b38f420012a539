"""How good is an equilibrium as an implicit representation, and what does a step of it cost?

It measures the PSNR of DEQ-SIREN, DEQ-MFN and SIREN of as many parameters on images (at the test
pixels, between those learnt), a sound and a video, after as many steps and after as much processor
time, each with its last weights; and the time of a training step beside the same model on torchdeq
0.1.0. `python -m benchmarks.inr --only PART`; every row is written at once, and a second run goes
on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from benchmarks.contest import installed
from benchmarks.inr_speed import time_steps
from benchmarks.storing import read, results_file, store_part
from deq_zoo.inr import FieldConfig, FitSignal, GeneraliseImage
from deq_zoo.inr.recipes import CORRECTED, RECIPE, SHORT
from deq_zoo.task import Shard

NAME = "inr"
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The size of every measurement."""

    seeds: int = 3
    images: int = 6
    side: int = 128
    width: int = 128
    image_steps: int = 300
    audio_samples: int = 88_200
    audio_steps: int = 500
    audio_batch: int = 16_384
    frames: int = 16
    shrink: int = 4
    video_width: int = 256
    video_steps: int = 150
    video_batch: int = 8192
    rounds: int = 7
    speed: tuple[tuple[int, int], ...] = ((4096, 128), (65_536, 128), (65_536, 512))
    speed_video: tuple[int, int] = (65_536, 256)


SMALL = Size(
    seeds=1, images=1, side=32, width=16, image_steps=15, audio_samples=2000, audio_steps=15,
    audio_batch=500, frames=2, shrink=16, video_width=16, video_steps=9, video_batch=300, rounds=2,
    speed=((512, 16),), speed_video=(512, 16),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--data-dir", type=Path, default=Path(), help="has kodak, audio and video")
    parser.add_argument("--small", action="store_true", help="a minute, to try it out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = SMALL if args.small else Size()
    for part in [args.only] if args.only else list(PARTS):
        results = Results(part, args.small)
        for key, make in PARTS[part](size, args.data_dir, results):
            if key not in results.rows:
                results.add(key, make())
                row = results.rows[key]
                print(key, json.dumps({k: v for k, v in row.items() if k != "course"}))
        for name, means in summary(results.rows).items():
            print(name, json.dumps(means))


class Results:
    """The rows of one part, in a file with those of the others."""

    def __init__(self, part: str, small: bool) -> None:
        self.part, self.file = part, results_file(NAME, small)
        self.rows: dict[str, Row] = read(self.file).get(part, {}).get("rows", {})

    def add(self, key: str, row: Row) -> None:
        """Add a row; the file is replaced as a whole."""
        resumed = bool(self.rows)
        self.rows[key] = row
        content = {"rows": self.rows, "summary": summary(self.rows)}
        seeds = [each.get("seed", 0) for each in self.rows.values()]
        store_part(self.file, self.part, content, seeds, resumed=resumed)


def summary(rows: dict[str, Row]) -> dict[str, Row]:
    """Return means over signals and seeds, for rows that have a PSNR."""
    means = {}
    for model in dict.fromkeys(row["model"] for row in rows.values() if "psnr" in row):
        mine = [row for row in rows.values() if row["model"] == model]
        row: Row = {"runs": len(mine), "parameters": mine[0]["parameters"]}
        for name in ("psnr", "psnr_equal_time", "seconds"):
            values = [row[name] for row in mine]
            row[name] = round(mean(values), 3)
            row[f"{name}_std"] = round(stdev(values), 3) if len(values) > 1 else 0.0
        means[model] = row
    return means


Jobs = Iterator[tuple[str, Callable[[], Row]]]


def images(size: Size, data_dir: Path, results: Results) -> Jobs:
    """Yield fits between the pixels of the middle of Kodak's photographs."""
    scale = 32.0 * size.side / 128
    for k in range(1, size.images + 1):
        file = data_dir / "kodak" / f"kodim{k:02}.png"
        task = GeneraliseImage(deq=RECIPE, file=str(file), side=size.side)
        models = _models(task, size.width, scale, 2)
        yield from _fits(file.stem, models, size.image_steps, size, results)


def audio(size: Size, data_dir: Path, results: Results) -> Jobs:
    """Yield fits of the first two seconds of a sound."""
    file = data_dir / "audio" / "gt_bach.wav"
    task = FitSignal(
        deq=SHORT, file=str(file), length=size.audio_samples,
        batch=size.audio_batch,
    )  # fmt: skip
    scale = 25_000 * size.audio_samples / 308_207  # the paper's, for its seven seconds
    yield from _fits(
        "gt_bach", _models(task, size.width, scale, 1), size.audio_steps, size, results
    )


def video(size: Size, data_dir: Path, results: Results) -> Jobs:
    """Yield fits of some frames of a video, with and without fixed-point correction."""
    file = data_dir / "video" / "bikes.mp4"
    task = FitSignal(
        deq=CORRECTED.with_options(n_states=1), file=str(file), length=size.frames,
        shrink=size.shrink, batch=size.video_batch, warm=False,
    )  # fmt: skip
    plain = _models(task, size.video_width, 32.0, 3)
    corrected = replace(plain["DEQ-SIREN"], deq=CORRECTED)
    # A point's state is kept until the point comes back: three evaluations a step, not 23.
    warm = replace(plain["DEQ-SIREN"], warm=True)
    models = {"DEQ-SIREN, corrected": corrected, **plain, "DEQ-SIREN, warm": warm}
    yield from _fits("bikes", models, size.video_steps, size, results)


def _models(task: Any, width: int, scale: float, d: int) -> dict[str, Any]:
    """Return tasks of the same spread of first frequencies; the first one sets the time."""
    deq = FieldConfig(width=width, input_scale=scale)
    gabor = replace(deq, filter="gabor")
    siren = replace(deq, kind="siren", layers=2, input_scale=scale * (d / 2) ** 0.5)
    nets = {"DEQ-SIREN": deq, "DEQ-MFN (Gabor)": gabor, "SIREN": siren}
    return {name: replace(task, net=net) for name, net in nets.items()}


def _fits(signal: str, tasks: dict[str, Any], steps: int, size: Size, results: Results) -> Jobs:
    for seed in range(size.seeds):
        keys = {name: f"{signal}, {name}, seed {seed}" for name in tasks}
        first = next(iter(keys.values()))
        for name, task in tasks.items():
            row = partial(_row, name, signal, task, steps, seed, first, results)
            yield keys[name], row


def _row(
    name: str, signal: str, task: Any, steps: int, seed: int, first: str, results: Results
) -> Row:
    """Train for the steps, and for as long as the first model took."""
    limit = results.rows[first]["seconds"] if first in results.rows else 0.0
    course, count = train(task, steps, seed, limit)
    at_end = next(psnr for step, _, psnr in course if step == steps)
    seconds = next(spent for step, spent, _ in course if step == steps)
    in_time = [psnr for _, spent, psnr in course if spent <= (limit or seconds)]
    return {
        "model": name, "signal": signal, "seed": seed, "parameters": count, "steps": steps,
        "seconds": seconds, "psnr": at_end, "psnr_equal_time": in_time[-1] if in_time else 0.0,
        "course": course,
    }  # fmt: skip


def train(
    task: Any, steps: int, seed: int, limit: float
) -> tuple[list[tuple[int, float, float]], int]:
    """Return (step, processor seconds, PSNR) at some steps, and the number of parameters.

    Evaluations do not count as time.
    """
    torch.manual_seed(seed)
    model, carry = task.build(), None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    course, spent, step = list[tuple[int, float, float]](), 0.0, 0
    gap = max(1, steps // 6)
    while step < steps or spent < limit:
        began = time.process_time()
        loss = task.loss(model, task.train_batch(step, seed, Shard()), carry)
        carry = loss.carry
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
        spent += time.process_time() - began
        step += 1
        if step == steps or step % (gap if step < steps else 2 * gap) == 0:
            course.append((step, round(spent, 2), _psnr(task, model)))
    return course, sum(p.numel() for p in model.parameters())


@torch.no_grad()
def _psnr(task: Any, model: nn.Module) -> float:
    """Return the PSNR of the test set: pixels that were not learnt, or the signal itself."""
    metrics = task.evaluate(model.eval(), "test").metrics
    model.train()
    return round(float(metrics["psnr"]), 3)


def speed(size: Size, data_dir: Path, results: Results) -> Jobs:
    """Yield times of a training step beside those on 0.1.0."""
    if not installed():
        raise SystemExit("the comparison of speed needs torchdeq 0.1.0: make bench")
    for points, width in size.speed:
        warm = RECIPE.with_options(f_max_iter=20)
        yield (
            f"warm start, {points} x {width}",
            partial(time_steps, points, width, warm, size.rounds),
        )
    points, width = size.speed_video
    key = f"solve with correction, {points} x {width}"
    yield key, partial(time_steps, points, width, CORRECTED, size.rounds)


PARTS = {"psnr-images": images, "psnr-audio": audio, "psnr-video": video, "speed": speed}


if __name__ == "__main__":
    main()
