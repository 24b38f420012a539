"""The doctor of a run: the solves of its model on a training batch, examined."""

from __future__ import annotations

from dataclasses import dataclass

from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.preset import Preset
from deq_zoo.randomness import unchanged_randomness
from deq_zoo.task import Picture
from deq_zoo.tree import to_device
from torchdeq.diagnostics import Diagnosis, FoundSolve, recorded_solves
from torchdeq.plots import (
    plot_eigenvalues,
    plot_evaluations,
    plot_residuals,
    plot_solvers,
    to_png,
)


@dataclass(frozen=True)
class Examined:
    """A solve inside a model, and what the doctor says about it."""

    solve: FoundSolve
    diagnosis: Diagnosis


def examine_model(model: Model, preset: Preset, seconds: float) -> list[Examined]:
    """Examine the first solve of each DEQ of a model on a training batch, see `first_solves`.

    The model is in training mode, as the solves of a training are; it is left in the mode that it
    was in.

    Args:
        model: the model, on its device.
        preset: that it was trained with.
        seconds: the time limit, for all solves together.
    """
    solves = first_solves(model, preset)
    return [Examined(each, each.doctor(seconds=seconds / len(solves))) for each in solves]


def first_solves(model: Model, preset: Preset) -> list[FoundSolve]:
    """Return the first solve of each DEQ on the first training batch; raise if there is none.

    If training begins without solves, it is the last batch.
    """
    last = preset.total_steps * preset.accumulate - 1
    found = _solves(model, preset, 0) or _solves(model, preset, last)
    if not found:
        raise ZooError("training this model solves for no equilibrium: there is none to examine")
    first = {solve.name: solve for solve in reversed(found)}
    return list(reversed(first.values()))


def _solves(model: Model, preset: Preset, step: int) -> list[FoundSolve]:
    """Return the solves of a training batch; the model is left in the mode that it was in."""
    batch = to_device(preset.task.train_batch(step, preset.seed), model.device)
    training = model.training
    model.train()
    try:
        with unchanged_randomness(), recorded_solves(model) as found:
            preset.task.loss(model, batch, None)
    except ValueError as error:
        raise ZooError(f"the doctor cannot examine this model: {error}") from None
    finally:
        model.train(training)
    return found


def draw(examined: Examined) -> list[Picture]:
    """Return pictures of a diagnosis: solvers, residuals, evaluations, eigenvalues."""
    diagnosis = examined.diagnosis
    name = examined.solve.name.replace(".", "-") or "deq"
    stop = examined.solve.config.f_stop
    tolerance = stop.tol if stop.mode == "rel" else None
    figures = {}
    done = [trial for trial in diagnosis.solvers if trial.stats is not None]
    if done:
        own = done[0]
        assert own.stats is not None
        figures["solvers"] = (
            "Solvers on a training batch: median relative residual over samples.",
            plot_solvers(done, tolerance),
        )
        figures["residuals"] = (
            f"{own.name}: relative residual, with bands over samples.",
            plot_residuals(own.stats, tolerance),
        )
        figures["evaluations"] = (
            f"{own.name}: evaluations that each sample needed.",
            plot_evaluations(own.stats, examined.solve.config.f_max_iter or None),
        )
    if diagnosis.jacobian is not None:
        figures["eigenvalues"] = (
            "Leading eigenvalues of the Jacobian at the best state, for each sample.",
            plot_eigenvalues(diagnosis.jacobian.spectrum.values),
        )
    return [
        Picture(f"{name}-{key}", caption, to_png(figure))
        for key, (caption, figure) in figures.items()
    ]
