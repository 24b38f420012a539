"""The one training loop; no model is named in it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils._pytree import tree_map

from deq_zoo.checkpoint import Checkpoint, random_state, restore_random_state
from deq_zoo.evaluate import evaluate, load_weights
from deq_zoo.preset import Preset
from deq_zoo.progress import Display, make_display
from deq_zoo.record import SolverRecord
from deq_zoo.run import Run
from deq_zoo.task import Batch, Evaluation, Loss, Shard, Task
from deq_zoo.values import to_data


@dataclass
class Result:
    """How a run ended."""

    step: int
    steps: int
    best: float | None
    metrics: dict[str, float]
    interrupted: int = 0  # the signal that stopped it
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


def train(
    run: Run,
    preset: Preset,
    *,
    resume: bool = False,
    quiet: bool = False,
    cpu: bool = False,
    max_seconds: float | None = None,
) -> Result:
    """Train, evaluate, log and save until the preset's steps are done.

    Ctrl-C and SIGTERM end the run after the step at work, with a checkpoint. ``max_seconds`` ends
    it likewise. The result of a resumed run is that of an uninterrupted one, bit for bit.
    """
    accelerator = Accelerator(mixed_precision=preset.precision, cpu=cpu)
    set_seed(preset.seed)
    trainer = Trainer(run, preset, accelerator)
    if resume:
        trainer.resume()
    else:
        trainer.save(run.last)
    with interruptible() as signals, trainer.display(quiet) as display, trainer.open_board():
        return trainer.loop(signals, display, max_seconds)


class Trainer:
    """Model, optimiser and what has been reached, between two steps."""

    def __init__(self, run: Run, preset: Preset, accelerator: Accelerator) -> None:
        self.run, self.preset, self.accelerator = run, preset, accelerator
        self.task: Task = preset.task
        self.steps = preset.total_steps
        self.step, self.carry = 0, None
        self.best: float | None = None
        model = self.task.build()
        optimizer = preset.optim.make(p for p in model.parameters() if p.requires_grad)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.window = Window()
        self.board: Any = None

    def display(self, quiet: bool) -> Display:
        return make_display(self.steps, self.step, quiet or not self.accelerator.is_main_process)

    def loop(self, signals: list[int], display: Display, max_seconds: float | None) -> Result:
        began, metrics = time.monotonic(), dict[str, float]()
        every = self.preset.eval_every or self.task.steps_per_epoch
        with closing_batches(self) as batches:
            while self.step < self.steps:
                self.update(batches)
                if self.step % self.preset.log_every == 0 or self.step == self.steps:
                    self.tell(display)
                out_of_time = max_seconds is not None and time.monotonic() - began > max_seconds
                ending = self.step == self.steps or out_of_time
                if self.step % every == 0 or ending:
                    metrics = self.judge(display, thorough=ending)
                if ending or signals or self.step % self.preset.save_every == 0:
                    self.save(self.run.last)
                if out_of_time or signals:
                    break
        seconds = time.monotonic() - began
        return Result(
            self.step, self.steps, self.best, metrics, signals[0] if signals else 0, seconds
        )

    def update(self, batches: Iterator[Batch]) -> None:
        """One step of the optimiser."""
        rate = self.preset.optim.set_rate(self.optimizer.optimizer, self.step, self.steps)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.preset.accumulate):
            batch = to_device(next(batches), self.accelerator.device)
            loss = self.task.loss(self.model, batch, self.carry)
            self.accelerator.backward(loss.value / self.preset.accumulate)
            self.carry = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, loss.carry)
            self.window.add(loss, self.task.samples(batch))
        if self.preset.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.preset.clip)
        self.optimizer.step()
        self.task.after_step(self.accelerator.unwrap_model(self.model))
        self.step += 1
        self.window.rate = rate

    def tell(self, display: Display) -> None:
        """Log the mean of the steps since the last time: the only host sync of the loop."""
        values = self.window.empty()
        display.step(self.step, values)
        self.write("train", values)

    def judge(self, display: Display, thorough: bool) -> dict[str, float]:
        """Evaluate; keep the checkpoint if it is the best so far."""
        model = self.accelerator.unwrap_model(self.model)
        found: Evaluation = evaluate(self.task, model, self.accelerator.device, thorough)
        metrics, score = dict(found.metrics), self.task.score
        value = metrics[score.name]
        if self.accelerator.is_main_process:
            solver = found.solver.summary()
            self.write("eval", {"metrics": metrics, "solver": solver})
            told = "  ".join(f"{name} {number:.4g}" for name, number in metrics.items())
            display.say(
                f"step {self.step}: {told}  nfe {solver['nfe']:.3g}  "
                f"residual {solver['residual']:.2g}"
            )
        if score.better(value, self.best):
            self.best = value
            self.save(self.run.best)
        self.window.start()
        return metrics

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """To the log, and numbers to TensorBoard."""
        if not self.accelerator.is_main_process:
            return
        self.run.log(kind, self.step, values)
        for name, value in values.items():
            inner = value if isinstance(value, dict) else {name: value}
            for key, number in inner.items():
                if self.board is not None and isinstance(number, (int, float)):
                    self.board.add_scalar(f"{kind}/{key}", number, self.step)

    @contextmanager
    def open_board(self) -> Iterator[None]:
        """TensorBoard's files, if it is installed."""
        if not self.accelerator.is_main_process or find_spec("tensorboard") is None:
            yield
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        with SummaryWriter(str(self.run.tensorboard), purge_step=self.step + 1) as self.board:
            yield

    def save(self, path: Path) -> None:
        if self.accelerator.is_main_process:
            Checkpoint(
                step=self.step,
                model=self.accelerator.get_state_dict(self.model),
                optimizer=self.optimizer.optimizer.state_dict(),
                carry=self.carry,
                randomness=random_state(),
                notes={"best": self.best},
                config={"name": self.run.name, "preset": to_data(self.preset)},
            ).save(path)

    def resume(self) -> None:
        """Go on from the last checkpoint."""
        held = self.run.checkpoint()
        load_weights(self.accelerator.unwrap_model(self.model), held.model, str(self.run.last))
        self.optimizer.optimizer.load_state_dict(held.optimizer)
        self.step, self.best = held.step, held.notes["best"]
        self.carry = to_device(held.carry, self.accelerator.device)
        restore_random_state(held.randomness)
        if self.accelerator.is_main_process:
            self.run.forget_after(self.step)


