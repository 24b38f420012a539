"""Does DEQ-Flow learn, what do its corrections, its gradients and the reuse of its states buy?

Six questions, each with a table: a small model trained on warped photographs with fixed-point
correction, without it, unrolled, and with correction from starts near the truth too, for equal
processor time, tested with 24 evaluations of f; the same with as many as in training, and fewer;
the error on warps by evaluations; memory of a training step by evaluations; evaluations along
synthetic videos with and without reuse, at equal error; classical methods of scikit-image and no
motion at all on the same pairs.

`train` saves the weights that `budgets`, `nfe` and `reuse` measure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.flow_models import (
    EVALUATIONS,
    PLAIN,
    SMALL,
    WAYS,
    Size,
    error,
    error_of,
    test_sets,
    train_one,
    trained,
    weights,
)
from benchmarks.peak import forget_peak, growth_mb
from benchmarks.storing import read, results_file, store_part
from deq_zoo.files import write_atomically
from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.loss import sequence_loss
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.flow.video import FlowStream
from deq_zoo.flow.warps import synthetic_video, unfolded

NAME = "flow"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--data-dir", help="folder with flow_middlebury and flow_chairs")
    parser.add_argument("--small", action="store_true", help="a minute, to try it out")
    parser.add_argument("--again", action="store_true", help="parts that are done, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, file = SMALL if args.small else Size(), results_file(NAME, args.small)
    for name in [args.only] if args.only else list(PARTS):
        if not (args.again or args.only) and name in read(file):
            continue
        began, rows = time.process_time(), []
        for row in PARTS[name](size, args.data_dir):
            rows.append(row)
            print("  ".join(f"{key} {_show(value)}" for key, value in row.items()), flush=True)
            minutes = (time.process_time() - began) / 60
            part = {"cpu_minutes": round(minutes, 1), "rows": rows}
            store_part(file, name, part, seeds=[0])  # at once: an interruption loses nothing


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def train(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Yield errors after equal processor time; models that are there are not trained again."""
    for way in WAYS:
        file = weights(way, size).with_suffix(".json")
        row = json.loads(file.read_text()) if file.exists() else {}
        if not row:
            model, row = train_one(way, size)
            row |= {name: error(model, pairs) for name, pairs in test_sets(size, data_dir).items()}
            torch.save(model.state_dict(), weights(way, size))
            write_atomically(file, json.dumps(row) + "\n")
        yield row


def nfe(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Yield errors by evaluations of f, last iterate."""
    pairs = test_sets(size, None)["warps"]
    for way in WAYS:
        model = trained(way, size)
        for budget in size.budgets:
            yield {"way": way, "nfe": budget, "aepe": error(model, pairs, f_max_iter=budget)}


def budgets(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Yield errors on all sets with the evaluations of training, and with a third of them."""
    for way in WAYS:
        model = trained(way, size)
        for budget in (EVALUATIONS // 3, EVALUATIONS):
            errors = {
                name: error(model, pairs, f_max_iter=budget)
                for name, pairs in test_sets(size, data_dir).items()
            }
            yield {"way": way, "nfe": budget, **errors}


def memory(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Yield peak memory and time of a training step of `tiny`, each in a process of its own."""
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
    options = PLAIN.with_options(b_tol=0.0, **deq)
    model = DEQFlow(FlowConfig(size="tiny", all_grad=True), options).train()
    a, b = torch.randint(256, (2, 1, 3, *crop), dtype=torch.uint8)
    truth, valid = torch.zeros(1, 2, *crop), torch.ones(1, *crop)

    def step() -> None:
        flow = model((a, b)).prediction
        sequence_loss([flow], truth, valid).backward()
        model.zero_grad(set_to_none=True)

    # The encoders and the volume cost the same in all ways: measure beyond them.
    given = model.inject(a, b)
    context = torch.stack([half.gates_context.sum() for half in given.halves]).sum()
    (context + given.correlation.volume.sum()).backward()
    del given, context
    model.zero_grad(set_to_none=True)
    before, seconds = forget_peak(), []
    for _ in range(3):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return {"mb_beyond_the_encoders": growth_mb(before), "cpu_seconds": median(seconds)}


def reuse(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Yield errors along videos by evaluations of f, without the first pair, which starts at zero.

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
                    for k, result in enumerate(stream(frame[None] for frame in frames)):
                        if k:
                            scores.add(result.flow[0], flows[k], unfolded(flows[k]))
                            evaluations.append(result.nfe)
                yield {
                    "way": way,
                    "tolerance": tolerance,
                    "most": most,
                    "reuse": carried,
                    "nfe": sum(evaluations) / len(evaluations),
                    "aepe": scores.aepe,
                }


def classical(size: Size, data_dir: str | None) -> Iterator[dict[str, Any]]:
    """Yield errors of no motion and of two methods of scikit-image, on the pairs of `train`."""
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
    pairs = test_sets(size, data_dir)
    for name, method in methods.items():
        began = time.process_time()
        errors = {key: error_of(method, each) for key, each in pairs.items()}
        yield {"method": name, "cpu_seconds": time.process_time() - began, **errors}


PARTS: dict[str, Callable[[Size, str | None], Iterator[dict[str, Any]]]] = {
    "classical": classical,
    "train": train,
    "budgets": budgets,
    "nfe": nfe,
    "memory": memory,
    "reuse": reuse,
}

if __name__ == "__main__":
    main()
