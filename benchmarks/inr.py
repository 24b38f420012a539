"""How good is an equilibrium as an implicit representation, and what does a step of it cost?

PSNR of DEQ-SIREN, DEQ-MFN and SIREN of as many parameters on images (between the pixels that were
learnt), a sound and a video, after as many steps and after as much processor time; and the time of
a training step beside the same model on torchdeq 0.1.0. `python -m benchmarks.inr --only PART`;
every row is written at once, and a second run goes on where the first ended.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contest import PUBLISHED, installed
from benchmarks.mdeq import published
from deq_zoo.inr import FieldConfig, FitSignal, GeneraliseImage, Signal, coordinates
from deq_zoo.inr.presets import CORRECTED, RECIPE
from deq_zoo.task import Shard
from torchdeq import DEQConfig

RESULTS = Path(__file__).parent / "results" / "inr.json"
CPU = torch.device("cpu")
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

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
        held = Results(part, args.small)
        for key, make in PARTS[part](size, args.data_dir, held):
            if key not in held.rows:
                held.add(key, make())
                print(key, json.dumps({k: v for k, v in held.rows[key].items() if k != "course"}))
        for name, told in summary(held.rows).items():
            print(name, json.dumps(told))


class Results:
    """The rows of one part, in a file with those of the others."""

    def __init__(self, part: str, small: bool) -> None:
        self.part, self.small = part, small
        before = self._file().get(part, {})
        self.rows: dict[str, Row] = before.get("rows", {}) if before.get("small") == small else {}

    def add(self, key: str, row: Row) -> None:
        """Keep a row; the file is replaced as a whole."""
        self.rows[key] = row
        told = {"small": self.small, "rows": self.rows, "summary": summary(self.rows)}
        new = RESULTS.with_suffix(".part")
        new.write_text(json.dumps(self._file() | {self.part: told}, indent=1) + "\n")
        new.replace(RESULTS)

    def _file(self) -> dict[str, Any]:
        held: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        return held


def summary(rows: dict[str, Row]) -> dict[str, Row]:
    """Means over signals and seeds, for rows that have a PSNR."""
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows.values() if "psnr" in row):
        mine = [row for row in rows.values() if row["model"] == model]
        told: Row = {"runs": len(mine), "parameters": mine[0]["parameters"]}
        for name in ("psnr", "psnr_equal_time", "seconds"):
            values = [row[name] for row in mine]
            told[name] = round(mean(values), 3)
            told[f"{name}_std"] = round(stdev(values), 3) if len(values) > 1 else 0.0
        found[model] = told
    return found


Jobs = Iterator[tuple[str, Callable[[], Row]]]


def images(size: Size, data_dir: Path, held: Results) -> Jobs:
    """Pixels between those learnt, of the middle of Kodak's photographs."""
    scale = 32.0 * size.side / 128
    for k in range(1, size.images + 1):
        file = data_dir / "kodak" / f"kodim{k:02}.png"
        task = GeneraliseImage(deq=RECIPE, file=str(file), side=size.side)
        models = _models(task, size.width, scale, 2)
        yield from _fits(file.stem, models, size.image_steps, size, held)


def audio(size: Size, data_dir: Path, held: Results) -> Jobs:
    """The first two seconds of a sound."""
    file = data_dir / "audio" / "gt_bach.wav"
    task = FitSignal(
        deq=RECIPE.with_options(f_max_iter=40), file=str(file), length=size.audio_samples,
        batch=size.audio_batch,
    )  # fmt: skip
    scale = 25_000 * size.audio_samples / 308_207  # the paper's, for its seven seconds
    yield from _fits("gt_bach", _models(task, size.width, scale, 1), size.audio_steps, size, held)


def video(size: Size, data_dir: Path, held: Results) -> Jobs:
    """Some frames of a video, with and without fixed-point correction."""
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
    yield from _fits("bikes", models, size.video_steps, size, held)


def _models(task: Any, width: int, scale: float, d: int) -> dict[str, Any]:
    """The contestants, with the same spread of first frequencies; the first one sets the time."""
    deq = FieldConfig(width=width, input_scale=scale)
    gabor = replace(deq, filter="gabor")
    siren = replace(deq, kind="siren", layers=2, input_scale=scale * (d / 2) ** 0.5)
    nets = {"DEQ-SIREN": deq, "DEQ-MFN (Gabor)": gabor, "SIREN": siren}
    return {name: replace(task, net=net) for name, net in nets.items()}


def _fits(signal: str, tasks: dict[str, Any], steps: int, size: Size, held: Results) -> Jobs:
    for seed in range(size.seeds):
        keys = {name: f"{signal}, {name}, seed {seed}" for name in tasks}
        first = next(iter(keys.values()))
        for name, task in tasks.items():
            row = partial(_row, name, signal, task, steps, seed, first, held)
            yield keys[name], row


