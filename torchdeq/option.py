"""Options one by one: fields with help texts, names, values in the type of an option."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import field
from numbers import Real
from typing import Any

from torchdeq.callers import stack_level
from torchdeq.compat.names import OLD_NAMES, WITHOUT_EFFECT, current_name
from torchdeq.registry import suggest

_NEAR = 0.85  # similarity from which an attribute of a program looks like a misspelt option


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


def read_options(args: Any, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options in `args`, and the other values that an object of a program holds.

    Args:
        args: a Namespace, a dict, an object with attributes, or None.
        names: of all options.
    """
    if args is None:
        return {}, {}
    if isinstance(args, Mapping):
        options = {current_name(k): v for k, v in args.items() if k not in WITHOUT_EFFECT}
        check_names(options, names)
        return options, {}
    if isinstance(args, (str, bytes, int, float, list, tuple)):
        raise TypeError(
            "options come as a Namespace, a dict, a DEQConfig or an object with attributes, got "
            f"{type(args).__name__}"
        )
    own = dict(getattr(args, "__dict__", {}))
    options = {OLD_NAMES[name]: value for name, value in own.items() if name in OLD_NAMES}
    options |= {name: getattr(args, name) for name in names if hasattr(args, name)}
    extra = {k: v for k, v in own.items() if k not in options and k not in OLD_NAMES}
    warn_near_misses(extra, set(names) - set(options))
    return options, extra


def check_names(options: Mapping[str, Any], names: list[str]) -> None:
    """Raise `TypeError` with a suggestion for a name that is no option."""
    for key in options:
        if key not in names:
            raise TypeError(f"unknown option {key!r}{suggest(key, names)}")


def warn_near_misses(keys: Iterable[str], names: set[str]) -> None:
    """Warn about keys of a program that look like a misspelt option."""
    for key in keys:
        near = difflib.get_close_matches(key, names, n=1, cutoff=_NEAR)
        if near and key not in WITHOUT_EFFECT:
            warnings.warn(
                f"{key!r} is not an option of torchdeq; did you mean {near[0]!r}?",
                stacklevel=stack_level(),
            )
