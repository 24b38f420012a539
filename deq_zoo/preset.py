"""Presets: a task with everything that training it needs, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from deq_zoo.checks import check_fields
from deq_zoo.errors import ZooError
from deq_zoo.family import Family, families, preset_summaries
from deq_zoo.optim import Adam, Optim
from deq_zoo.packages import require_family
from deq_zoo.precision import Precision, describe_tolerances, reachable_tolerances
from deq_zoo.spelling import suggest
from deq_zoo.task import Task
from deq_zoo.uses import BACKWARD_SOLVE, NORM
from torchdeq import DEQConfig, get_deq
from torchdeq.registry import Registry

_log = logging.getLogger("deq_zoo")


@dataclass(frozen=True)
class Target:
    """A published result to compare with.

    Args:
        metric: the name of the metric.
        value: the published value.
        source: where it was published.
    """

    metric: str
    value: float
    source: str


@dataclass(frozen=True)
class Preset:
    """A training run as a value.

    Args:
        task: model, data, loss and score.
        optim: optimiser and schedule.
        steps: number of updates; 0 if the length is given by `epochs`.
        epochs: passes through the training data; 0 if the length is given by `steps`.
        accumulate: batches per update.
        clip: largest norm of the gradient; 0 does not clip.
        clip_value: largest magnitude of an entry of the gradient; 0 does not clip.
        precision: of the arithmetic. `no` is float32; `bf16` and `fp16` are mixed precision, fp16
            with scaled losses; `float64` holds weights, data and states in double precision.
        seed: seed of initialisation, data order and all other randomness.
        log_every: updates between two lines of the log.
        eval_every: updates between two evaluations; 0 evaluates once per epoch.
        save_every: updates between two checkpoints.
        workers: processes that make batches; `none` lets the machine and the task decide.
        parallel: how several processes hold the model: `ddp` gives each the whole of it, `fsdp` a
            shard of every weight.
        target: the published result to compare with.
    """

    task: Task
    optim: Optim = field(default_factory=Adam)
    steps: int = 0
    epochs: int = 0
    accumulate: int = 1
    clip: float = 0.0
    clip_value: float = 0.0
    precision: Precision = "no"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 100
    workers: int | None = None
    parallel: Literal["ddp", "fsdp"] = "ddp"
    target: Target | None = None

    def __post_init__(self) -> None:
        if (self.steps > 0) == (self.epochs > 0):
            raise ValueError(
                f"give either steps or epochs, got steps={self.steps} and epochs={self.epochs}"
            )
        check_fields(self, 1, "accumulate", "log_every", "save_every")
        check_fields(self, 0, "steps", "epochs", "eval_every", "clip", "clip_value")
        if self.workers is not None:
            check_fields(self, 0, "workers")
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"parallel must be ddp or fsdp, got {self.parallel!r}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a number from 0 to 2**32 - 1, got {self.seed}")

    @property
    def updates_per_epoch(self) -> int:
        """Return the steps of the optimiser in one pass through the data."""
        return max(1, self.task.steps_per_epoch // self.accumulate)

    @property
    def total_steps(self) -> int:
        """Return the updates of the whole run; opens the data if it is given in epochs."""
        return self.steps or self.epochs * self.updates_per_epoch

    def with_data_dir(self, folder: str | Path) -> Preset:
        """Return the preset with its data in another folder."""
        if not self.task.reads_data_dir:
            name = getattr(self.task, "data", None)
            what, hint = type(self.task).__name__, ""
            if isinstance(name, str):
                what, hint = f"{what} of {name}", ", or choose other data with --set data=..."
            raise ZooError(f"{what} reads no data set from disk: drop --data-dir{hint}")
        task = replace(self.task, data_dir=str(Path(folder).absolute()))  # type: ignore[type-var]
        return replace(self, task=task)

    def with_deq(self, **options: Any) -> Preset:
        """Return the preset with other options of the equilibrium; see `change_deq`.

        Raise `ZooError` for unknown names, and for options that the task makes no use of.
        """
        deq = self.change_deq(**options)
        try:
            changed = replace(self, task=replace(self.task, deq=deq))  # type: ignore[type-var]
            get_deq(deq)  # raises for unknown names
            return changed
        except (ValueError, TypeError, KeyError) as error:
            raise ZooError(str(error)) from None

    def change_deq(self, **options: Any) -> DEQConfig:
        """Return other options of the equilibrium, the paper's flags; the task need not use them.

        Another solver does not inherit the options of the one it replaces, `norm_type="none"` drops
        those of the norm, and a gradient that is not implicit those of the backward solve.
        """
        deq = self.task.deq
        for side in ("f", "b"):
            name = options.get(f"{side}_solver")
            if name is not None and name != getattr(deq, f"{side}_solver"):
                options.setdefault(f"{side}_solver_kwargs", {})
        if options.get("norm_type") == "none":
            defaults = deq.defaults()
            options = {**{name: defaults[name] for name in NORM if name in deq.given}, **options}
        try:
            changed = deq.with_options(**options)
            if deq.implicit and not changed.implicit:
                inherited = (BACKWARD_SOLVE & deq.given) - options.keys()
                changed = changed.with_options(**{n: deq.defaults()[n] for n in inherited})
            return changed
        except (ValueError, TypeError, KeyError) as error:
            raise ZooError(str(error)) from None

    def with_reachable_tolerances(self, kept: Collection[str] = ()) -> Preset:
        """Return the preset with tolerances that its precision can meet; log a note if any rise.

        Args:
            kept: options of the equilibrium that the user has set: they stay.
        """
        raised = reachable_tolerances(self.task.deq, self.precision, self.task.uses, kept)
        if not raised:
            return self
        changed = self.with_deq(**raised)
        _log.info(describe_tolerances(changed.task.deq, self.precision))
        return changed


PRESETS: Registry[Callable[[], Preset]] = Registry("preset")


def load_presets(family: Family | None = None) -> None:
    """Import the presets of one family, or of all; raise `ZooError` if that fails."""
    for each in families().values() if family is None else [family]:
        try:
            import_module(each.presets)
        except ImportError as error:
            require_family(each)  # a missing package is the likeliest reason
            raise ZooError(f"the presets of {each.name} cannot be imported: {error}") from None


def find_preset(name: str) -> Preset:
    """Return the preset of that name; raise if there is none, or if its packages are missing."""
    family = families().get(name.partition("-")[0])
    if name not in PRESETS and family is not None:
        load_presets(family)
    if name not in PRESETS:
        names = {*PRESETS, *(each for other in families().values() for each in summaries(other))}
        raise ZooError(f"unknown preset {name!r}{suggest(name, names, 'deq-zoo list shows all')}")
    if family is not None:
        require_family(family)
    return PRESETS[name]()


def summaries(family: Family) -> dict[str, str]:
    """Return the first line about each preset of a family; import them if there is no other way."""
    if lines := preset_summaries(family):
        return lines
    with suppress(ZooError):
        load_presets(family)
    names = [name for name in PRESETS if name.partition("-")[0] == family.name]
    return {name: (PRESETS[name].__doc__ or "").strip().partition("\n")[0] for name in names}
