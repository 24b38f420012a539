"""Training a preset in a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deq_zoo.building import refusing_settings
from deq_zoo.errors import ZooError
from deq_zoo.identity import CHANGEABLE, differing_settings
from deq_zoo.loading import load
from deq_zoo.model import Model
from deq_zoo.preset import Preset, find_preset
from deq_zoo.processes import Processes, start_processes
from deq_zoo.progress import naming_what_takes_long
from deq_zoo.python_errors import naming_arguments
from deq_zoo.run import Run
from deq_zoo.settings import change_settings
from deq_zoo.trainer import TIME_UP, Trainer
from deq_zoo.update import check_seconds


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run: the folder.
        step: updates that it has done.
        steps: updates of the whole run.
        best: the score on validation data by which the best checkpoint was chosen; None without.
        best_step: the step of that checkpoint; None if the last one counts.
        validation: metrics of the latest evaluation on validation data.
        test: metrics of the chosen weights on test data; empty until the run has finished.
        interrupted: the number of the signal that stopped the run; 0 if none did.
        seconds: that training took, this time.
        main: whether this process speaks for the run, where several train.
    """

    run: Run
    step: int
    steps: int
    best: float | None
    best_step: int | None
    validation: dict[str, float]
    test: dict[str, float]
    interrupted: int = 0
    seconds: float = 0.0
    main: bool = True

    @property
    def finished(self) -> bool:
        """Return whether all updates are done."""
        return self.step >= self.steps

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics on test data; on validation data if the run has not finished."""
        return self.test or self.validation

    def model(self, best: bool = True) -> Model:
        """Return the trained model: the best weights, or the last."""
        return load(self.run.path, best)


@naming_arguments()
def train(
    name: str,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    cpu: bool = False,
    max_seconds: float | None = None,
    report: bool = True,
    **settings: Any,
) -> Result:
    """Train a preset in a run folder, as `deq-zoo train` does.

    Ctrl-C, SIGTERM and `max_seconds` end the run after the current step, with a checkpoint and
    without an evaluation or a report. A resumed run ends with the weights of an uninterrupted one,
    bit for bit. With other `steps` or `epochs`, a resumed run becomes longer: its schedule follows
    the new length.

    Args:
        name: of the preset.
        out: the run folder; by default `runs/NAME`.
        resume: go on with the run in the folder.
        force: replace the run in the folder.
        quiet: show no progress.
        cpu: do not use an accelerator.
        max_seconds: stop after the step or the evaluation that reaches so many.
        report: write `report.html` when the run has finished.
        **settings: changes of the preset, e.g. `lr=0.01`, `f_solver="anderson"` or
            `**{"task.batch": 32}`.
    """
    if not isinstance(name, str):
        raise TypeError(f"train takes the name of a preset, got {type(name).__name__}")
    return train_changed(
        name,
        lambda preset: change_settings(preset, settings),
        out=out,
        resume=resume,
        force=force,
        quiet=quiet,
        cpu=cpu,
        max_seconds=max_seconds,
        report=report,
    )


def train_changed(
    name: str,
    change: Callable[[Preset], Preset],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    cpu: bool = False,
    max_seconds: float | None = None,
    report: bool = True,
) -> Result:
    """Train as `train` does, with settings that a function changes.

    Args:
        name: of the preset.
        change: returns the preset to train from that of the name, or from that of a resumed run.
        out: see `train`, which explains the other options, too.
    """
    if resume and force:
        raise ZooError("--resume goes on with a run, --force replaces it: choose one")
    check_seconds(max_seconds)
    run = Run(Path("runs") / name if out is None else Path(out))
    resume = resume and not (run.path.is_dir() and run.is_half_made)
    if resume:
        preset = _extended(run, name, change)
        resume = run.last.exists()  # otherwise it was killed before its first checkpoint
        if not resume and run.best.exists():
            raise ZooError(
                f"{run.path} has {run.best.name} but not {run.last.name}, which --resume needs: "
                "copy it back, or begin again with --force"
            )
        force = not resume
    else:
        preset = change(find_preset(name))
        run.check_replaceable(force)  # soon, and again when the folder is locked
    processes = start_processes(preset, cpu)
    with processes.ending_together(lambda: _advice(run, processes)), ExitStack() as stack:
        with refusing_settings():
            preset.task.open_data()
        trainer = Trainer(run, name, preset, processes, begins=not resume, quiet=quiet)
        processes.from_main(lambda: _take(run, stack, name, preset, resume, force))
        result = _train(trainer, resume, max_seconds)
        if report and result.main and result.finished:
            from deq_zoo.report import write_report  # slow to import

            with naming_what_takes_long("writing the report with its pictures", quiet):
                write_report(run, preset)
        return result


def _extended(run: Run, name: str, change: Callable[[Preset], Preset]) -> Preset:
    """Return the preset with which a run goes on: its own, perhaps with another length."""
    run = Run.open(run.path)
    if run.name != name:
        raise ZooError(f"{run.path} holds a run of {run.name}, not of {name}")
    former = run.preset()
    preset = change(former)
    differing = differing_settings(former, preset)
    if differing:
        raise ZooError(
            f"a resumed run keeps its settings, except for {', '.join(CHANGEABLE)}: drop "
            f"{', '.join(differing)}"
        )
    return preset


def _take(run: Run, stack: ExitStack, name: str, preset: Preset, resume: bool, force: bool) -> None:
    """Lock the run folder; make it, or note in it the settings with which the run goes on."""
    stack.enter_context(run.locked())
    if not resume:
        Run.create(run.path, name, preset, force)
    elif preset != run.preset():
        run.write_config(name, preset)


def _train(trainer: Trainer, resume: bool, max_seconds: float | None) -> Result:
    """Train from the beginning or the last checkpoint; score the test data at the end."""
    began = time.monotonic()
    if resume:
        trainer.resume()
    else:
        trainer.save(trainer.run.last)
    if trainer.step < trainer.steps:
        trainer.train(max_seconds)
    test = trainer.score_test() if trainer.step >= trainer.steps else {}
    return Result(
        run=trainer.run,
        step=trainer.step,
        steps=trainer.steps,
        best=trainer.best,
        best_step=trainer.best_step,
        validation=trainer.validation,
        test=test,
        interrupted=trainer.stopped_by if trainer.stopped_by != TIME_UP else 0,
        seconds=time.monotonic() - began,
        main=trainer.processes.is_main,
    )


def _advice(run: Run, processes: Processes) -> str:
    """Return how to go on when one of several processes is lost."""
    if not run.last.exists():
        return "this process ends, too. The run has no checkpoint: start it again"
    return (
        "this process ends, too. The last checkpoint is intact: go on with --resume and "
        f"{processes.count} processes; its run is {run.path}"
    )
