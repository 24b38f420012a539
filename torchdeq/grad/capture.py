"""What `f` depends on, found by watching it; and `f` with other tensors in their place.

Exact higher derivatives, function transforms and reversible iterations call `f` again in the
backward pass, with everything it depends on as an explicit input. A `Capture` is the record of one
call: which differentiable tensors it used, in which state modules and random generators were. It
never changes; `Capture.replay` repeats the call with substitutes.

Control flow may depend on the state, so a record is valid at the state where it was taken. That is
the solved state, at which every later call is made. A solve inside a function transform must know
the inputs before it begins: `LiveFn` watches all of its calls, and raises `LateInputs` when one of
them uses a tensor that was not seen before; the solve is then made again with that tensor.

All of this works operation by operation, so a compiled `f` runs uncompiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from threading import local
from types import CellType, FunctionType
from typing import Any, Self

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from torchdeq import _torch
from torchdeq.modules import ModuleState, reachable_parameters, scripted
from torchdeq.packing import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.tracing import eagerly

Found = dict[int, Tensor]  # tensors by identity, kept alive so that no identity is given twice


@dataclass(frozen=True)
class Capture:
    """One call of `f` and everything that it depended on.

    Args:
        f: the packed map.
        found: the differentiable tensors that `f` may use and did not make.
        used: identities of those that this call did use; a repeated call uses them again.
        modules: the modules that `f` reaches, as the call left them.
        randomness: the state of the random generators before the call, if it drew numbers.
    """

    f: PackedFn
    found: Found
    used: frozenset[int]
    modules: ModuleState
    randomness: Randomness | None

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors as autograd should see them: inside another replay, its substitutes."""
        return [_resolved(t) for t in self.found.values()]

    def replay(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        """Return `z -> f(z)`, the captured call with the tensors `c` as its inputs."""
        substitutes = dict(zip(self.found, c, strict=True))
        f = _substituted(self.f, substitutes)

        def call(z: Tensor) -> Tensor:
            substitute = _Substitute(substitutes)
            with self.repeated(substitutes), substitute:
                fz = f(z)
            if substitute.hidden is not None:
                raise HiddenInput(substitute.hidden)
            if not self.used <= substitute.met:
                raise RuntimeError(
                    "f does not use the tensors of the forward pass any more when it is called "
                    "again in the backward pass: one that it closes over was replaced; pass it to "
                    "f through args, or use implicit differentiation without higher_order"
                )
            _raise_for_hidden_inputs(fz, (z, *c, *substitute.leaves))
            return fz

        return call

    @contextmanager
    def repeated(self, substitutes: Found | None = None) -> Iterator[None]:
        """Enter a block that sees modules and random numbers as the captured call saw them.

        Args:
            substitutes: tensors that modules have in the place of their own.
        """
        drawn = nullcontext() if self.randomness is None else self.randomness.replayed()
        with self.modules.restored("none", replaced=substitutes), drawn, eagerly():
            yield


def capture(f: PackedFn, z: Tensor) -> tuple[Tensor, Capture]:
    """Return `f(z)`, computed without a graph, and the record of this call."""
    fz, found, drawn = observe(f, z)
    # The modules after the call: with the masks that it has drawn.
    return fz, Capture(f, found, frozenset(found), ModuleState(f.f), drawn)


def observe(f: PackedFn, z: Tensor) -> tuple[Tensor, Found, Randomness | None]:
    """Return `f(z)` without a graph, the inputs of this call, and the random numbers it drew."""
    refuse_scripted(f)
    before = Randomness(z.device)
    fz, watch = _watched(f, z)
    drawn = before if before.used else None
    found = watch.found
    if watch.nested:  # tensors that f's own differentiation makes differ in every call
        with Capture(f, {}, frozenset(), ModuleState(f.f), drawn).repeated():
            found = watch.in_both(_watched(f, z)[1])
    return fz, found, drawn


def rehearse(f: PackedFn, z: Tensor) -> Found:
    """Return the inputs of a call that does not count: running statistics are left alone.

    Parameters of reachable modules and tensors in `args` belong to them whether or not this call
    uses them. Random numbers are spent: a mask that a module keeps from this call would otherwise
    be drawn again by the next one.
    """
    with ModuleState(f.f).restored("none"):
        found = observe(f, z)[1]
    beside = (*tree_leaves(f.args), *reachable_parameters(f.f).values())
    known = {id(t): t for t in beside if isinstance(t, Tensor) and _differentiable(t)}
    return known | found


def refuse_scripted(f: PackedFn) -> None:
    """Raise if `f` runs TorchScript, whose parameters cannot be replaced from outside."""
    if scripted(f.f):
        raise RuntimeError(
            "f reaches a ScriptModule, whose parameters cannot become explicit inputs, as "
            "higher_order=True, torch.func transforms and reversible iterations need them: use the "
            "module as it was before torch.jit.script, or first-order implicit differentiation"
        )


def _substituted(f: PackedFn, substitutes: Found) -> PackedFn:
    """Return `f` with substitutes among its arguments and in the cells of its closure.

    The mode below sees the operands of operations alone. A tensor that `f` hands to a function
    transform, to a custom `autograd.Function` or to a control-flow operator has to be in place
    before.
    """

    def swap(t: Any) -> Any:
        return substitutes.get(id(t), t)

    copied = copy(f)
    copied.args = tree_map(swap, f.args)
    cells = getattr(f.f, "__closure__", None)
    if isinstance(f.f, FunctionType) and cells and any(_content(c) in substitutes for c in cells):
        closure = tuple(CellType(swap(c.cell_contents)) if _content(c) else c for c in cells)
        copied.f = FunctionType(
            f.f.__code__, f.f.__globals__, f.f.__name__, f.f.__defaults__, closure
        )
        copied.f.__kwdefaults__ = f.f.__kwdefaults__
    return copied


def _content(cell: CellType) -> int | None:
    """Return the identity of a tensor in a cell; None for anything else."""
    try:
        return id(cell.cell_contents) if isinstance(cell.cell_contents, Tensor) else None
    except ValueError:  # the variable is not assigned
        return None


def _raise_for_hidden_inputs(fz: Tensor, known: tuple[Tensor, ...]) -> None:
    """Raise if the graph of a replayed call reaches a leaf by another way than its inputs."""
    if not fz.requires_grad or _torch.is_wrapped(fz):
        return
    leaves = {id(t) for t in known if t.is_leaf}
    seen = {t.grad_fn for t in known if t.grad_fn is not None}
    with torch.enable_grad():  # a saved leaf may come back as another object with the same node
        same = [t.view_as(t).grad_fn for t in known if t.is_leaf and t.requires_grad]
    nodes = [node.next_functions[0][0] for node in same if node is not None]
    seen |= {node for node in nodes if node is not None}
    ahead = [fz.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise HiddenInput(leaf)
        ahead += [parent for parent, _ in node.next_functions]


class HiddenInput(RuntimeError):
    """An input of `f` is used where no mode sees it."""

    def __init__(self, t: Tensor) -> None:
        super().__init__(
            f"f uses a tensor of shape {tuple(t.shape)} where it cannot be seen (in a custom "
            "autograd.Function, a transform or a control-flow operator), so its gradient would be "
            "lost: pass it to f through args, or hand over t.view_as(t) there"
        )


class LateInputs(Exception):
    """A call used tensors that were not among the known inputs."""

    def __init__(self, found: Found) -> None:
        super().__init__("f used tensors that its earlier calls did not use")
        self.found = found


class LiveFn:
    """`f` during a solve inside a transform: substitutes its inputs, looks out for others.

    The solver sees plain tensors. A tensor of the transform among the operands of `f`, or one with
    a tangent, is an input that was overlooked.

    Args:
        f: the packed map.
        found: the inputs known so far.
        c: what stands in their place.
    """

    def __init__(self, f: PackedFn, found: Found, c: Iterable[Tensor]) -> None:
        self._substitutes = dict(zip(found, c, strict=True))
        self._f = _substituted(f, self._substitutes)
        self._modules = ModuleState(f.f)
        self.used: frozenset[int] = frozenset()  # of the latest call

    def __call__(self, z: Tensor) -> Tensor:
        before = Randomness(z.device)
        lookout = _Lookout(self._substitutes, z)
        modules = self._modules.exchanged(self._substitutes)
        with modules, eagerly(), lookout:
            fz = self._f(z)
        if lookout.unknown:
            self._raise_if_met_again(lookout.unknown, z, before)
        self.used = frozenset(lookout.met)
        return fz

    def _raise_if_met_again(self, unknown: Found, z: Tensor, before: Randomness) -> None:
        """Tell inputs from tensors that `f` itself makes: these differ in every call."""
        again = _Lookout(self._substitutes, z)
        modules = ModuleState(self._f.f).restored("none", replaced=self._substitutes)
        with modules, before.replayed(), eagerly(), again:
            self._f(z)
        late = {key: t for key, t in unknown.items() if key in again.unknown}
        if late:
            raise LateInputs(late)


def _watched(f: PackedFn, z: Tensor) -> tuple[Tensor, _Watch]:
    watch = _Watch(z)
    with torch.no_grad(), _torch.forward_mode(False), eagerly(), watch:
        return f(z), watch


def _differentiable(t: Tensor) -> bool:
    return _has_derivatives(t) and (t.requires_grad or _transformed(t))


def _has_derivatives(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _transformed(t: Tensor) -> bool:
    """Return whether a tensor belongs to a function transform or has a tangent."""
    if _torch.is_wrapped(t) or not _torch.dual_level_active():
        return _torch.is_wrapped(t)
    if _torch.function_transforms_active():
        return True  # where f transforms on its own, tangents of the level outside are hidden
    with _torch.forward_mode(True):
        return forward_ad.unpack_dual(t).tangent is not None


class _Watch(TorchFunctionMode):
    """Collects the differentiable tensors that a call uses and did not make."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.found: Found = {}
        self.nested = False  # whether f differentiates, or transforms, on its own
        self._made = {id(z): z}
        self._level = _torch.current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.nested |= torch.is_grad_enabled() or _torch.current_level() > self._level
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t) not in self._made:
                self._look_at(t)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(t) not in self.found:
                self._made[id(t)] = t
        return out

    def _look_at(self, t: Tensor) -> None:
        if _differentiable(t):
            self.found.setdefault(id(t), t)
        if self.nested:  # a tensor that f hands to a transform of its own comes wrapped
            while _torch.level_of(t) > self._level:
                t = _torch.unwrapped(t)
                if id(t) not in self._made and _differentiable(t):
                    self.found.setdefault(id(t), t)

    def in_both(self, other: _Watch) -> Found:
        """Return what both calls used: tensors made inside `f` differ in every call."""
        return {key: t for key, t in self.found.items() if key in other.found}


_replays = local()  # .active: the substitutions at work in this thread, outermost first


def _resolved(t: Tensor) -> Tensor:
    for substitutes in reversed(getattr(_replays, "active", [])):
        t = substitutes.get(id(t), t)
    return t


class _Substitute(TorchFunctionMode):
    """Puts other tensors where the captured call had its own."""

    def __init__(self, substitutes: Found) -> None:
        super().__init__()
        self._substitutes = substitutes
        self._places = {id(new): old for old, new in substitutes.items()}
        self.met: set[int] = set()
        self.hidden: Tensor | None = None  # an original that a transform inside f has wrapped
        self.leaves: list[Tensor] = []  # that f has made to differentiate on its own
        self._plain = not _torch.function_transforms_active()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        _replays.active = [*getattr(_replays, "active", []), self._substitutes]
        return self

    def __exit__(self, *error: object) -> None:
        _replays.active = _replays.active[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*self._swapped(args), **(self._swapped(kwargs) if kwargs else {}))
        if isinstance(out, Tensor) and out.is_leaf and out.requires_grad:
            self.leaves.append(out)
        elif out is None and args and isinstance(args[0], Tensor):  # `t.requires_grad = True`
            self.leaves.append(args[0])
        return out

    def _swapped(self, operands: Any) -> Any:
        return tree_map(self._swap, operands)

    def _swap(self, t: Any) -> Any:
        new = self._substitutes.get(id(t))
        if new is None:
            self._note(t)
            return t
        self.met.add(id(t))
        return new

    def _note(self, t: Any) -> None:
        """Take down which substitute is used, be it wrapped by a transform inside `f`."""
        while isinstance(t, Tensor):
            if id(t) in self._places:
                self.met.add(self._places[id(t)])
                return
            if not _torch.is_wrapped(t):
                return
            t = _torch.unwrapped(t)
            if self._plain and id(t) in self._substitutes and id(t) not in self._places:
                self.hidden = t
                return


class _Lookout(_Substitute):
    """Substitutes, and collects tensors of a transform that it does not know."""

    def __init__(self, substitutes: Found, z: Tensor) -> None:
        super().__init__(substitutes)
        self.unknown: Found = {}
        self._made = {id(t): t for t in (z, *substitutes.values())}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._made[id(t)] = t
        return out

    def _swap(self, t: Any) -> Any:
        new = super()._swap(t)
        if new is t and isinstance(t, Tensor) and _has_derivatives(t) and self._strange(t):
            self.unknown[id(t)] = t
        return new

    def _strange(self, t: Tensor) -> bool:
        """Return whether a tensor of a transform came from outside, as far as can be told."""
        if id(t) in self._made or not _transformed(t):
            return False
        inner = t
        while _torch.is_wrapped(inner):  # f's own transform wraps what f has made
            inner = _torch.unwrapped(inner)
            if id(inner) in self._made:
                self._made[id(t)] = t
                return False
        return True
