"""Records of calls of `f`, which can be repeated with other tensors as its inputs.

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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchdeq import _torch
from torchdeq.grad.substitution import (
    HiddenInput,
    InputSearch,
    Substitution,
    raise_for_hidden_inputs,
    resolved,
    substituted,
)
from torchdeq.grad.watching import Inputs, Watch, differentiable
from torchdeq.modules import ModuleState, reachable_parameters, scripted
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.tracing import eagerly


@dataclass(frozen=True)
class Capture:
    """One call of `f` and everything that it depended on.

    Args:
        f: the packed map.
        tensors: the differentiable tensors that `f` may use and did not make.
        used: identities of those that this call did use; a repeated call uses them again.
        modules: the modules that `f` reaches, as the call left them.
        randomness: the state of the random generators before the call, if it drew numbers.
    """

    f: PackedFn
    tensors: Inputs
    used: frozenset[int]
    modules: ModuleState
    randomness: Randomness | None

    @property
    def inputs(self) -> list[Tensor]:
        """Return the tensors as autograd sees them: inside another replay, its substitutes."""
        return [resolved(t) for t in self.tensors.values()]

    def replay(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        """Return `z -> f(z)`, the captured call with the tensors `c` as its inputs."""
        substitutes = dict(zip(self.tensors, c, strict=True))
        f = substituted(self.f, substitutes)

        def call(z: Tensor) -> Tensor:
            substitution = Substitution(substitutes)
            with self.repeated(substitutes), substitution:
                fz = f(z)
            if substitution.hidden is not None:
                raise HiddenInput(substitution.hidden)
            if not self.used <= substitution.used:
                raise RuntimeError(
                    "f does not use the tensors of the forward pass any more when it is called "
                    "again in the backward pass: one that it closes over was replaced; pass it to "
                    "f through args, or use implicit differentiation without higher_order"
                )
            raise_for_hidden_inputs(fz, (z, *c, *substitution.leaves))
            return fz

        return call

    @contextmanager
    def repeated(self, substitutes: Inputs | None = None) -> Iterator[None]:
        """Enter a block that sees modules and random numbers as the captured call saw them.

        Args:
            substitutes: tensors that modules have in the place of their own.
        """
        random = nullcontext() if self.randomness is None else self.randomness.replayed()
        with self.modules.restored("none", replaced=substitutes), random, eagerly():
            yield


def capture(f: PackedFn, z: Tensor) -> tuple[Tensor, Capture]:
    """Return `f(z)`, computed without a graph, and the record of this call."""
    fz, inputs, randomness = observe(f, z)
    # The modules after the call: with the masks that it has drawn.
    return fz, Capture(f, inputs, frozenset(inputs), ModuleState(f.f), randomness)


def observe(f: PackedFn, z: Tensor) -> tuple[Tensor, Inputs, Randomness | None]:
    """Return `f(z)` without a graph, the inputs of this call, and its randomness if any."""
    refuse_scripted(f)
    before = Randomness(z.device)
    fz, watch = _watched(f, z)
    randomness = before if before.used else None
    inputs = watch.inputs
    if watch.nested:  # tensors that f's own differentiation makes differ in every call
        with Capture(f, {}, frozenset(), ModuleState(f.f), randomness).repeated():
            inputs = watch.in_both(_watched(f, z)[1])
    return fz, inputs, randomness


def rehearse(f: PackedFn, z: Tensor) -> Inputs:
    """Return the inputs of a trial call, which leaves running statistics alone.

    Parameters of reachable modules and tensors in `args` belong to them whether or not this call
    uses them. Random numbers are spent: a mask that a module keeps from this call would otherwise
    be drawn again by the next one.
    """
    with ModuleState(f.f).restored("none"):
        inputs = observe(f, z)[1]
    others = (*tree_leaves(f.args), *reachable_parameters(f.f).values())
    return {id(t): t for t in others if isinstance(t, Tensor) and differentiable(t)} | inputs


def refuse_scripted(f: PackedFn) -> None:
    """Raise if `f` runs TorchScript, whose parameters cannot be replaced from outside."""
    if scripted(f.f):
        raise RuntimeError(
            "f reaches a ScriptModule, whose parameters cannot become explicit inputs, as "
            "higher_order=True, torch.func transforms and reversible iterations need them: use the "
            "module as it was before torch.jit.script, or first-order implicit differentiation"
        )


class LateInputs(Exception):
    """A call of `f` used inputs that no earlier call had used."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__("f used tensors that its earlier calls did not use")
        self.inputs = inputs


class LiveFn:
    """`f` during a solve inside a transform: replaces its inputs and searches for further ones.

    The solver sees plain tensors. A tensor of the transform among the operands of `f`, or one with
    a tangent, is an input that no earlier call has used.

    Args:
        f: the packed map.
        inputs: the inputs of all calls so far.
        c: the tensors that replace them.
    """

    def __init__(self, f: PackedFn, inputs: Inputs, c: Iterable[Tensor]) -> None:
        self._substitutes = dict(zip(inputs, c, strict=True))
        self._f = substituted(f, self._substitutes)
        self._modules = ModuleState(f.f)
        self.used: frozenset[int] = frozenset()  # of the latest call

    def __call__(self, z: Tensor) -> Tensor:
        before = Randomness(z.device)
        search = InputSearch(self._substitutes, z)
        modules = self._modules.exchanged(self._substitutes)
        with modules, eagerly(), search:
            fz = self._f(z)
        if search.unknown:
            self._raise_if_used_again(search.unknown, z, before)
        self.used = frozenset(search.used)
        return fz

    def _raise_if_used_again(self, unknown: Inputs, z: Tensor, before: Randomness) -> None:
        """Raise `LateInputs` for inputs; tensors that `f` itself makes differ in every call."""
        again = InputSearch(self._substitutes, z)
        modules = ModuleState(self._f.f).restored("none", replaced=self._substitutes)
        with modules, before.replayed(), eagerly(), again:
            self._f(z)
        late = {key: t for key, t in unknown.items() if key in again.unknown}
        if late:
            raise LateInputs(late)


def _watched(f: PackedFn, z: Tensor) -> tuple[Tensor, Watch]:
    watch = Watch(z)
    with torch.no_grad(), _torch.forward_mode(False), eagerly(), watch:
        return f(z), watch
