"""Small DEQ-Flows trained in several ways for equal processor time, for `benchmarks.flow`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.datasets import FlowSet, chairs, middlebury
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.flow.task import WarpTask
from deq_zoo.flow.warps import Motion, Warps, motorcycle
from deq_zoo.optim import OneCycle
from torchdeq import DEQConfig

WEIGHTS = Path(__file__).parents[1] / ".bench" / "flow"
MOTION = Motion(shift=8.0, turn=0.03, zoom=0.03, wave=1.5)
EVALUATIONS = 12  # of f in a training step, whatever the gradient

PLAIN = DEQConfig(f_solver="simple_fixed_point_iter", on_failure="ignore", eval_f_max_iter=24)
#: Equal evaluations a step: 3 slices of 3 and a step each; 11 and a step; 12 steps unrolled.
WAYS = {
    "correction": PLAIN.with_options(f_max_iter=9, n_states=3, grad=1),
    "no correction": PLAIN.with_options(f_max_iter=11, grad=1),
    "unrolled": PLAIN.with_options(f_max_iter=0, grad=EVALUATIONS, sup_gap=4),
}
WAYS["correction, near starts"] = WAYS["correction"]
NEAR = 0.3  # of the pairs of the last way start near the true flow


@dataclass(frozen=True)
class Size:
    """The size of a benchmark."""

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


def task_of(way: str, size: Size) -> WarpTask:
    """Return the task of one way to train."""
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


def weights(way: str, size: Size) -> Path:
    """Return the file for the weights of a way to train; a trial run has files of its own."""
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    return WEIGHTS / f"{way.replace(',', '').replace(' ', '_')}_{size.train_seconds:g}s.pth"


def train_one(way: str, size: Size) -> tuple[DEQFlow, dict[str, Any]]:
    """Return a trained model, and steps and time of the training."""
    task, schedule = task_of(way, size), OneCycle(rise=0.1)
    torch.manual_seed(0)
    model = task.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
    began, step, used = time.process_time(), 0, 0.0
    while used < size.train_seconds:
        # The schedule runs by the share of the time, not by steps.
        factor = schedule.factor(int(1e4 * used / size.train_seconds), 10_000)
        optimizer.param_groups[0]["lr"] = 1e-3 * factor
        loss = task.loss(model, task.train_batch(step, 0), None)
        optimizer.zero_grad()
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, used = step + 1, time.process_time() - began
    row = {"way": way, "steps": step, "limit": size.train_seconds, "cpu_seconds": used}
    return model.eval(), row


def test_sets(size: Size, data_dir: str | None) -> dict[str, Sequence[Pair] | FlowSet]:
    """Return the test pairs by set."""
    sets: dict[str, Sequence[Pair] | FlowSet] = {
        "warps": Warps("test", size.crop, MOTION).first(size.eval_pairs),
        "motorcycle": [motorcycle(half=True)],
    }
    if data_dir is not None:
        sets["middlebury"] = middlebury(Path(data_dir) / "flow_middlebury")
        sets["chairs"] = chairs(Path(data_dir) / "flow_chairs", "all")
    return sets


@torch.no_grad()
def error(model: DEQFlow, pairs: Sequence[Pair] | FlowSet, **call: Any) -> float:
    """Return the mean endpoint error of a model over pairs."""

    def predict(pair: Pair) -> Tensor:
        flow: Tensor = model((pair.image1[None], pair.image2[None]), **call).prediction[0]
        return flow

    return error_of(predict, pairs)


def error_of(method: Callable[[Pair], Tensor], pairs: Sequence[Pair] | FlowSet) -> float:
    """Return the mean endpoint error of any method over pairs."""
    scores = FlowScores()
    for k in range(len(pairs)):
        pair = pairs[k]
        scores.add(method(pair), pair.flow, pair.valid)
    return scores.aepe


def trained(way: str, size: Size) -> DEQFlow:
    """Return the model that the part `train` has saved."""
    file = weights(way, size)
    if not file.exists():
        raise SystemExit(f"there is no {file}: run python -m benchmarks.flow --only train first")
    model = task_of(way, size).build()
    model.load_state_dict(torch.load(file, weights_only=True))
    return model.eval()
