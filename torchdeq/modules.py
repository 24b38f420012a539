"""The modules that a callable reaches, and their tensors as they are now.

A call made in the backward pass must see the modules of the forward pass. By then
``functional_call`` has put other parameters back, the next forward pass may have reset norms and
masks, and running statistics have been updated once already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

_DEPTH = 4  # how deep closures, bound methods and partials are searched


_INNER = set(vars(nn.Module())) - {"training"}  # dicts that every module keeps for itself


class _Slot(NamedTuple):
    """A place in a module and what a block should see there."""

    held: dict[str, Any]
    name: str
    value: Any

    @property
    def found(self) -> _Slot:
        """The same place with what is there now."""
        return self._replace(value=self.held.get(self.name, _NOTHING))

    def fill(self) -> None:
        if self.value is _NOTHING:
            self.held.pop(self.name, None)
        else:
            self.held[self.name] = self.value


_NOTHING = object()


class ModuleState:
    """A snapshot of every module that ``f`` reaches: parameters, buffers, mode, own tensors.

    Tensors that a module keeps as plain attributes count too, alone or in a dict: normalised
    weights, dropout masks, an input that ``forward`` has left there.
    """

    def __init__(self, f: Any) -> None:
        self._parameters: list[_Slot] = []
        self._others: list[_Slot] = []
        self._statistics: list[_Slot] = []
        for module in _reachable(f, _DEPTH, set()):
            for part in module.modules():
                own = vars(part)
                self._parameters += _slots(part._parameters)
                self._others += _slots(part._buffers)
                self._others += [_Slot(own, k, v) for k, v in own.items() if _belongs(k, v)]
                if getattr(part, "track_running_stats", False) and part.training:
                    self._statistics += _slots(part._buffers)

    @contextmanager
    def restored(
        self, statistics: Literal["copied", "none"], detached: bool = False
    ) -> Iterator[None]:
        """A block that sees the snapshot.

        Args:
            statistics: what normalisation layers in training do with their running statistics, on
                which their values do not depend: update a copy, or have none. The last is what
                function transforms need, which cannot write into a tensor.
            detached: parameters require no gradient.
        """
        parameters = self._parameters
        if detached:
            parameters = [s._replace(value=s.value.detach()) for s in parameters]
        wanted = [s for s in (*parameters, *self._others) if s.found.value is not s.value]
        copied = statistics == "copied"
        wanted += [s._replace(value=s.value.clone() if copied else None) for s in self._statistics]
        found = [slot.found for slot in wanted]
        try:
            for slot in wanted:
                slot.fill()
            yield
        finally:
            for slot in reversed(found):
                slot.fill()


def _slots(tensors: dict[str, Any]) -> list[_Slot]:
    return [_Slot(tensors, name, t) for name, t in tensors.items() if t is not None]


def _belongs(name: str, value: Any) -> bool:
    """Whether a plain attribute of a module is part of what it computes."""
    if isinstance(value, Tensor) or name == "training":
        return True
    return type(value) is dict and name not in _INNER


def mixes_samples(f: Any) -> bool:
    """Whether ``f`` reaches a layer that normalises over the batch as it is."""
    parts = (part for module in _reachable(f, _DEPTH, set()) for part in module.modules())
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm)
        and (part.training or part.running_mean is None)
        for part in parts
    )


def _reachable(f: Any, depth: int, seen: set[int]) -> list[nn.Module]:
    """Modules near a callable: itself, its owner, arguments of a partial, cells."""
    if id(f) in seen or depth < 0:
        return []
    seen.add(id(f))
    if isinstance(f, nn.Module):
        return [f]
    nearby = [getattr(f, "__self__", None), getattr(f, "func", None), *getattr(f, "args", ())]
    nearby += [getattr(f, "__wrapped__", None), *(getattr(f, "keywords", None) or {}).values()]
    nearby += [cell.cell_contents for cell in getattr(f, "__closure__", None) or () if _full(cell)]
    found = []
    for thing in nearby:
        for item in thing if isinstance(thing, (list, tuple)) else [thing]:
            if callable(item) and not isinstance(item, (Tensor, type)):
                found += _reachable(item, depth - 1, seen)
    return found


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable was deleted
        return False
