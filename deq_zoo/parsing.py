"""Text from a command line as values of the types of settings."""

from __future__ import annotations

import ast
import types
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin

from deq_zoo.errors import ZooError
from deq_zoo.spelling import did_you_mean


def parse_value(text: str, kind: Any, name: str) -> Any:
    """Return text as a value of a type; raise `ZooError` if it is none.

    Args:
        text: from the command line.
        kind: a number, text, truth value, `Literal`, or an optional, tuple or list of them.
        name: the name of the setting, for the error.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in inner and text.lower() in ("none", ""):
            return None
        for option in inner:
            if option is not type(None):
                with suppress(ZooError):
                    return parse_value(text, option, name)
    elif origin is Literal:
        if text in map(str, inner):
            return next(item for item in inner if str(item) == text)
        hint = did_you_mean(text, map(str, inner))
        raise ZooError(f"{name} is one of {', '.join(map(str, inner))}, got {text!r}{hint}")
    elif origin in (tuple, list):
        nested = bool(inner) and get_origin(inner[0]) in (tuple, list)
        items = _groups(text, name) if nested else _items(text)
        parsed = [parse_value(item.strip(), inner[0] if inner else str, name) for item in items]
        if origin is tuple and ... not in inner and len(parsed) != len(inner):
            raise ZooError(f"{name} takes {len(inner)} values, got {len(parsed)}")
        return origin(parsed)
    else:
        with suppress(KeyError, ValueError, TypeError, SyntaxError, OverflowError):
            return _scalar(text, kind)
    raise ZooError(f"{name} takes {kind_name(kind)}, got {text!r}")


def _items(text: str) -> list[str]:
    return [] if text in ("", "()", "[]") else text.strip("()[]").split(",")


def _groups(text: str, name: str) -> list[str]:
    """Return the groups in a text such as `(96,128),(128,160)`, or in that with brackets around."""
    plain = text.replace(" ", "").replace("[", "(").replace("]", ")").replace(",)", ")")
    if plain in ("", "()"):
        return []
    plain = plain[1:-1] if plain.startswith("((") else plain
    groups = plain.removeprefix("(").removesuffix(")").split("),(")
    if (
        not plain.startswith("(")
        or not plain.endswith(")")
        or any(set("()") & {*g} for g in groups)
    ):
        raise ZooError(f"{name} takes groups in brackets, e.g. (96,128),(128,160), got {text!r}")
    return groups


def kind_name(kind: Any) -> str:
    """Return a type in words, e.g. `int, or none`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        names = [kind_name(each) for each in inner if each is not types.NoneType]
        return ", or ".join([*names, "none"] if types.NoneType in inner else names)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin is tuple and ... not in inner:
        return ",".join(map(kind_name, inner))
    if origin in (tuple, list):
        items = kind_name(inner[0])
        return f"list of ({items})" if get_origin(inner[0]) in (tuple, list) else f"list of {items}"
    if origin is dict or kind is dict:
        return "name=value pairs"
    return getattr(kind, "__name__", str(kind))


def _scalar(text: str, kind: Any) -> Any:
    """Return text as a truth value, number, string or literal; raise an error if it is none."""
    if kind is bool:
        return _TRUTH[text.lower()]
    if kind is int:
        with suppress(ValueError):
            return int(text)
        number = float(text)
        if number.is_integer():
            return int(number)
        raise ValueError(text)
    if kind is float:
        return float(text)
    if kind is str:
        return text
    value = ast.literal_eval(text)
    expected = get_origin(kind) or kind
    if isinstance(expected, type) and not isinstance(value, expected):
        raise TypeError(text)
    return value


_TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)
