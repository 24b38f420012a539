"""Which presets make the same model: for checkpoints, and for runs that go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from deq_zoo.preset import Preset
from deq_zoo.values import to_data

#: Settings that may change when a run goes on.
CHANGEABLE = ("steps", "epochs", "eval_every", "save_every", "log_every", "workers", "parallel")
_BESIDE = (*CHANGEABLE, "target", "task.data_dir")  # settings that do not make another model


def differing_settings(one: Preset, other: Preset) -> list[str]:
    """Return the names of settings in which two presets differ and that make another model.

    The length of a run, its rhythm and the folder of its data do not.
    """
    first, second = dict(_flatten(one)), dict(_flatten(other))
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name) and name not in _BESIDE
    ]


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the class of a configuration, if it has a name, and every setting below it."""
    if prefix:
        yield prefix, type(value).__qualname__
    for f in fields(value):
        if f.init:
            path, inner = f"{prefix}.{f.name}" if prefix else f.name, getattr(value, f.name)
            if path in _BESIDE:
                continue
            if is_dataclass(inner) and not isinstance(inner, type):
                yield from _flatten(inner, path)
            else:
                yield path, to_data(inner)