class Window:
    """Numbers since the last line of the log, kept on the device until then."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.start()

    def start(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._solver = SolverRecord()
        self._stats: list[Any] = []
        self._steps = self._samples = 0
        self._began = time.monotonic()

    def add(self, loss: Loss, samples: int) -> None:
        self._steps += 1
        self._samples += samples
        for name, value in {"loss": loss.value, **loss.metrics}.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        if loss.stats is not None:
            self._stats.append(loss.stats)

    def empty(self) -> dict[str, float]:
        seconds = max(1e-9, time.monotonic() - self._began)
        values = {name: float(total) / max(1, self._steps) for name, total in self._sums.items()}
        for stats in self._stats:
            self._solver.add(stats)
        if self._stats:
            summary = self._solver.summary()
            values |= {"nfe": summary["nfe"], "residual": summary["residual"]}
        values |= {"lr": self.rate, "samples_per_s": self._samples / seconds}
        self.start()
        return values


def to_device(tree: Any, device: torch.device) -> Any:
    """Every tensor of a pytree on the device."""
    move = lambda t: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t  # noqa: E731
    return tree_map(move, tree)


@contextmanager
def closing_batches(trainer: Trainer, ahead: int = 2) -> Iterator[Iterator[Batch]]:
    """Training batches from the step at hand, made by threads while the model computes."""
    accelerator, preset = trainer.accelerator, trainer.preset
    shard = Shard(accelerator.process_index, accelerator.num_processes)

    def make(k: int) -> Future[Batch]:
        return pool.submit(preset.task.train_batch, k, preset.seed, shard)

    def batches() -> Iterator[Batch]:
        pending = [make(k) for k in range(first, first + ahead)]
        for k in count(first + ahead):
            yield pending.pop(0).result()
            pending.append(make(k))

    first = trainer.step * preset.accumulate
    pool = ThreadPoolExecutor(max_workers=ahead)
    try:
        yield batches()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A block in which Ctrl-C and SIGTERM are noted; a second Ctrl-C interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        former = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may listen
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
