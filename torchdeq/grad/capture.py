"""Records of calls of `f` that can be repeated with other tensors as inputs.

Exact higher derivatives, function transforms and reversible iterations call `f` again in the
backward pass, with everything it depends on as an explicit input. A `Capture` is the record of one
call: the differentiable tensors that it used, and the state of modules and random generators. It
never changes; `Capture.replay` repeats the call with substitutes.

Control flow may depend on the state, so a record is valid only at the state of its call. That is
the solved state, at which every later call is made. A solve inside a function transform needs the
inputs before it begins: `TransformedFn` watches all calls of the solve, and raises `LateInputs`
when a call uses a tensor that no earlier call has used; the caller then solves again with that
tensor as an input.

Both modes, `Watch` and `Substitution`, see one operation at a time, so a compiled `f` runs
uncompiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq._torch import tree_leaves
from torchdeq.grad.substitution import (
    HiddenInput,
    InputSearch,
    Substitution,
    raise_for_hidden_inputs,
    resolved,
    substituted,
)
from torchdeq.grad.watching import Inputs, Watch, is_differentiable
from torchdeq.modules import ModuleState
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.reach import reachable_parameters, scripted
from torchdeq.tracing import force_eager


@dataclass(frozen=True)
class Capture:
    """The record of one call of `f` and of everything that the call depended on.

    Args:
        f: the packed map.
        tensors: the differentiable tensors that `f` may use and does not compute.
        used: ids of the tensors that this call used; a repeated call must use them again.
        modules: the state of the modules that `f` reaches, after the call.
        randomness: the random generators before the call, if the call drew random numbers.
    """

    f: PackedFn
    tensors: Inputs
    used: frozenset[int]
    modules: ModuleState
    randomness: Randomness | None

    @property
    def inputs(self) -> list[Tensor]:
        """Return the tensors as autograd sees them: inside another replay, their substitutes."""
        return [resolved(t) for t in self.tensors.values()]

    def replay(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map `z -> f(z)` of the captured call, with the tensors `c` as inputs."""
        substitutes = dict(zip(self.tensors, c, strict=True))
        f = substituted(self.f, substitutes)
        # Other threads see exchanged tensors, so first try without; but inside a transform, no
        # graph shows whether f used all substitutes.
        exchanges = _torch.function_transforms_active()

        def call(z: Tensor) -> Tensor:
            nonlocal exchanges
            if not exchanges:
                try:
                    return self._call(f, z, substitutes, exchange=False)
                except (HiddenInput, OtherTensors):
                    exchanges = True
            return self._call(f, z, substitutes, exchange=True)

        return call

    def _call(self, f: PackedFn, z: Tensor, substitutes: Inputs, exchange: bool) -> Tensor:
        """Return `f(z)` with substitutes as inputs; raise if `f` does not use all of them.

        Args:
            f: the map with substitutes among its arguments.
            z: the state at which to evaluate `f`.
            substitutes: the new tensors, by the ids of those that they replace.
            exchange: put substitutes into modules, too, for an `f` that passes parameters to a
                custom `autograd.Function`, to a transform or to a control-flow operator.
        """
        substitution = Substitution(substitutes)
        with self.restored(substitutes if exchange else None), substitution:
            fz = f(z)
        if substitution.hidden is not None:
            raise HiddenInput(substitution.hidden)
        if not self.used <= substitution.used:
            raise OtherTensors
        raise_for_hidden_inputs(fz, (z, *substitutes.values(), *substitution.leaves))
        return fz

    @contextmanager
    def restored(self, substitutes: Inputs | None = None) -> Iterator[None]:
        """Restore the modules and the random numbers of the captured call for a block.

        Args:
            substitutes: tensors to put into the modules, by the ids of those that they replace.
        """
        random = nullcontext() if self.randomness is None else self.randomness.replayed()
        with self.modules.restored("none", replaced=substitutes), random, force_eager():
            yield


class OtherTensors(RuntimeError):
    """The error for a repeated call of `f` that does not use the inputs of the first call."""

    def __init__(self) -> None:
        super().__init__(
            "f does not use the same tensors in the backward pass as in the forward pass: a tensor "
            "that it closes over was replaced; pass it to f through args, or use implicit "
            "differentiation without higher_order"
        )


