"""Checks of options that several configurations share."""

from __future__ import annotations

from math import inf
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints


def check_at_least(least: float, *, finite: bool = False, **values: Any) -> None:
    """Raise `ValueError` for the first value that is NaN or below a bound.

    Args:
        least: the bound.
        finite: whether infinity is an error, too.
        **values: numbers by the names that the error uses.
    """
    for name, value in values.items():
        if not _is(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not (least <= value < inf if finite else least <= value):
            bound = f"at least {least}" + (" and finite" if finite else "")
            raise ValueError(f"{name} must be {bound}, got {value}")


def _is(value: Any, kind: type) -> bool:
    """Return whether a value is of a kind of numbers, which NumPy has types of, too."""
    return isinstance(value, kind)


def check_integers(least: int, **values: Any) -> None:
    """Raise an error for the first value that is no integer, or below a bound."""
    for name, value in values.items():
        if not _is(value, Integral) or _is(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    check_at_least(least, **values)


def check_fields(options: object, least: float, *names: str, finite: bool = False) -> None:
    """Apply `check_at_least` to attributes of a configuration, given by their names."""
    values = {name: getattr(options, name) for name in names}
    check_at_least(least, finite=finite, **values)


def check_choices(options: Any) -> None:
    """Raise `ValueError` for a field of a configuration whose type is a `Literal` it is not in."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name, None)
        if get_origin(hint) is Literal and value not in get_args(hint):
            choices = ", ".join(map(repr, get_args(hint)))
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
