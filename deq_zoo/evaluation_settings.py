"""Settings that an evaluation may change, and a trained model that follows them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from deq_zoo.building import try_to_build
from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.preset import Preset
from deq_zoo.settings import walk
from deq_zoo.task import Split
from deq_zoo.uses import STATES
from deq_zoo.values import to_data
from deq_zoo.weights import load_weights

_SHOWN = 80  # characters of a fact in a message


def check_evaluation_settings(
    preset: Preset, changed: Preset, flags: Collection[str], split: Split
) -> None:
    """Raise `ZooError` for changes that only training makes use of, or that lead to its data.

    Args:
        preset: that of the training.
        changed: the same with other settings.
        flags: options of the DEQ that the user has given, with whatever values.
        split: to evaluate on.
    """
    idle = sorted(STATES & {*flags})
    former = {field.path: field.value for field in walk(preset)}
    given = [field for field in walk(changed) if former.get(field.path) != field.value]
    idle += [field.path for field in given if not field.path.startswith("task.")]
    budget, asked = changed.task.deq.eval_f_max_iter, {*flags, *(f.path for f in given)}
    for name in ("f_max_iter", "eval_factor"):
        if budget and asked & {name, f"task.deq.{name}"}:
            raise ZooError(
                f"{name} would have no effect: eval_f_max_iter={budget} is the budget of "
                "evaluations; set that, --eval_f_max_iter N"
            )
    names = {field.path.removeprefix("task.") for field in given}
    choosing = sorted(names & preset.task.validation_settings & changed.task.validation_settings)
    if split == "val" and choosing:
        raise ZooError(
            f"{', '.join(choosing)} may not differ from the training: another choice of validation "
            "data would have examples of the training; drop it, or use --split test"
        )
    if idle:
        raise ZooError(f"{', '.join(idle)} would have no effect: only training makes use of it")


def check_same_data(model: Model, preset: Preset, folder: str | Path) -> None:
    """Raise `ZooError` if data that a user names is not of the kind that a model was trained on.

    Args:
        model: the model, with facts about the data of its training.
        preset: that of its training, with the user's data.
        folder: where that data is.
    """
    now = to_data(preset.task.available_facts())
    for name, then in to_data(dict(model.facts)).items():
        if name in now and now[name] != then:
            raise ZooError(
                f"the data in {folder} is not that of the training: {name} was "
                f"{shortened(then)}, and is {shortened(now[name])} there"
            )


def shortened(value: Any) -> str:
    """Return a value as a text that fits into a message."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def rebuild(trained: Model, changed: Preset, source: str) -> Model:
    """Return a model with other settings and the weights of a trained one, on its device.

    Args:
        trained: the model.
        changed: its preset with other settings.
        source: where its weights come from, for errors.
    """
    model = try_to_build(changed, trained.facts or None).to(trained.device)
    load_weights(model, trained.state_dict(), source)
    model.facts = trained.facts
    return model
