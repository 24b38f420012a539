"""How many images per second do worker processes make, beside threads of the training process?

JPEGs of 500 x 375 pixels, decoded, cropped at random to 224 x 224 and normalised, as for ImageNet.
Contestants, in turns: two threads (how batches were made before), one and two worker processes. The
consumer takes batches as fast as they come, or works in Python between two of them, as a training
loop does that feeds an accelerator: threads then share the interpreter with it.

`python -m benchmarks.loading` on a quiet machine; `--rounds 1 --batches 4` for a try.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import quantiles

import torch
from PIL import Image

from benchmarks.storing import RESULTS, store
from deq_zoo.batches import open_batches
from deq_zoo.mdeq.task import ClassifyImages
from deq_zoo.preset import Preset
from deq_zoo.task import WHOLE, Batch

FILES, CLASSES, BATCH = 400, 4, 32
WORK = 0.1  # seconds that a busy consumer works in Python between two batches
Open = Callable[[Preset], AbstractContextManager[Iterator[Batch]]]


def make_images(root: Path) -> None:
    """Write a folder of JPEGs as ImageNet has it, each a smooth random image."""
    rng = torch.Generator().manual_seed(0)
    for k in range(FILES):
        coarse = torch.rand(1, 3, 8, 10, generator=rng)
        smooth = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic")
        noisy = smooth + 0.03 * torch.randn(smooth.shape, generator=rng)  # the size of a photograph
        pixels = noisy[0].clamp(0, 1).mul(255).byte().permute(1, 2, 0)
        for split in ("train", "val"):
            path = root / split / f"class{k % CLASSES}" / f"{k}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if split == "train" or k < CLASSES:
                Image.fromarray(pixels.numpy()).save(path, quality=90)


@contextmanager
def open_threads(preset: Preset, ahead: int = 2) -> Iterator[Iterator[Batch]]:
    """Open batches that threads of this process make, as an earlier version of the zoo did."""

    def make(k: int) -> Future[Batch]:
        return pool.submit(preset.task.train_batch, k, preset.seed, WHOLE)

    def batches() -> Iterator[Batch]:
        pending = [make(k) for k in range(ahead)]
        for k in count(ahead):
            yield pending.pop(0).result()
            pending.append(make(k))

    pool = ThreadPoolExecutor(max_workers=ahead)
    try:
        yield batches()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def open_workers(workers: int) -> Open:
    """Return a function that opens batches of worker processes."""
    return lambda preset: open_batches(replace(preset, workers=workers), 0, WHOLE)


CONTESTANTS: dict[str, Open] = {
    "2 threads": open_threads,
    "no worker": open_workers(0),
    "1 worker": open_workers(1),
    "2 workers": open_workers(2),
}


def measure(open_them: Open, preset: Preset, batches: int, work: float) -> tuple[float, float]:
    """Return images per second, and the share of time in which the consumer waits for a batch."""
    with open_them(preset) as made:
        for _ in range(4):  # until all that were made ahead are gone, and the workers have started
            next(made)
        waited, began = 0.0, time.perf_counter()
        for _ in range(batches):
            asked = time.perf_counter()
            next(made)
            waited += time.perf_counter() - asked
            work_in_python(work)
        seconds = time.perf_counter() - began
    return batches * BATCH / seconds, waited / seconds


def work_in_python(seconds: float) -> None:
    """Keep the interpreter busy for so much processor time."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        sum(range(100))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        task = ClassifyImages(data="imagenet", data_dir=folder, batch=BATCH, flip=True)
        preset = Preset(task, steps=1)
        for _ in range(args.rounds):
            for consumer, work in (("idle", 0.0), ("busy", WORK)):
                for name, open_them in CONTESTANTS.items():
                    rate, wait = measure(open_them, preset, args.batches, work)
                    rates.setdefault((consumer, name), []).append(rate)
                    waits.setdefault((consumer, name), []).append(wait)
    rows = [
        {
            "consumer": consumer,
            "loader": name,
            "images_per_s": [round(q, 1) for q in spread(rates[consumer, name])],
            "waiting": round(spread(waits[consumer, name])[1], 3),
        }
        for consumer, name in rates
    ]
    for row in rows:
        print(json.dumps(row))
    store(RESULTS / "loading.json", {"rounds": args.rounds, "rows": rows}, seeds=[0])


def spread(values: list[float]) -> list[float]:
    """Return the quartiles."""
    return quantiles(values, n=4) if len(values) > 1 else values * 3


if __name__ == "__main__":
    main()