def _row(
    name: str, signal: str, task: Any, steps: int, seed: int, first: str, held: Results
) -> Row:
    """Train for the steps, and for as long as the first contestant took."""
    limit = held.rows[first]["seconds"] if first in held.rows else 0.0
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
    """(step, processor seconds, PSNR) at some steps; judging does not count as time."""
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
    """On held-out pixels where there are any."""
    metrics = task.evaluate(model.eval(), CPU, False).metrics
    model.train()
    return round(float(metrics["psnr"]), 3)


def speed(size: Size, data_dir: Path, held: Results) -> Jobs:
    """A step beside 0.1.0: in blocks, without solving where nothing has to be solved."""
    if not installed():
        raise SystemExit("the comparison of speed needs torchdeq 0.1.0: make bench")
    for points, width in size.speed:
        warm = RECIPE.with_options(f_max_iter=20)
        yield f"warm start, {points} x {width}", partial(_race, points, width, warm, size.rounds)
    points, width = size.speed_video
    key = f"solve with correction, {points} x {width}"
    yield key, partial(_race, points, width, CORRECTED, size.rounds)


def _race(points: int, width: int, deq: DEQConfig, rounds: int) -> Row:
    """Steps of three contestants in turns; the median of each."""
    torch.manual_seed(0)
    warm = deq.n_states == 1
    contestants: dict[str, Callable[[], None]] = {
        "ours": _ours(points, width, deq, warm),
        "0.1.0, as released": _released(published(PUBLISHED), points, width, deq, warm, False),
        "0.1.0, our f": _released(published(PUBLISHED), points, width, deq, warm, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, step in contestants.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    told: Row = {name: median(spent[1:]) for name, spent in seconds.items()}
    best = {name: f"{told['ours'] / told[name]:.3f}" for name in contestants if name != "ours"}
    return {"model": "a step", "seconds": told, "ours_over": best, "points": points, "width": width}


def _ours(points: int, width: int, deq: DEQConfig, warm: bool) -> Callable[[], None]:
    noise = torch.randint(256, (points // 64, 64, 3), dtype=torch.uint8)
    task = FitSignal(net=FieldConfig(width=width), deq=deq, warm=warm)
    task = task.holding(Signal("image", noise))
    model, batch = task.build(), task.train_batch(0, 0)
    carry: list[Any] = [None]

    def step() -> None:
        model.zero_grad()
        loss = task.loss(model, batch, carry[0])
        carry[0] = loss.carry
        loss.value.backward()

    return step


class Released(nn.Module):
    """DEQ-SIREN on torchdeq 0.1.0, written as the authors' release is: all filters inside f.

    Args:
        package: torchdeq 0.1.0.
        width: of the state.
        deq: options of the equilibrium.
        ahead: make what does not depend on z before the solve, as ours does.
    """

    def __init__(self, package: ModuleType, width: int, deq: DEQConfig, ahead: bool) -> None:
        super().__init__()
        self.package, self.ahead = package, ahead
        self.x_map, self.f = nn.Linear(2, 2 * width), nn.ModuleList([nn.Linear(width, width)])
        self.output_map = nn.Linear(width, 3)
        with torch.no_grad():
            self.x_map.weight.mul_(128 / 2**0.5)
            nn.init.uniform_(self.x_map.bias, -torch.pi, torch.pi)
        package.apply_norm(self.f, "weight_norm")
        names = ("f_max_iter", "f_tol", "f_stop_mode", "n_states")
        options = {name: getattr(deq, name) for name in names}
        self.deq = package.get_deq(grad=deq.grad[0], **options)

    def forward(self, x: Tensor, z0: Tensor | None) -> tuple[list[Tensor], Tensor]:
        self.package.reset_norm(self.f)
        u, v = self.x_map(x).chunk(2, dim=-1)
        mix: Any = self.f[0]
        W = mix.weight.T
        k = torch.addmm(mix.bias + v, u.sin(), W) if self.ahead else None

        def f(z: Tensor) -> Tensor:
            if k is not None:
                return torch.addmm(k, z, W).sin()
            return torch.sin(mix(z + torch.sin(u)) + v)

        options = {} if z0 is None else {"solver_kwargs": {"f_max_iter": 0}}
        states, _ = self.deq(f, torch.zeros_like(u) if z0 is None else z0, **options)
        return [self.output_map(z) for z in states], states[-1].detach()


def _released(
    package: ModuleType, points: int, width: int, deq: DEQConfig, warm: bool, ahead: bool
) -> Callable[[], None]:
    model = Released(package, width, deq, ahead)
    x = coordinates((points // 64, 64), torch.arange(points))
    y = 2 * torch.rand(points, 3) - 1
    kept: list[Tensor | None] = [None]

    def step() -> None:
        model.zero_grad()
        values, z = model(x, kept[0])
        kept[0] = z if warm else None
        n = len(values)
        losses = [0.8 ** (n - 1 - k) * (v - y).square().mean() for k, v in enumerate(values)]
        torch.stack(losses).sum().backward()

    return step


PARTS = {"psnr-images": images, "psnr-audio": audio, "psnr-video": video, "speed": speed}


if __name__ == "__main__":
    main()
