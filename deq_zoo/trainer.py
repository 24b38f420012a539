"""The training of one run: updates, and between them the log, evaluations and checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed

from deq_zoo.batches import open_batches
from deq_zoo.building import build_for_training
from deq_zoo.errors import ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.finite import all_finite, check_loss, diverged, find_not_finite, not_finite_by_design
from deq_zoo.log import metrics_of
from deq_zoo.model import Model
from deq_zoo.parallel import Parallel, Replicated
from deq_zoo.preset import Preset
from deq_zoo.processes import Processes
from deq_zoo.progress import Display, make_display, naming_what_takes_long
from deq_zoo.run import Run
from deq_zoo.run_state import collect_state, restore_state
from deq_zoo.running_statistics import merged_statistics
from deq_zoo.signals import interruptible
from deq_zoo.task import Batch, Loss, Shard, Split
from deq_zoo.update import Learner
from deq_zoo.window import Window

TIME_UP = 1  # a reason to stop; the others are numbers of signals, and larger
_log = logging.getLogger("deq_zoo")


class Trainer(Learner):
    """A learner with a run folder: it logs, evaluates, saves and resumes.

    Args:
        run: the folder.
        name: of the preset.
        preset: the preset.
        processes: of the run.
        begins: whether the run begins; otherwise it resumes.
        quiet: show no progress.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        preset: Preset,
        processes: Processes,
        begins: bool,
        quiet: bool = False,
    ) -> None:
        model = build_for_training(preset)
        self.not_finite_by_design = not_finite_by_design(model)
        if begins:
            preset.task.begin(model)
        set_seed(preset.seed + processes.rank)  # every process draws its own masks
        self.parallel = _place(preset, model, processes)
        super().__init__(
            preset,
            self.parallel.module,
            self.parallel.optimizer,
            processes.accelerator,
            preset.total_steps,
        )
        self.run, self.name, self.processes = run, name, processes
        self.quiet = quiet or not processes.is_main
        self.best: float | None = None
        self.best_step: int | None = None
        self.validation: dict[str, float] = {}
        self.saved_step: int | None = None
        self.stopped_by = 0
        self.window = Window()
        self.board: Any = None

    @property
    def bare_model(self) -> Model:
        """Return the model as the task has built it; its weights may be shards."""
        return self.parallel.model

    def compute_loss(self, batch: Batch) -> Loss:
        return self.parallel.loss(batch, self.carry)

    def after_step(self) -> None:
        self.parallel.after_step()

    def train(self, max_seconds: float | None) -> None:
        """Update, log, evaluate and save until the steps are done, or there is a reason to stop."""
        began = time.monotonic()
        with (
            self._open_batches() as batches,
            interruptible(quiet=not self.processes.is_main) as signals,
            make_display(self.steps, self.step, self.quiet) as display,
            self._open_board(),
            ExitStack() as first_update,
        ):
            doing = f"update {self.step + 1} of {self.steps}, the first"
            first_update.enter_context(naming_what_takes_long(doing, self.quiet))

            def after_update(rate: float) -> bool:
                first_update.close()
                self.window.rate = rate
                late = max_seconds is not None and time.monotonic() - began > max_seconds
                reason = signals[0] if signals else TIME_UP if late else 0
                return self._after_update(display, reason)

            self.window.start()
            self.loop(batches, self.window.add, after_update)

    def _after_update(self, display: Display, reason: int) -> bool:
        """Log, evaluate and save what is due; return whether to stop."""
        ended = self.step == self.steps
        if ended or self.step % self.preset.log_every == 0:
            self._log_window(display)
        stopped_by = self.processes.any_stops(reason)
        if ended or self.step % (self.preset.eval_every or self.preset.updates_per_epoch) == 0:
            self._choose(display)
        if ended or stopped_by or self.step % self.preset.save_every == 0:
            self.save(self.run.last)
        self.stopped_by = 0 if ended else stopped_by
        return stopped_by > 0

    def _open_batches(self) -> AbstractContextManager[Iterator[Batch]]:
        """Open the training batches of this process, from the next update on."""
        shard = Shard(self.processes.rank, self.processes.count)
        return open_batches(
            self.preset,
            self.step * self.preset.accumulate,
            shard,
            pin_memory=self.devices.device.type != "cpu",
        )

    @contextmanager
    def _open_board(self) -> Iterator[None]:
        """Open TensorBoard's files, if it is installed."""
        if not self.processes.is_main or find_spec("tensorboard") is None:
            yield
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        with SummaryWriter(str(self.run.tensorboard), purge_step=self.step + 1) as self.board:
            yield

    def _log_window(self, display: Display) -> None:
        """Log the means since the last line: the only sync of the device between evaluations."""
        values = self.window.empty(self.processes)
        check_loss(values["loss"], self.step, self._what_is_left())
        display.step(self.step, values)
        self._write("train", self.step, values)

    def _choose(self, display: Display) -> None:
        """Evaluate, and save the checkpoint if it is the best so far."""
        metrics = self._evaluate(display)
        score = self.task.score
        if metrics and score.better(metrics[score.name], self.best):
            self.best, self.best_step = metrics[score.name], self.step
            self.save(self.run.best)

    def _evaluate(self, display: Display) -> dict[str, float]:
        """Return and log the metrics on validation data; none without such data."""
        if self.task.val_set is None:
            return {}
        began = time.monotonic()
        self._check_finite()
        processes = self.processes
        doing = f"evaluating on validation data after step {self.step}"
        with (
            naming_what_takes_long(doing, self.quiet),
            merged_statistics(self.bare_model, processes),
        ):
            model = self.parallel.whole()
            metrics, solver = processes.from_main(lambda: self._score(model(), "val", False))
        self._write("eval", self.step, {"split": "val", "metrics": metrics, "solver": solver})
        display.evaluated(self.step, metrics, solver)
        if not isfinite(metrics[self.task.score.name]) and processes.is_main:
            _log.warning("%s is not finite at step %d", self.task.score.name, self.step)
        self.validation = metrics
        self.window.pause(time.monotonic() - began)
        return metrics

    def _score(
        self, model: Model, split: Split, thorough: bool
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Return metrics and a summary of the solver on a split."""
        with self.processes.accelerator.autocast():
            evaluation = evaluate(self.task, model, split, thorough)
        return dict(evaluation.metrics), evaluation.solver.summary()

    def score_test(self) -> dict[str, float]:
        """Return the metrics of the chosen weights on the test data; score and log them only once.

        Afterwards the model in training may have the chosen weights.
        """
        return self.processes.from_main(self._score_test)

    def _score_test(self) -> dict[str, float]:
        for line in self.run.lines("test"):
            if line.get("of") == self.steps:  # not of the run before it was extended
                return metrics_of(line)
        checkpoint = self.run.checkpoint(best=True)
        model = self.parallel.loaded(checkpoint.model, str(self.run.path))
        with naming_what_takes_long("scoring the test data", self.quiet):
            metrics, solver = self._score(model, "test", True)
        values = {"of": self.steps, "split": "test", "metrics": metrics, "solver": solver}
        self._write("test", checkpoint.step, values)
        return metrics

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write to the log, and numbers to TensorBoard."""
        if not self.processes.is_main:
            return
        self.run.log(kind, step, values)
        for name, value in values.items():
            inner = value if isinstance(value, dict) else {name: value}
            for key, number in inner.items():
                if self.board is not None and isinstance(number, (int, float)):
                    self.board.add_scalar(f"{kind}/{key}", number, step)

    def _check_finite(self) -> None:
        """Raise `ZooError` if the loss, the weights or the optimiser's state are not finite."""
        check_loss(self.window.loss, self.step, self._what_is_left())
        name = find_not_finite(self.bare_model, self.not_finite_by_design)
        if name is None and not all_finite(self.optimizer.optimizer.state_dict()["state"]):
            name = "the optimiser's state"
        name = self.processes.first(name)
        if name is not None:
            raise diverged(f"{name} holds NaN or infinity", self.step, self._what_is_left())

    def _what_is_left(self) -> str:
        if self.saved_step is None:
            return ""
        return f"{self.run.last} is from step {self.saved_step} and finite"

    def save(self, path: Path) -> None:
        """Write a checkpoint of all processes together; nothing that is not finite is saved."""
        self._check_finite()
        checkpoint = collect_state(self)
        self.processes.from_main(lambda: checkpoint.save(path))
        if path == self.run.last:
            self.saved_step = self.step

    def resume(self) -> None:
        """Go on from the last checkpoint of the run."""
        checkpoint = self.run.checkpoint()
        if checkpoint.step > self.steps:
            raise ZooError(
                f"{self.run.path} has done {checkpoint.step} steps: choose at least as many, not "
                f"{self.steps}"
            )
        restore_state(self, checkpoint)
        if self.run.best.exists():  # it may be newer than the last checkpoint
            best = self.run.checkpoint(best=True)
            if best.step >= checkpoint.step:
                self.best, self.best_step = best.notes["best"], best.step
        evaluations = [line for line in self.run.lines("eval") if line["step"] <= self.step]
        self.validation = metrics_of(evaluations[-1]) if evaluations else {}
        self.saved_step = self.step
        self.processes.from_main(lambda: self.run.forget_after(self.step))


def _place(preset: Preset, model: Model, processes: Processes) -> Parallel:
    """Return a newly built model as the preset's `parallel` places it on the processes."""
    if preset.parallel == "ddp" or processes.count == 1:  # one process has nothing to share out
        return Replicated(preset, model, processes)
    from deq_zoo.sharding import Sharded  # slow to import

    return Sharded(preset, model, processes)
