"""Does DEQ-Flow learn, what do its corrections, its gradients and the reuse of its states buy?

Six questions, each with a table: a small model trained on warped photographs with fixed-point
correction, without it, unrolled, and with correction from starts near the truth too, for equal
processor time, judged with 24 evaluations of f; the same with as many as in training, and fewer;
the error on warps by evaluations; memory of a training step by evaluations; evaluations along
synthetic videos with and without reuse, at equal error; classical methods of scikit-image and no
motion at all on the same pairs.

`train` saves the weights that `judge`, `nfe` and `reuse` measure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.datasets import FlowSet, chairs, middlebury
from deq_zoo.flow.loss import sequence_loss
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.flow.task import WarpTask
from deq_zoo.flow.video import FlowStream
from deq_zoo.flow.warps import Motion, draw_pair, motorcycle, synthetic_video, unfolded
from deq_zoo.optim import OneCycle
from deq_zoo.files import write_atomically
from deq_zoo.task import Shard
from torchdeq import DEQConfig

RESULTS = Path(__file__).parent / "results" / "flow.json"
WEIGHTS = Path(__file__).parents[1] / ".bench" / "flow"
MOTION = Motion(shift=8.0, turn=0.03, zoom=0.03, wave=1.5)
EVALUATIONS = 12  # of f in a training step, whatever the gradient

_PLAIN = DEQConfig(f_solver="simple_fixed_point_iter", on_failure="ignore", eval_f_max_iter=24)
#: Equal evaluations a step: 3 slices of 3 and a step each; 11 and a step; 12 steps unrolled.
WAYS = {
    "correction": _PLAIN.with_options(f_max_iter=9, n_states=3, grad=1),
    "no correction": _PLAIN.with_options(f_max_iter=11, grad=1),
    "unrolled": _PLAIN.with_options(f_max_iter=0, grad=EVALUATIONS, sup_gap=4),
}
WAYS["correction, near starts"] = WAYS["correction"]
NEAR = 0.3  # of the pairs of the last way start near the true flow


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    train_seconds: float = 900.0  # of the processor, for each way
    batch: int = 4
    crop: tuple[int, int] = (96, 128)
    eval_pairs: int = 60
    budgets: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48)
    memory_steps: tuple[int, ...] = (12, 24, 36)
    memory_crop: tuple[int, int] = (192, 256)
    frames: int = 40


SMALL = Size(
    train_seconds=15.0,
    crop=(64, 96),
    eval_pairs=4,
    budgets=(1, 4, 8),
    memory_steps=(4, 8),
    memory_crop=(64, 96),
    frames=4,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--data-dir", help="folder with flow_middlebury and flow_chairs")
    parser.add_argument("--small", action="store_true", help="a minute, to try it out")
    parser.add_argument("--again", action="store_true", help="parts that are done, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = SMALL if args.small else Size()
    for name in [args.only] if args.only else list(PARTS):
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if not (args.again or args.only) and held.get(name, {}).get("small") is args.small:
            continue
        began, rows = time.process_time(), []
        for row in PARTS[name](size, args.data_dir):
            rows.append(row)
            print("  ".join(f"{key} {_show(value)}" for key, value in row.items()), flush=True)
            minutes = (time.process_time() - began) / 60
            part = {"small": args.small, "cpu_minutes": round(minutes, 1), "rows": rows}
            merge(name, part)


def merge(name: str, part: dict[str, Any]) -> None:
    """Into the file of results at once, so that nothing is lost."""
    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    write_atomically(RESULTS, json.dumps({**held, name: part}, indent=1) + "\n")


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def task_of(way: str, size: Size) -> WarpTask:
    """The task of one way to train."""
    return WarpTask(
        net=FlowConfig(size="nano", all_grad=way == "unrolled"),
        deq=WAYS[way],
        batch=size.batch,
        crop=size.crop,
        eval_pairs=size.eval_pairs,
        motion=MOTION,
        colour=False,
        near=NEAR if "near" in way else 0.0,
    )


def train(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Errors after equal time of the processor; ways that are trained already are not again."""
    for way in WAYS:
        told = weights(way).with_suffix(".json")
        row = json.loads(told.read_text()) if told.exists() else {}
        if row.get("limit") != size.train_seconds:
            model, row = train_one(way, size)
            row |= {name: error(model, pairs) for name, pairs in tests(size, data_dir).items()}
            torch.save(model.state_dict(), weights(way))
            write_atomically(told, json.dumps(row) + "\n")
        yield row


