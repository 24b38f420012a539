"""One option: a field with its help text, and values in the type of the option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from numbers import Real
from typing import Any

from torchdeq.registry import suggest


def option(default: Any, help: str, parse: Any = None, **flag: Any) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: its type is the type of the option, unless it is None.
        help: for the command line and the documentation.
        parse: returns a value or raises `ValueError`, for options whose default is None.
        **flag: overrides what the command line makes of the field.
    """
    metadata = {"help": help, "flag": flag, "parse": parse}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def convert(name: str, value: Any, default: Any, parse: Any = None) -> Any:
    """Return a value in the type of the option; raise `TypeError` with the name of the option.

    Args:
        name: the name of the option.
        value: what a program gave.
        default: of the option, which has its type.
        parse: for an option whose default is None.
    """
    if parse is float:
        return None if value is None else _number(name, value)
    if parse is not None:
        try:
            return parse(value)
        except ValueError as error:
            raise TypeError(f"{name}: {error}") from None
    if isinstance(default, list):
        if value is None:
            return []
        many = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        return [_whole(name, item) for item in (value if many else [value])]
    if isinstance(default, dict):
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{name} must be a dict of options, got {value!r}")
    if isinstance(default, str):
        if isinstance(value, str):
            return value
        raise TypeError(f"{name} must be a name, got {value!r}")
    if isinstance(default, bool):
        if value in (True, False):
            return bool(value)
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return _whole(name, value) if isinstance(default, int) else _number(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not number.is_integer():  # nor are NaN and infinity
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return int(number)


def require(holds: object, rule: str, value: object) -> None:
    """Raise `ValueError` with the rule and the value unless the rule holds."""
    if not holds:
        raise ValueError(f"{rule}, got {value}")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `ValueError` with a suggestion unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}{suggest(value, choices)}")
