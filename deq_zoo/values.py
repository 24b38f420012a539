"""Typed configurations: to and from plain data, and changed from the command line.

A configuration is a frozen dataclass of numbers, strings, tuples and further dataclasses. What is
written to a run folder names the classes, so that it reads back as the same value.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from deq_zoo.errors import ZooError
from deq_zoo.family import families
from deq_zoo.packages import require_family
from torchdeq import DEQConfig
from torchdeq.registry import suggest

_TRUSTED = {"deq_zoo", "torchdeq"}  # packages whose classes a file may name
#: Classes under the names by which earlier versions wrote them.
_MOVED = {
    "deq_zoo.flow.model:FlowConfig": "deq_zoo.flow.config:FlowConfig",
    "deq_zoo.flow.schedule:LinearOneCycle": "deq_zoo.optim:LinearOneCycle",
    "deq_zoo.lm.schedule:WarmCosine": "deq_zoo.optim:WarmCosine",
    "deq_zoo.mdeq.model:MDEQConfig": "deq_zoo.mdeq.config:MDEQConfig",
}


def trust(package: str) -> None:
    """Let files name the configurations of one more package.

    Packages of registered families are trusted without it.
    """
    _TRUSTED.add(package)


def _trusted() -> set[str]:
    return _TRUSTED | {family.package for family in families().values()}


def to_data(value: Any) -> Any:
    """A configuration as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        names = [f.name for f in fields(value) if f.init]
        if isinstance(value, DEQConfig):  # an option that was left alone is not the same as given
            names = [name for name in names if name in value.given]
        held = {name: to_data(getattr(value, name)) for name in names}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", **held}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a configuration holds plain values and dataclasses, got {value!r}")


def from_data(data: Any) -> Any:
    """The configuration that `to_data` wrote."""
    if isinstance(data, Mapping) and "class" in data:
        kind = _class(data["class"])
        hints = get_type_hints(kind)
        known = {f.name for f in fields(kind) if f.init}
        former = getattr(kind, "former_fields", {})
        named = {former.get(k, k): v for k, v in data.items() if k != "class"}
        held = {k: v for k, v in named.items() if k is not None}
        unknown = [name for name in held if name not in known]
        if unknown:
            raise ZooError(
                f"{data['class']} has no field {unknown[0]!r}{suggest(unknown[0], known)}; another "
                "version wrote the file"
            )
        return kind(**{name: _shaped(from_data(v), hints[name]) for name, v in held.items()})
    if isinstance(data, Mapping):
        return {key: from_data(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [from_data(item) for item in data]
    return data


def _class(path: str) -> type[Any]:
    module, _, name = _MOVED.get(path, path).partition(":")
    package, _, inner = module.partition(".")
    runs = module.rsplit(".", 1)[-1] == "__main__"  # a program, not a module
    if package not in _trusted() or not name.isidentifier() or runs:
        raise ZooError(
            f"the configuration names the class {path!r}, and only classes of the zoo and of "
            "registered families are loaded: register the family it belongs to, or use another "
            "file if you did not expect this class"
        )
    family = families().get(inner.partition(".")[0]) if package == "deq_zoo" else None
    if family is not None:
        require_family(family)
    kind = getattr(import_module(module), name, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ZooError(f"a configuration names the class {path!r}, which does not exist")
    return kind


def paths(value: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every settable field below a configuration: its dotted path, type and value."""
    hints = get_type_hints(type(value))
    for f in fields(value):
        if not f.init:
            continue
        path, held = f"{prefix}{f.name}", getattr(value, f.name)
        if is_dataclass(held) and not isinstance(held, type):
            yield from paths(held, f"{path}.")
        else:
            yield path, hints[f.name], held


def with_settings(value: Any, settings: Sequence[str]) -> Any:
    """The configuration with `path=value` settings applied.

    A path may be shortened to its last parts as long as one field alone ends with them. All are
    applied at once: a setting may need another that comes after it. Of fields that exclude each
    other, the last one set counts.
    """
    parsed: list[tuple[str, Any]] = []
    known = {path: kind for path, kind, _ in paths(value)}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ZooError(f"a setting reads key=value, got {setting!r}")
        full = _complete(path, known)
        parsed.append((full, _parse(text, known[full], full)))
    changes: dict[str, Any] = {}
    # Zeros of fields that exclude each other come last: by then the other one is set.
    for full, new in sorted(parsed, key=lambda item: item[0] in _EITHER and not item[1]):
        other = _EITHER.get(full)
        if other is None or other not in known:
            changes[full] = new
        elif new:
            changes |= {other: 0, full: new}
        elif not changes.get(other, getattr(value, other)):
            changes[full] = new
    return _with(value, changes) if changes else value


_EITHER = {"steps": "epochs", "epochs": "steps"}  # of a preset


def _complete(path: str, known: Mapping[str, Any]) -> str:
    if path in known:
        return path
    ends = [each for each in known if each.endswith(f".{path}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ZooError(f"the setting {path!r} could be any of {', '.join(ends)}: name it in full")
    short = [each.rsplit(".", 1)[-1] for each in known]
    raise ZooError(f"unknown setting {path!r}{suggest(path, {*known, *short})}")


def _with(value: Any, changes: Mapping[str, Any]) -> Any:
    """The configuration with the fields at these paths below it replaced."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, new in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = new
        else:
            own[head] = new
    own |= {head: _with(getattr(value, head), inner) for head, inner in below.items()}
    try:
        return value.with_options(**own) if isinstance(value, DEQConfig) else replace(value, **own)
    except (ValueError, TypeError) as error:
        told = ", ".join(f"{path}={new!r}" for path, new in changes.items())
        raise ZooError(f"{told}: {error}") from None


def _parse(text: str, kind: Any, path: str) -> Any:
    """Return text from a command line as a value of the field's type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in inner and text.lower() in ("none", ""):
            return None
        for option in inner:
            if option is not type(None):
                with suppress(ZooError):
                    return _parse(text, option, path)
    elif origin is Literal:
        if text in map(str, inner):
            return next(item for item in inner if str(item) == text)
        raise ZooError(f"{path} is one of {', '.join(map(str, inner))}, got {text!r}")
    elif origin in (tuple, list):
        items = [] if text in ("", "()", "[]") else text.strip("()[]").split(",")
        parsed = [_parse(item.strip(), inner[0] if inner else str, path) for item in items]
        if origin is tuple and ... not in inner and len(parsed) != len(inner):
            raise ZooError(f"{path} takes {len(inner)} values, got {len(parsed)}")
        return origin(parsed)
    else:
        with suppress(KeyError, ValueError, SyntaxError, OverflowError):
            return _scalar(text, kind)
    name = getattr(kind, "__name__", str(kind))
    raise ZooError(f"{path} takes {name}, got {text!r}")


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
    return text if kind is str else ast.literal_eval(text)


_TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)


def _shaped(value: Any, kind: Any) -> Any:
    """Lists from a file as the tuples that the field asks for, at every depth."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        matching = [option for option in inner if get_origin(option) is tuple]
        return _shaped(value, matching[0]) if matching and isinstance(value, list) else value
    if origin is tuple and isinstance(value, list):
        each = inner[0] if inner else Any
        return tuple(_shaped(item, each) for item in value)
    return value