def capture(f: PackedFn, z: Tensor) -> tuple[Tensor, Capture]:
    """Return `f(z)`, computed without a graph, and the record of this call."""
    fz, inputs, randomness = observe(f, z)
    # The modules after the call: they keep the masks that the call has drawn.
    kept = f.with_own_closure()
    return fz, Capture(kept, inputs, frozenset(inputs), ModuleState(f.f), randomness)


def observe(f: PackedFn, z: Tensor) -> tuple[Tensor, Inputs, Randomness | None]:
    """Return `f(z)` without a graph, the inputs of this call, and its random state if it drew."""
    refuse_scripted(f)
    before = Randomness(z.device)
    fz, watch = _watch_call(f, z)
    randomness = before if before.advanced else None
    inputs = watch.inputs
    if watch.nested:  # the tensors of a differentiation inside f are new in every call
        with Capture(f, {}, frozenset(), ModuleState(f.f), randomness).restored():
            inputs = watch.common_inputs(_watch_call(f, z)[1])
    return fz, inputs, randomness


def rehearse(f: PackedFn, z: Tensor) -> Inputs:
    """Return the inputs of a trial call that does not change running statistics.

    The inputs include the parameters of reachable modules and the tensors in `args`, whether or not
    this call uses them. The random generators advance: otherwise the next call would draw again a
    mask that a module keeps from this call.
    """
    with ModuleState(f.f).restored("none"):
        inputs = observe(f, z)[1]
    others = (*tree_leaves(f.args), *reachable_parameters(f.f).values())
    return {id(t): t for t in others if isinstance(t, Tensor) and is_differentiable(t)} | inputs


def refuse_scripted(f: PackedFn) -> None:
    """Raise if `f` runs TorchScript, whose parameters cannot be replaced from outside."""
    if scripted(f.f):
        raise RuntimeError(
            "f reaches a ScriptModule, whose parameters cannot become explicit inputs, as "
            "higher_order=True, torch.func transforms and reversible iterations need them: use the "
            "module as it was before torch.jit.script, or first-order implicit differentiation"
        )


class LateInputs(Exception):
    """The error for a call of `f` that used inputs which no earlier call had used."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__("f used tensors that its earlier calls did not use")
        self.inputs = inputs


class TransformedFn:
    """`f` during a solve inside a function transform, with substitutes for its inputs.

    The solver computes with plain tensors. So an operand that belongs to the transform, or has a
    tangent, is an input that no earlier call has used; such a call raises `LateInputs`.

    Args:
        f: the packed map.
        inputs: the inputs of all calls so far.
        c: the tensors that replace them.
    """

    def __init__(self, f: PackedFn, inputs: Inputs, c: Iterable[Tensor]) -> None:
        self._substitutes = dict(zip(inputs, c, strict=True))
        self._f = substituted(f, self._substitutes)
        self._modules = ModuleState(f.f)
        self.used: frozenset[int] = frozenset()  # ids of the inputs that the latest call used

    def __call__(self, z: Tensor) -> Tensor:
        before = Randomness(z.device)
        search = InputSearch(self._substitutes, z)
        modules = self._modules.exchanged(self._substitutes)
        with modules, force_eager(), search:
            fz = self._f(z)
        if search.new_inputs:
            self._raise_if_used_again(search.new_inputs, z, before)
        self.used = frozenset(search.used)
        return fz

    def _raise_if_used_again(self, new_inputs: Inputs, z: Tensor, before: Randomness) -> None:
        """Raise `LateInputs` for tensors that a second call uses too.

        Tensors that `f` computes itself differ between calls, so they do not count.
        """
        second = InputSearch(self._substitutes, z)
        modules = ModuleState(self._f.f).restored("none", replaced=self._substitutes)
        with modules, before.replayed(), force_eager(), second:
            self._f(z)
        late = {key: t for key, t in new_inputs.items() if key in second.new_inputs}
        if late:
            raise LateInputs(late)


def _watch_call(f: PackedFn, z: Tensor) -> tuple[Tensor, Watch]:
    """Return `f(z)` without a graph, and the mode that watched the call."""
    watch = Watch(z)
    with torch.no_grad(), _torch.forward_mode(False), force_eager(), watch:
        return f(z), watch
