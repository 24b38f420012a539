"""Typed configurations: to and from plain data, and changed from the command line.

A configuration is a frozen dataclass of numbers, strings, tuples and further dataclasses. The plain
data names the classes, so that reading it gives the same value again.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from deq_zoo.errors import ZooError
from deq_zoo.family import families
from deq_zoo.packages import require_family
from deq_zoo.parsing import parse
from deq_zoo.spelling import suggest
from deq_zoo.uses import UnusedOptions
from torchdeq import DEQConfig

_log = logging.getLogger("deq_zoo")
_TRUSTED = {"deq_zoo", "torchdeq"}  # packages whose classes a file may name
#: Classes under the names by which earlier versions wrote them.
_MOVED = {
    "deq_zoo.flow.model:FlowConfig": "deq_zoo.flow.config:FlowConfig",
    "deq_zoo.flow.schedule:LinearOneCycle": "deq_zoo.optim:LinearOneCycle",
    "deq_zoo.lm.model:LMConfig": "deq_zoo.lm.config:LMConfig",
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
    """Return a configuration as plain values for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        names = [f.name for f in fields(value) if f.init]
        if isinstance(value, DEQConfig):  # an option set to its default differs from one not set
            names = [name for name in names if name in value.given]
        values = {name: to_data(getattr(value, name)) for name in names}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", **values}
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a configuration holds plain values and dataclasses, got {value!r}")


def from_data(data: Any) -> Any:
    """Return the configuration that `to_data` wrote."""
    if isinstance(data, Mapping) and "class" in data:
        kind = _class(data["class"])
        hints = get_type_hints(kind)
        names = {f.name for f in fields(kind) if f.init}
        former = getattr(kind, "former_fields", {})
        renamed = {former.get(k, k): v for k, v in data.items() if k != "class"}
        values = {k: v for k, v in renamed.items() if k is not None}
        unknown = [name for name in values if name not in names]
        if unknown:
            raise ZooError(
                f"{data['class']} has no field {unknown[0]!r}{suggest(unknown[0], names)}; another "
                "version wrote the file"
            )
        return _make(kind, {name: _shaped(from_data(v), hints[name]) for name, v in values.items()})
    if isinstance(data, Mapping):
        return {key: from_data(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [from_data(item) for item in data]
    return data


def _make(kind: type[Any], values: dict[str, Any]) -> Any:
    """Return an instance without options of a DEQ that have no effect: old files may have some."""
    try:
        return kind(**values)
    except UnusedOptions as error:
        _log.info("left out of an earlier configuration: %s", error)
        deq: DEQConfig = values["deq"]
        used = {name: getattr(deq, name) for name in deq.given if name not in error.names}
        return kind(**{**values, "deq": DEQConfig(**used)})


def _class(path: str) -> type[Any]:
    """Return the dataclass that a file names, if the file may name it."""
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


class Field(NamedTuple):
    """A field somewhere below a configuration.

    Args:
        owner: the dataclass that has it.
        name: the name in `owner`.
        path: the dotted name from the configuration on.
        kind: the type.
        value: the value.
    """

    owner: Any
    name: str
    path: str
    kind: Any
    value: Any


def walk(config: Any, prefix: str = "") -> Iterator[Field]:
    """Yield every field below a configuration that is not a configuration itself."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        if not f.init:
            continue
        path, value = f"{prefix}{f.name}", getattr(config, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from walk(value, f"{path}.")
        else:
            yield Field(config, f.name, path, hints[f.name], value)


def paths(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path, the type and the value of every field below a configuration."""
    for field in walk(config):
        yield field.path, field.kind, field.value


def with_settings(config: Any, settings: Sequence[str], all_names: str = "") -> Any:
    """Return a configuration with `path=value` settings applied.

    A path may be shortened to its last parts as long as one field alone ends with them. All are
    applied together, since one may need another that comes after it. Of `steps` and `epochs`, the
    last one set counts.

    Args:
        config: the configuration.
        settings: the changes.
        all_names: where users read the names of all settings, for errors.
    """
    parsed: list[tuple[str, Any]] = []
    kinds = {field.path: field.kind for field in walk(config)}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ZooError(f"a setting reads key=value, got {setting!r}")
        path = _complete(name, kinds, all_names)
        parsed.append((path, parse(text, kinds[path], path)))
    changes: dict[str, Any] = {}
    # Zeros of fields that exclude each other come last: by then the other one is set.
    for path, new in sorted(parsed, key=lambda item: item[0] in _EITHER and not item[1]):
        other = _EITHER.get(path)
        if other is None or other not in kinds:
            changes[path] = new
        elif new:
            changes |= {other: 0, path: new}
        elif not changes.get(other, getattr(config, other)):
            changes[path] = new
    return _replace(config, changes) if changes else config


_EITHER = {"steps": "epochs", "epochs": "steps"}  # of a preset


def _complete(name: str, paths: Iterable[str], all_names: str) -> str:
    """Return the one path that a name stands for."""
    paths = list(paths)
    if name in paths:
        return name
    ends = [path for path in paths if path.endswith(f".{name}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ZooError(f"the setting {name!r} could be any of {', '.join(ends)}: name it in full")
    last = name.rsplit(".", 1)[-1]
    elsewhere = [path for path in paths if path.rsplit(".", 1)[-1] == last]
    if elsewhere:
        hint = f"; did you mean {elsewhere[0]!r}?"
    else:
        hint = suggest(last, (path.rsplit(".", 1)[-1] for path in paths), all_names)
    raise ZooError(f"unknown setting {name!r}{hint}")


def _replace(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a configuration with the fields at these paths below it replaced."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, new in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = new
        else:
            own[head] = new
    own |= {head: _replace(getattr(config, head), inner) for head, inner in below.items()}
    try:
        if isinstance(config, DEQConfig):
            return config.with_options(**own)
        return replace(config, **own)
    except (ValueError, TypeError) as error:
        settings = ", ".join(f"{path}={new!r}" for path, new in changes.items())
        raise ZooError(f"{settings}: {error}") from None


def _shaped(value: Any, kind: Any) -> Any:
    """Return a value from a file with lists as tuples where the type asks for them."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        matching = [option for option in inner if get_origin(option) is tuple]
        return _shaped(value, matching[0]) if matching and isinstance(value, list) else value
    if origin is tuple and isinstance(value, list):
        each = inner[0] if inner else Any
        return tuple(_shaped(item, each) for item in value)
    return value
