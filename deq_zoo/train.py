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
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from torch.utils._pytree import tree_map

from deq_zoo.checkpoint import Checkpoint, random_state, restore_random_state
from deq_zoo.errors import ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.preset import Preset
from deq_zoo.progress import Display, make_display
from deq_zoo.record import SolverRecord
from deq_zoo.run import Run
from deq_zoo.task import Batch, Evaluation, Loss, Shard, Task
from deq_zoo.values import to_data
from deq_zoo.weights import load_weights


@dataclass
class Result:
    """How a run ended."""

    step: int
    steps: int
    best: float | None
    metrics: dict[str, float]
    interrupted: int = 0  # the signal that stopped it
    seconds: float = 0.0
    main: bool = True  # whether this process speaks for the run

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


def start_run(out: Path, name: str, preset: Preset, force: bool, accelerator: Accelerator) -> Run:
    """The run's folder, made by one process for all."""
    if accelerator.is_main_process:
        Run.create(out, name, preset, force)
    accelerator.wait_for_everyone()
    return Run.open(out)


def make_accelerator(preset: Preset, cpu: bool) -> Accelerator:
    """The devices and the precision of a run."""
    AcceleratorState._reset_state()  # another run of this process may have had another precision
    # Buffers are functions of weights and data that all processes share, or statistics of which
    # the first one's count. Sending them along with every forward pass would cost time, and hang
    # where processes take a different number of passes.
    alone = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(mixed_precision=preset.precision, cpu=cpu, kwargs_handlers=[alone])
    if preset.precision == "fp16" and accelerator.device.type == "cpu":
        raise ZooError("fp16 needs an accelerator: use precision=bf16, or none, on a CPU")
    return accelerator


