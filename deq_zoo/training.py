"""The one training loop; no model is named in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed

from deq_zoo.batches import closing_batches
from deq_zoo.checkpoint import Checkpoint, random_state, restore_random_state
from deq_zoo.errors import ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.preset import Preset
from deq_zoo.progress import Display, make_display
from deq_zoo.run import Run
from deq_zoo.signals import interruptible
from deq_zoo.task import Batch, Evaluation, Shard
from deq_zoo.tree import to_device
from deq_zoo.update import Learner, check_finite
from deq_zoo.values import to_data
from deq_zoo.weights import load_weights
from deq_zoo.window import Window


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

    Ctrl-C and SIGTERM end the run after the step at work, with a checkpoint. `max_seconds` ends
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


class Trainer(Learner):
    """A learner with a run folder: logs, evaluates, saves and resumes between two updates."""

    def __init__(self, run: Run, preset: Preset, accelerator: Accelerator) -> None:
        set_seed(preset.seed)
        try:
            model = preset.task.build()
            model.facts = preset.task.facts()
            optimizer = preset.optim.make(p for p in model.parameters() if p.requires_grad)
        except (ValueError, TypeError, KeyError) as error:
            raise ZooError(f"this preset cannot be built: {error}") from None
        set_seed(preset.seed + accelerator.process_index)  # every process draws its own masks
        model, optimizer = accelerator.prepare(model, optimizer)
        # Mixed precision is a block around the loss: accelerate's wrapper would rebuild what a
        # model returns, and lose the counts of its statistics.
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        super().__init__(preset, model, optimizer, accelerator, preset.total_steps)
        self.run, self.accelerator = run, accelerator
        self.best: float | None = None
        self.window = Window()
        self.board: Any = None

    def display(self, quiet: bool) -> Display:
        return make_display(self.steps, self.step, quiet or not self.accelerator.is_main_process)

    def loop(self, signals: list[int], display: Display, max_seconds: float | None) -> Result:
        began, metrics = time.monotonic(), dict[str, float]()
        every = self.preset.eval_every or self.preset.updates_per_epoch
        ended = 0
        self.window.start()
        with self.open_batches() as batches:
            while self.step < self.steps and not ended:
                self.window.rate = self.update(batches, self.window.add)
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

    def open_batches(self) -> AbstractContextManager[Iterator[Batch]]:
        """Open the training batches of this process, from the update at hand."""
        shard = Shard(self.accelerator.process_index, self.accelerator.num_processes)
        return closing_batches(self.preset, self.step * self.preset.accumulate, shard)

    def agreed(self, ending: int) -> int:
        """Why to end, if any process has a reason: they must all stop at the same step."""
        if self.accelerator.num_processes == 1:
            return ending
        reasons = self.accelerator.gather(
            torch.tensor([ending], device=self.accelerator.device)
        ).tolist()
        return next((reason for reason in reasons if reason), 0)

    def tell(self, display: Display) -> None:
        """Log the mean of the steps since the last time: the only host sync of the loop."""
        values = self.window.empty(self.accelerator)
        check_finite(values["loss"], self.step, f"; {self.run.last} is from before")
        display.step(self.step, values)
        self.write("train", values)

    def judge(self, display: Display, counts: bool) -> dict[str, float]:
        """Evaluate; keep the checkpoint if it is the best so far, and due at this step."""
        began = time.monotonic()
        model = self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            found: Evaluation = evaluate(self.task, model, "val", thorough=False)
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
        carry = to_device(self.carry, torch.device("cpu"))
        state = gather_object([{"carry": carry, "randomness": random_state()}])
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
                facts=dict(self.accelerator.unwrap_model(self.model).facts),
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