def weights(way: str) -> Path:
    """Where a way's model is kept."""
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    return WEIGHTS / f"{way.replace(',', '').replace(' ', '_')}.pth"


def train_one(way: str, size: Size) -> tuple[DEQFlow, dict[str, Any]]:
    """A model, and what it took."""
    task, schedule = task_of(way, size), OneCycle(rise=0.1)
    torch.manual_seed(0)
    model = task.build().train()
    assert isinstance(model, DEQFlow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
    began, step, used = time.process_time(), 0, 0.0
    while used < size.train_seconds:
        # The share of the time that is spent stands for the step.
        factor = schedule.factor(int(1e4 * used / size.train_seconds), 10_000)
        optimizer.param_groups[0]["lr"] = 1e-3 * factor
        loss = task.loss(model, task.train_batch(step, 0, Shard()), None)
        optimizer.zero_grad()
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, used = step + 1, time.process_time() - began
    row = {"way": way, "steps": step, "limit": size.train_seconds, "cpu_seconds": used}
    return model.eval(), row


def tests(size: Size, data_dir: str | None) -> dict[str, Sequence[Pair] | FlowSet]:
    """Pairs that no training has seen."""
    found: dict[str, Sequence[Pair] | FlowSet] = {
        "warps": [draw_pair("test", k, size.crop, MOTION) for k in range(size.eval_pairs)],
        "motorcycle": [motorcycle(half=True)],
    }
    if data_dir is not None:
        found["middlebury"] = middlebury(Path(data_dir) / "flow_middlebury")
        found["chairs"] = chairs(Path(data_dir) / "flow_chairs", "all")
    return found


@torch.no_grad()
def error(model: DEQFlow, pairs: Sequence[Pair] | FlowSet, **call: Any) -> float:
    """AEPE over pairs."""

    def found(pair: Pair) -> Tensor:
        flow: Tensor = model(pair.image1[None], pair.image2[None], **call).flows[-1][0]
        return flow

    return error_of(found, pairs)


def error_of(method: Callable[[Pair], Tensor], pairs: Sequence[Pair] | FlowSet) -> float:
    """AEPE of any method."""
    scores = FlowScores()
    for k in range(len(pairs)):
        pair = pairs[k]
        scores.add(method(pair), pair.flow, pair.valid)
    return scores.aepe


def trained(way: str, size: Size) -> DEQFlow:
    """The model that `train` has left."""
    file = weights(way)
    if not file.exists():
        raise SystemExit(f"there is no {file}: run python -m benchmarks.flow --only train first")
    model = task_of(way, size).build()
    assert isinstance(model, DEQFlow)
    model.load_state_dict(torch.load(file, weights_only=True))
    return model.eval()


def nfe(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Error by evaluations of f, last iterate."""
    pairs = tests(size, None)["warps"]
    for way in WAYS:
        model = trained(way, size)
        for budget in size.budgets:
            yield {"way": way, "nfe": budget, "aepe": error(model, pairs, f_max_iter=budget)}


def judge(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Errors on all sets with the evaluations of training, and with a third of them."""
    for way in WAYS:
        model = trained(way, size)
        for budget in (EVALUATIONS // 3, EVALUATIONS):
            errors = {
                name: error(model, pairs, f_max_iter=budget)
                for name, pairs in tests(size, data_dir).items()
            }
            yield {"way": way, "nfe": budget, **errors}


def memory(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Peak memory and time of a training step of the tiny model; each in a process of its own."""
    for steps in size.memory_steps:
        for gradient, deq in (
            ("phantom, 1 step", {"f_max_iter": steps - 1, "grad": 1}),
            ("implicit", {"f_max_iter": steps, "ift": True, "b_max_iter": steps}),
            ("unrolled", {"f_max_iter": 0, "grad": steps}),
        ):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(_step, (deq, size.memory_crop))
            yield {"steps": steps, "gradient": gradient, **row}


def _step(deq: dict[str, Any], crop: tuple[int, int]) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = _PLAIN.with_options(b_tol=0.0, **deq)
    model = DEQFlow(FlowConfig(size="tiny", all_grad=True), options).train()
    a, b = torch.randint(256, (2, 1, 3, *crop), dtype=torch.uint8)
    truth, valid = torch.zeros(1, 2, *crop), torch.ones(1, *crop)

    def step() -> None:
        flows, _, _ = model(a, b)
        sequence_loss(flows[-1:], truth, valid).backward()
        model.zero_grad(set_to_none=True)

    # The encoders and the volume cost the same in all ways: measure beyond them.
    given = model.inject(a, b)
    context = torch.stack([half.gates_context.sum() for half in given.halves]).sum()
    (context + given.correlation.volume.sum()).backward()
    del given, context
    model.zero_grad(set_to_none=True)
    before, seconds = _peak_mb(), []
    for _ in range(3):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return {"mb_beyond_the_encoders": _peak_mb() - before, "cpu_seconds": median(seconds)}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reuse(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Errors along videos by evaluations of f; the first pair, which starts cold, is left out.

    First with as many evaluations for every pair, then by tolerance.
    """
    videos = [
        synthetic_video(size.frames, size.crop, name, speed=14.0, reach=110.0)
        for name in ("coffee", "flower")
    ]
    limits = [(0.0, n) for n in size.budgets] + [(each, 60) for each in (2.0, 1.0, 0.5, 0.1)]
    for way in ("correction", "correction, near starts"):
        model = trained(way, size)
        for tolerance, most in limits:
            for carried in (False, True):
                scores, evaluations = FlowScores(), []
                for frames, flows in videos:
                    stream = FlowStream(model, tolerance, max_iter=most, reuse=carried)
                    for k, found in enumerate(stream(frame[None] for frame in frames)):
                        if k:
                            scores.add(found.flow[0], flows[k], unfolded(flows[k]))
                            evaluations.append(found.nfe)
                yield {
                    "way": way,
                    "tolerance": tolerance,
                    "most": most,
                    "reuse": carried,
                    "nfe": sum(evaluations) / len(evaluations),
                    "aepe": scores.aepe,
                }


def classical(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """No motion, and two methods of scikit-image, on the pairs that `train` is tested on."""
    from skimage.color import rgb2gray
    from skimage.registration import optical_flow_ilk, optical_flow_tvl1

    def by(method: Callable[..., Any]) -> Callable[[Pair], Tensor]:
        def flow(pair: Pair) -> Tensor:
            a, b = (rgb2gray(x.permute(1, 2, 0).numpy()) for x in pair[:2])
            v, u = method(a, b)
            return torch.from_numpy(np.stack((u, v)))

        return flow

    methods: dict[str, Callable[[Pair], Tensor]] = {
        "no motion": lambda pair: torch.zeros_like(pair.flow),
        "TV-L1": by(optical_flow_tvl1),
        "iterative Lucas-Kanade": by(optical_flow_ilk),
    }
    pairs = tests(size, data_dir)
    for name, method in methods.items():
        began = time.process_time()
        errors = {key: error_of(method, each) for key, each in pairs.items()}
        yield {"method": name, "cpu_seconds": time.process_time() - began, **errors}


PARTS: dict[str, Callable[[Size, str | None], Iterator[dict[str, Any]]]] = {
    "classical": classical,
    "train": train,
    "judge": judge,
    "nfe": nfe,
    "memory": memory,
    "reuse": reuse,
}

if __name__ == "__main__":
    main()
