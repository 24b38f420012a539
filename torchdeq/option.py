"""One option: its field with a help text, the check of its name, the conversion of its value."""

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
        default: the default value. Its type is the type of the option, unless it is None.
        help: the text for the command line and the documentation.
        parse: for an option whose default is None, a function that returns the value or raises
            `ValueError`.
        **flag: settings of the command-line flag: `name`, if the flag has another name, and
            `metavar`, the words that an option without a number takes.
    """
    metadata = {"help": help, "flag": flag, "parse": parse}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def convert(name: str, value: Any, default: Any, parse: Any = None) -> Any:
    """Return a value in the type of its option; raise a `TypeError` that names the option.

    Args:
        name: the name of the option.
        value: the value that a program passed.
        default: the default of the option, which determines the type.
        parse: the parser of an option whose default is None.
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
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        return [_whole(name, item) for item in (value if is_list else [value])]
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
    """Return a number as a float; raise `TypeError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    """Return a whole number as an integer; raise `TypeError` for anything else."""
    number = _number(name, value)
    if not number.is_integer():  # False for NaN and infinity, too
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return int(number)


def read_options(args: Any, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options in `args`, and the other attributes of `args` if it is an object.

    Args:
        args: a Namespace, a dict, an object with attributes, or None.
        names: the names of all options.
    """
    if args is None:
        return {}, {}
    if isinstance(args, Mapping):
        options = {current_name(k): v for k, v in args.items() if k not in WITHOUT_EFFECT}
        check_names(options, names)
        return options, {}
    if isinstance(args, (str, bytes, int, float, list, tuple)):
        raise TypeError(
            "args must be a Namespace, a dict, a DEQConfig or an object with attributes, got "
            f"{type(args).__name__}"
        )
    attributes = dict(getattr(args, "__dict__", {}))
    options = {OLD_NAMES[name]: value for name, value in attributes.items() if name in OLD_NAMES}
    options |= {name: getattr(args, name) for name in names if hasattr(args, name)}
    extra = {k: v for k, v in attributes.items() if k not in options and k not in OLD_NAMES}
    warn_near_misses(extra, set(names) - set(options))
    return options, extra


def check_names(options: Mapping[str, Any], names: list[str]) -> None:
    """Raise `TypeError` with a suggestion for a name that is not an option."""
    for key in options:
        if key not in names:
            raise TypeError(f"unknown option {key!r}{suggest(key, names)}")


def warn_near_misses(keys: Iterable[str], names: set[str]) -> None:
    """Warn about each key of a program that looks like a misspelt option."""
    for key in keys:
        near = difflib.get_close_matches(key, names, n=1, cutoff=_NEAR)
        if near and key not in WITHOUT_EFFECT:
            warnings.warn(
                f"{key!r} is not an option of torchdeq; did you mean {near[0]!r}?",
                stacklevel=stack_level(),
            )
