"""Coupling: whether the samples of a batch depend on each other."""

from __future__ import annotations

from typing import Any, Literal

#: True, False, None (the backward pass finds out), or "adjoint" for maps that are solved sample by
#: sample and differentiated as one system.
Coupling = bool | Literal["adjoint"] | None

_WORDS: dict[str, Coupling] = {"auto": None, "true": True, "false": False, "adjoint": "adjoint"}


def parse_coupling(value: Any) -> Coupling:
    """Return the coupling that an option or a flag names; raise `ValueError` for anything else."""
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"expected auto, true, false or adjoint, got {value!r}")


def check_coupling(coupled: object, compact: bool) -> None:
    """Raise `ValueError` for an unknown coupling, and for one that forbids compaction."""
    if not (coupled is None or isinstance(coupled, bool) or coupled == "adjoint"):
        raise ValueError(f'coupled must be None, True, False or "adjoint", got {coupled!r}')
    if compact and coupled in (True, "adjoint"):
        raise ValueError(
            f"compact=True lets finished samples leave the batch, and coupled={coupled!r} says "
            "that the others depend on them: drop one of them"
        )
