"""The modules that a callable reaches: by closures, owners, arguments, containers and globals.

The search reads attributes and calls no code of the program. It is bounded in depth and in the
number of objects, since a callable may refer to a whole training program.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

_MAX_DEPTH = 6  # steps from the callable; a step into a container does not count
_MAX_OBJECTS = 5_000
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = (*_SEQUENCES, dict)
# Attributes of these types may refer to modules that are not submodules.
_INDIRECT = (list, tuple, dict, FunctionType, MethodType, partial)
_INTERNAL = set(vars(nn.Module()))  # attributes that every module has
_PLAIN = (Tensor, str, bytes, int, float, complex, type, ModuleType, type(None))  # lead nowhere


def reachable_modules(f: Any) -> dict[str, nn.Module]:
    """Return every module that `f` reaches, including submodules, by its path from `f`.

    The search follows a module (its submodules, and modules in its plain lists, dicts and
    functions), a function (its closure, default values, attributes, and the globals that its code
    names), a method (also its owner), a partial, any other object (its attributes), and the items
    of lists, tuples, sets and dicts. The path of `f` itself is `""`.
    """
    return {path: item for path, item in _search(f).items() if isinstance(item, nn.Module)}


def _search(f: Any) -> dict[str, Any]:
    """Return the modules and scripted functions that `f` reaches, by path, breadth first."""
    reached: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # keeps the objects alive: otherwise an id could be used twice
    queue: deque[tuple[str, Any, int]] = deque([("", f, 0)])
    visited = 0
    while queue and visited < _MAX_OBJECTS:
        path, node, depth = queue.popleft()
        if id(node) in seen:
            continue
        parts = [("", node)] if not isinstance(node, nn.Module) else list(node.named_modules())
        visited, depth = visited + 1, depth + (not isinstance(node, _CONTAINERS))
        for inner, part in parts:
            if id(part) in seen:
                continue
            seen[id(part)] = part
            here = _joined(path, inner)
            if isinstance(part, (nn.Module, torch.jit.ScriptFunction)):
                reached[_unused(here, reached)] = part
            if depth <= _MAX_DEPTH:
                for name, item in islice(_neighbours(part), _MAX_OBJECTS):
                    if not isinstance(item, _PLAIN):
                        queue.append((_joined(here, name), item, depth))
    return reached


def _neighbours(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object refers to, with their names; `""` for those without one."""
    if isinstance(node, nn.Module):
        yield from _of_module(node)
    elif isinstance(node, dict):
        yield from ((str(key), item) for key, item in list(node.items()))
    elif isinstance(node, _SEQUENCES):
        yield from ((str(i), item) for i, item in enumerate(list(node)))
    elif isinstance(node, FunctionType):
        yield from _of_function(node)
    elif isinstance(node, MethodType):
        yield from (("", node.__self__), ("", node.__func__))
    elif isinstance(node, (BuiltinMethodType, MethodWrapperType)):
        yield "", node.__self__
    elif isinstance(node, partial):
        yield from (("", node.func), ("", node.args), ("", node.keywords))
    else:
        yield from _of_object(node)


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield plain attributes of a module, and its `forward` for the globals that it names."""
    own = [(name, item) for name, item in vars(module).items() if name not in _INTERNAL]
    yield from ((name, item) for name, item in own if isinstance(item, _INDIRECT))
    kind = type(module)
    if not _is_torch(kind.__module__):
        yield "", getattr(kind, "forward", None)


def _of_function(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the closure, default values, attributes and globals of a function."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable was deleted or is not assigned yet
            continue
    yield from (("", item) for item in f.__defaults__ or ())
    yield from (f.__kwdefaults__ or {}).items()
    yield from (("", item) for item in vars(f).values())  # __wrapped__ is one of them
    if not _is_torch(f.__module__):
        for name, attribute in _global_names(f.__code__):
            item = f.__globals__.get(name)
            if isinstance(item, ModuleType) and attribute and not _is_torch(item.__name__):
                name, item = f"{name}.{attribute}", vars(item).get(attribute)
            yield name, item


def _of_object(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and slots of an object, and its `__call__`."""
    kind = type(node)
    if _is_torch(kind.__module__):
        return
    attributes = getattr(node, "__dict__", None)
    if isinstance(attributes, dict):
        yield from list(attributes.items())
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(base).get(name)
            if isinstance(member, MemberDescriptorType):
                try:
                    yield name, member.__get__(node, kind)
                except AttributeError:  # the slot is empty
                    continue
    call = getattr(kind, "__call__", None)  # noqa: B004
    if isinstance(call, FunctionType):  # for the globals that it names
        yield "", call


@lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[tuple[str, str | None], ...]:
    """Return the globals that a code object reads, each with the attribute read from it or None."""
    names: dict[tuple[str, str | None], None] = {}
    instructions = list(dis.get_instructions(code))
    for now, after in zip(instructions, [*instructions[1:], None], strict=True):
        if now.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            names[now.argval, after.argval if after is not None and reads else None] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a lambda or comprehension inside
            names.update(dict.fromkeys(_global_names(inner)))
    return tuple(names)


def _is_torch(package: str | None) -> bool:
    """Return whether a package is torch or this library, which refer to no modules of a program."""
    return package is not None and package.split(".")[0] in ("torch", "torchdeq")


def _joined(path: str, name: str) -> str:
    """Return a dotted path; either part may be empty."""
    return f"{path}.{name}" if path and name else path or name


def _unused(path: str, taken: dict[str, Any]) -> str:
    """Return the path, with a number appended if it is taken."""
    if path not in taken:
        return path
    return next(p for n in range(2, len(taken) + 3) if (p := f"{path}#{n}") not in taken)


def scripted(f: Any) -> bool:
    """Return whether `f` is or reaches a module or function scripted or traced by `torch.jit`."""
    kinds = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(isinstance(item, kinds) for item in _search(f).values())


def reachable_parameters(f: Any) -> dict[str, Tensor]:
    """Return the current parameters of all modules that `f` reaches, by dotted names.

    A name starts with the path of its module from `f`, e.g. the variable of a closure. A tensor
    that `functional_call` has put in the place of a parameter counts as a parameter. A tensor that
    several modules use comes once, under its first name.
    """
    parameters: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in reachable_modules(f).items():
        for name, t in module._parameters.items():
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                parameters[_joined(path, name)] = t
    return parameters
