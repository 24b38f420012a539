"""Typed configurations as plain data, and back.

A configuration is a frozen dataclass of numbers, strings, tuples and further dataclasses. The plain
data names the classes, so that reading it gives the same value again.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Union, get_args, get_origin, get_type_hints

from deq_zoo.errors import ZooError
from deq_zoo.family import families
from deq_zoo.packages import require_family
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
