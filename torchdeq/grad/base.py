"""The base class of backward passes: ways to turn a solved state into a differentiable one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from torchdeq.packed import PackedFn
from torchdeq.registry import Registry
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule


class NoGraph(RuntimeError):
    """The error for an `f` that returns a tensor without a graph."""

    def __init__(self) -> None:
        super().__init__(
            "f returned a tensor without a graph although its input requires grad: it runs under "
            "no_grad, or detaches; nothing could be differentiated"
        )


class Backward(ABC):
    """A method of differentiation. Subclasses are frozen dataclasses; fields are options."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the method with the options of a DEQ that are fields of its own."""
        names = [f.name for f in fields(cls) if f.name in options]  # type: ignore[arg-type]
        return cls(**{name: options[name] for name in names})

    @abstractmethod
    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        """Return differentiable states that start from a solved one; the last is the answer.

        Args:
            f: the map; its parameters and the tensors it closes over receive the gradient.
            z: the solved state, packed as (B, D).

        Returns:
            A list of states, each a list of the tensors of the state. Under `no_grad` the values
            are the same and there is no graph.
        """


class IteratingBackward(Backward):
    """A method of differentiation that runs an iteration of its own in the place of a solve."""

    @abstractmethod
    def run(self, f: PackedFn, z0: Tensor, stop: StopRule) -> tuple[list[list[Tensor]], SolverStat]:
        """Iterate from `z0`, packed as (B, D); return the differentiable states and statistics."""

    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        """Return the states after a single evaluation; use `run` for the whole iteration."""
        return self.run(f, z, StopRule(1))[0]


BACKWARDS: Registry[type[Backward]] = Registry("backward")


def register_backward(name: str, backward: type[Backward]) -> None:
    """Register a method of differentiation under a name, e.g. for the option `backward`."""
    bases: tuple[object, ...] = getattr(backward, "__mro__", ())
    if Backward not in bases or not hasattr(backward, "__dataclass_fields__"):
        raise TypeError(f"a backward is a dataclass derived from Backward, got {backward!r}")
    BACKWARDS.register(name, backward)


def with_gradient_of(estimate: list[Tensor], attached: list[Tensor]) -> list[Tensor]:
    """Return the values of `estimate` with the gradients of `attached`."""
    pairs = zip(estimate, attached, strict=True)
    return [_BorrowedGradient.apply(a, b) if b.requires_grad else a for a, b in pairs]  # type: ignore[no-untyped-call]


class _BorrowedGradient(torch.autograd.Function):
    """The identity of the first argument that sends its cotangent to the second.

    The value of the second argument, such as a NaN, never reaches the output.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(estimate: Tensor, attached: Tensor) -> Tensor:
        return estimate.clone()  # the caller may write into it

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g

    @staticmethod
    def jvp(ctx: Any, estimate: Tensor | None, attached: Tensor) -> Tensor:
        return attached.view_as(attached)


def with_zero_gradient_to(start: list[Tensor], z: list[Tensor]) -> list[Tensor]:
    """Return the state `z`, connected to the start by a gradient of zero.

    A fixed point does not depend on where its solver started, yet `torch.autograd.grad` raises for
    a start that is not in the graph.
    """
    start = [t for t in start if t.requires_grad]
    return [_ZeroGradient.apply(t, *start) for t in z] if start else z  # type: ignore[no-untyped-call]


class _ZeroGradient(torch.autograd.Function):
    """The identity of the first argument whose derivative by all others is zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, *start: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *(torch.zeros_like(t) for t in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, z: Tensor | None, *start: Tensor | None) -> Tensor | None:
        return None if z is None else z.view_as(z)
