"""The modules that a callable uses: through closures, owners, arguments, containers, globals.

The search only looks; it calls nothing of the program's. It is bounded in depth and in the number
of things it looks at, since a callable may hold on to a whole training program.
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

_DEPTH = 6  # steps from the callable; the items of a container are no further than itself
_MOST = 5_000  # things looked at
_ITEMS = (list, tuple, set, frozenset, deque)
_CONTAINERS = (*_ITEMS, dict)
_BESIDE = (list, tuple, dict, FunctionType, MethodType, partial)  # hide modules from their owner
_INNER = set(vars(nn.Module()))  # containers that every module keeps for itself
_PLAIN = (Tensor, str, bytes, int, float, complex, type, ModuleType, type(None))  # lead nowhere


def reachable_modules(f: Any) -> dict[str, nn.Module]:
    """Return every module that `f` reaches, submodules too, by the path that leads to each.

    `f` is a module (modules that it keeps in plain lists, dicts or functions count too), a function
    (its closure, default values, attributes, and the globals that its code names), a method (its
    owner too), a partial, or any object (its attributes). Lists, tuples, sets and dicts are looked
    into. The path of `f` itself is `""`.
    """
    return {path: thing for path, thing in _search(f).items() if isinstance(thing, nn.Module)}


def _search(f: Any) -> dict[str, Any]:
    """Return the modules and scripted functions that `f` reaches, by their paths."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # the things too: an identity must not be given twice meanwhile
    ahead: deque[tuple[str, Any, int]] = deque([("", f, 0)])
    looked = 0
    while ahead and looked < _MOST:
        path, thing, depth = ahead.popleft()
        if id(thing) in seen:
            continue
        new = [("", thing)] if not isinstance(thing, nn.Module) else list(thing.named_modules())
        looked, depth = looked + 1, depth + (not isinstance(thing, _CONTAINERS))
        for inner, part in new:
            if id(part) in seen:
                continue
            seen[id(part)] = part
            here = _joined(path, inner)
            if isinstance(part, (nn.Module, torch.jit.ScriptFunction)):
                found[_unused(here, found)] = part
            if depth <= _DEPTH:
                for name, item in islice(_nearby(part), _MOST):
                    if not isinstance(item, _PLAIN):
                        ahead.append((_joined(here, name), item, depth))
    return found


def _nearby(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is one step away, with the name of the step; `""` for steps without one."""
    if isinstance(thing, nn.Module):
        yield from _of_module(thing)
    elif isinstance(thing, dict):
        yield from ((str(key), item) for key, item in list(thing.items()))
    elif isinstance(thing, _ITEMS):
        yield from ((str(i), item) for i, item in enumerate(list(thing)))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, MethodType):
        yield from (("", thing.__self__), ("", thing.__func__))
    elif isinstance(thing, (BuiltinMethodType, MethodWrapperType)):
        yield "", thing.__self__
    elif isinstance(thing, partial):
        yield from (("", thing.func), ("", thing.args), ("", thing.keywords))
    else:
        yield from _of_object(thing)


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module keeps beside its submodules, and its code for the globals it names."""
    for name, item in list(vars(module).items()):
        if isinstance(item, _BESIDE) and name not in _INNER:
            yield name, item
    kind = type(module)
    if not _is_torch(kind.__module__):
        yield "", getattr(kind, "forward", None)


def _of_function(f: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable was deleted, or is not assigned yet
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


def _of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    kind = type(thing)
    if _is_torch(kind.__module__):
        return
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(base).get(name)
            if isinstance(member, MemberDescriptorType):
                try:
                    yield name, member.__get__(thing, kind)
                except AttributeError:  # nothing was assigned
                    continue
    call = getattr(kind, "__call__", None)  # noqa: B004
    if isinstance(call, FunctionType):  # for the globals it names
        yield "", call


@lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[tuple[str, str | None], ...]:
    """Return the globals that a code object reads, each with the attribute read from it first."""
    names: dict[tuple[str, str | None], None] = {}
    steps = list(dis.get_instructions(code))
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            names[step.argval, after.argval if after is not None and reads else None] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a lambda or comprehension inside
            names.update(dict.fromkeys(_global_names(inner)))
    return tuple(names)


def _is_torch(package: str | None) -> bool:
    """Return whether a package belongs to torch or to this library: no program's modules in it."""
    return package is not None and package.split(".")[0] in ("torch", "torchdeq")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _unused(path: str, taken: dict[str, Any]) -> str:
    """Return the path, with a number if another thing has it."""
    if path not in taken:
        return path
    return next(p for n in range(2, len(taken) + 3) if (p := f"{path}#{n}") not in taken)


def scripted(f: Any) -> bool:
    """Return whether `f` is or reaches something that `torch.jit` made, by script or trace."""
    made = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(isinstance(thing, made) for thing in _search(f).values())


def reachable_parameters(f: Any) -> dict[str, Tensor]:
    """Return the parameters of all modules that `f` reaches, as they are now, by dotted names.

    A name starts with the path of its module from `f`, e.g. the variable of a closure. What
    `functional_call` has put in the place of a parameter counts as one. A tensor that several
    modules share comes once, under its first name.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in reachable_modules(f).items():
        for name, t in module._parameters.items():
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                found[_joined(path, name)] = t
    return found
