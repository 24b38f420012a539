"""Fields by the kind that a config names: equilibria, their explicit twins and baselines."""

from __future__ import annotations

from typing import Any

from deq_zoo.inr.baselines import make_baseline
from deq_zoo.inr.model import DEQField, Field, FieldConfig, OnePassField


def make_field(d: int, o: int, config: FieldConfig, deq: Any = None) -> Field:
    """Return the field that a config describes, freshly initialised.

    Args:
        d: coordinates of a point.
        o: numbers in a value.
        config: kind and shape of the field.
        deq: options of the equilibrium and of the norm in f, for the kinds that have them.
    """
    if config.kind == "deq":
        return DEQField(d, o, config, deq)
    if config.kind == "one_pass":
        return OnePassField(d, o, config, deq)
    return make_baseline(d, o, config)