def train(
    run: Run,
    preset: Preset,
    *,
    resume: bool = False,
    quiet: bool = False,
    cpu: bool = False,
    max_seconds: float | None = None,
    accelerator: Accelerator | None = None,
) -> Result:
    """Train, evaluate, log and save until the preset's steps are done.

    Ctrl-C and SIGTERM end the run after the step at work, with a checkpoint. ``max_seconds`` ends
    it likewise. The result of a resumed run is that of an uninterrupted one, bit for bit. A run
    that was killed before its first checkpoint begins anew.
    """
    trainer = Trainer(run, preset, accelerator or make_accelerator(preset, cpu))
    if resume and run.last.exists():
        trainer.resume()
    else:
        preset.task.begin(trainer.accelerator.unwrap_model(trainer.model))
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
        set_seed(preset.seed)
        try:
            model = self.task.build()
            optimizer = preset.optim.make(p for p in model.parameters() if p.requires_grad)
        except (ValueError, TypeError, KeyError) as error:
            raise ZooError(f"this preset cannot be built: {error}") from None
        set_seed(preset.seed + accelerator.process_index)  # every process draws its own masks
        model, self.optimizer = accelerator.prepare(model, optimizer)
        # Mixed precision is a block around the loss: accelerate's wrapper would rebuild what a
        # model returns, and lose the counts of its statistics.
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        self.model = model
        self.window = Window()
        self.board: Any = None

    def display(self, quiet: bool) -> Display:
        return make_display(self.steps, self.step, quiet or not self.accelerator.is_main_process)

    def loop(self, signals: list[int], display: Display, max_seconds: float | None) -> Result:
        began, metrics = time.monotonic(), dict[str, float]()
        every = self.preset.eval_every or self.preset.updates_per_epoch
        ended = 0
        self.window.start()
        with closing_batches(self) as batches:
            while self.step < self.steps and not ended:
                self.update(batches)
                if self.step % self.preset.log_every == 0 or self.step == self.steps:
                    self.tell(display)
                late = max_seconds is not None and time.monotonic() - began > max_seconds
                ended = self.agreed(signals[0] if signals else -1 if late else 0)
                due = self.step % every == 0 or self.step == self.steps
                if due or ended < 0:
                    metrics = self.judge(display, counts=due)
                if self.step == self.steps or ended or self.step % self.preset.save_every == 0:
                    self.save(self.run.last)
        if not metrics:  # of the evaluation before this run was resumed
            metrics = next((line["metrics"] for line in reversed([*self.run.lines("eval")])), {})
        return Result(
            self.step,
            self.steps,
            self.best,
            metrics,
            max(0, ended) if self.step < self.steps else 0,
            time.monotonic() - began,
            self.accelerator.is_main_process,
        )

    def agreed(self, ending: int) -> int:
        """Why to end, if any process has a reason: they must all stop at the same step."""
        if self.accelerator.num_processes == 1:
            return ending
        reasons = self.accelerator.gather(
            torch.tensor([ending], device=self.accelerator.device)
        ).tolist()
        return next((reason for reason in reasons if reason), 0)

    def update(self, batches: Iterator[Batch]) -> None:
        """One step of the optimiser."""
        rate = self.preset.optim.set_rate(self.optimizer.optimizer, self.step, self.steps)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.preset.accumulate):
            batch = to_device(next(batches), self.accelerator.device)
            with self.accelerator.autocast():
                loss = self.task.loss(self.model, batch, self.carry)
            samples = self.task.samples(batch)
            self.accelerator.backward(loss.value * self.share(samples) / self.preset.accumulate)
            self.carry = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, loss.carry)
            self.window.add(loss, samples)
        if self.preset.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.preset.clip)
        if self.preset.clip_value:
            self.accelerator.clip_grad_value_(self.model.parameters(), self.preset.clip_value)
        self.optimizer.step()
        self.task.after_step(self.accelerator.unwrap_model(self.model))
        self.step += 1
        self.window.rate = rate

    def share(self, samples: int) -> float:
        """The weight of this process's part of a batch: parts of the last one may differ."""
        world: int = self.accelerator.num_processes
        if world == 1:
            return 1.0
        counts = self.accelerator.gather(torch.tensor([samples], device=self.accelerator.device))
        total = int(counts.sum())
        return world * samples / max(1, total)

    def tell(self, display: Display) -> None:
        """Log the mean of the steps since the last time: the only host sync of the loop."""
        values = self.window.empty(self.accelerator)
        if not isfinite(values["loss"]):
            raise ZooError(
                f"the loss is {values['loss']} at step {self.step}: lower the learning rate, clip "
                f"the gradient or damp the equilibrium; {self.run.last} is from before"
            )
        display.step(self.step, values)
        self.write("train", values)

    def judge(self, display: Display, counts: bool) -> dict[str, float]:
        """Evaluate; keep the checkpoint if it is the best so far, and due at this step."""
        began = time.monotonic()
        model = self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            found: Evaluation = evaluate(self.task, model, self.accelerator.device)
        metrics, score = dict(found.metrics), self.task.score
        solver = found.solver.summary()
        self.write("eval", {"metrics": metrics, "solver": solver})
        display.judged(self.step, metrics, solver)
        if counts and score.better(metrics[score.name], self.best):
            self.best = metrics[score.name]
            self.save(self.run.best)
        self.window.pause(time.monotonic() - began)
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
        weights = self.accelerator.get_state_dict(self.model)  # of all processes together
        scaler = self.accelerator.scaler
        state = gather_object([{"carry": on_cpu(self.carry), "randomness": random_state()}])
        if self.accelerator.is_main_process:
            Checkpoint(
                step=self.step,
                model=weights,
                optimizer=self.optimizer.optimizer.state_dict(),
                carry=[each["carry"] for each in state],
                randomness={"ranks": [each["randomness"] for each in state]},
                notes={
                    "best": self.best,
                    "window": self.window.held(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                },
                config={"name": self.run.name, "preset": to_data(self.preset)},
            ).save(path)

    def resume(self) -> None:
        """Go on from the last checkpoint."""
        held, rank = self.run.checkpoint(), self.accelerator.process_index
        if len(held.carry) != self.accelerator.num_processes:
            raise ZooError(
                f"the run was made by {len(held.carry)} processes: resume it with as many, not "
                f"{self.accelerator.num_processes}"
            )
        load_weights(self.accelerator.unwrap_model(self.model), held.model, str(self.run.last))
        self.optimizer.optimizer.load_state_dict(held.optimizer)
        self.step, self.best = held.step, held.notes["best"]
        self.carry = to_device(held.carry[rank], self.accelerator.device)
        self.window.restore(held.notes["window"])
        if self.accelerator.scaler is not None and held.notes["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(held.notes["scaler"])
        restore_random_state(held.randomness["ranks"][rank])
        if self.accelerator.is_main_process:
            self.run.forget_after(self.step)


class Window:
    """Numbers since the last line of the log, kept on the device until then."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._stats: list[Any] = []
        self._solver = SolverRecord()
        self._steps = self._samples = 0
        self.start()

    def start(self) -> None:
        """Let the clock of this window run from now."""
        self._began = time.monotonic()

    def pause(self, seconds: float) -> None:
        """So long something else was done."""
        self._began += seconds

    def add(self, loss: Loss, samples: int) -> None:
        self._steps += 1
        self._samples += samples
        for name, value in {"loss": loss.value, **loss.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()
        if loss.stats is not None:
            self._stats.append(loss.stats)

    def held(self) -> dict[str, Any]:
        """What a checkpoint needs to go on within a window."""
        sums = {name: float(total) for name, total in self._sums.items()}
        return {"sums": sums, "steps": self._steps, "samples": self._samples}

    def restore(self, held: dict[str, Any]) -> None:
        self._sums, self._steps, self._samples = held["sums"], held["steps"], held["samples"]

    def empty(self, accelerator: Accelerator) -> dict[str, float]:
        """The means over all processes; begins a new window."""
        seconds = max(1e-9, time.monotonic() - self._began)
        for stats in self._stats:
            self._solver.add(stats)
        told = {name: float(total) / max(1, self._steps) for name, total in self._sums.items()}
        if self._stats:
            summary = self._solver.summary()
            told |= {"nfe": summary["nfe"], "residual": summary["residual"]}
        told["samples_per_s"] = self._samples / seconds
        if accelerator.num_processes > 1:
            local = torch.tensor(list(told.values()), device=accelerator.device)
            means = accelerator.reduce(local, "mean").tolist()
            told = dict(zip(told, means, strict=True))
            told["samples_per_s"] *= accelerator.num_processes
        self._clear()
        return {**told, "lr": self.rate}


def on_cpu(tree: Any) -> Any:
    """Every tensor of a pytree on the host."""
    return to_device(tree, torch.device("cpu"))


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
