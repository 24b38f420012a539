"""A closure as a function of explicit inputs.

Exact higher derivatives need everything that ``f`` depends on as inputs of an autograd Function.
The tensors are found by watching one call; later calls see substitutes in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from torchdeq.packing import PackedFn

_DEPTH = 4  # how deep closures, bound methods and partials are searched for modules


def transforms_active() -> bool:
    """Whether a ``torch.func`` transform or a level of forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class ExplicitFn:
    """``F(z, *c)``: the packed map with the tensors it closes over as arguments."""

    def __init__(self, f: PackedFn, z: Tensor) -> None:
        self.f = f
        self._modules = _Modules(f.f)
        self._rng: Tensor | None = None
        self._again = False
        watch = _Watch(z)
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),  # this call does not count
            forward_ad._set_fwd_grad_enabled(False),
            self._modules.as_they_were(quiet=True),
            watch,
        ):
            f(z)
        self.inputs = list(watch.found.values())

    def make(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        """``z -> F(z, *c)``."""
        substitutes = {id(old): new for old, new in zip(self.inputs, c, strict=True)}

        def call(z: Tensor) -> Tensor:
            modules = self._modules.as_they_were(quiet=self._again)
            with modules, self._replay(), _Substitute(substitutes):
                return self.f(z)

        return call

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor:
        return self.make(*c)(z)

    def last_call(self, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """``f(z)``, which every later call only repeats."""
        before = torch.get_rng_state()
        fz = f(z)
        self.only_repeat(None if torch.equal(before, torch.get_rng_state()) else before)
        return fz

    def only_repeat(self, rng: Tensor | None) -> None:
        """From now on draw these random numbers, and leave running statistics as they are."""
        self._rng, self._again = rng, True

    @contextmanager
    def _replay(self) -> Iterator[None]:
        if self._rng is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._rng)
            yield


class _Watch(TorchFunctionMode):
    """Collects the differentiable tensors that a call uses and did not make."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made = {id(z): z}  # kept alive, so that no identity is given twice

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t) not in self._made and _differentiable(t):
                self.found.setdefault(id(t), t)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(t) not in self.found:
                self._made[id(t)] = t
        return out


def _differentiable(t: Tensor) -> bool:
    wrapped = _functorch.is_functorch_wrapped_tensor(t) or forward_ad._current_level >= 0
    return t.is_floating_point() and (t.requires_grad or wrapped)


class _Substitute(TorchFunctionMode):
    """Puts other tensors where the watched call had its own."""

    def __init__(self, substitutes: dict[int, Tensor]) -> None:
        super().__init__()
        self._substitutes = substitutes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def swap(t: Any) -> Any:
            return self._substitutes.get(id(t), t)

        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))


class _Modules:
    """The parameters and buffers of the modules that a callable reaches, as they are now.

    ``functional_call`` puts a module's own parameters back before the backward pass; a call made
    then must still see those of the forward pass.
    """

    def __init__(self, f: Any) -> None:
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._statistics: list[tuple[dict[str, Any], str]] = []
        for module in _find_modules(f, _DEPTH, set()):
            for part in module.modules():
                for slots in (part._parameters, part._buffers):
                    self._slots += [(slots, k, t) for k, t in slots.items() if t is not None]
                if getattr(part, "track_running_stats", False) and part.training:
                    self._statistics += [(part._buffers, k) for k in part._buffers]

    @contextmanager
    def as_they_were(self, quiet: bool) -> Iterator[None]:
        """A block that sees them.

        With ``quiet``, normalisation layers in training keep no running statistics; their values do
        not depend on them.
        """
        wanted = [(slots, k, t) for slots, k, t in self._slots if slots.get(k) is not t]
        if quiet:
            wanted += [(slots, k, None) for slots, k in self._statistics]  # type: ignore[misc]
        found = [(slots, k, slots.get(k)) for slots, k, _ in wanted]
        try:
            for slots, k, t in wanted:
                slots[k] = t
            yield
        finally:
            for slots, k, t in reversed(found):
                slots[k] = t


def _find_modules(f: Any, depth: int, seen: set[int]) -> list[nn.Module]:
    """Modules reachable from a callable: itself, its owner, arguments of a partial, cells."""
    if id(f) in seen or depth < 0:
        return []
    seen.add(id(f))
    if isinstance(f, nn.Module):
        return [f]
    nearby = [getattr(f, "__self__", None), getattr(f, "func", None), *getattr(f, "args", ())]
    nearby += (getattr(f, "keywords", None) or {}).values()
    nearby += [cell.cell_contents for cell in getattr(f, "__closure__", None) or () if _full(cell)]
    found = []
    for thing in nearby:
        for item in thing if isinstance(thing, (list, tuple)) else [thing]:
            if callable(item) and not isinstance(item, (Tensor, type)):
                found += _find_modules(item, depth - 1, seen)
    return found


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable was deleted
        return False
