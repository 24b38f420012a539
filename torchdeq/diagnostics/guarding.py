"""Maps as the doctor calls them: within a time limit, without effects on the caller's objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from torchdeq._torch import function_transforms_active
from torchdeq.packing import Leaf, Packing
from torchdeq.pytree import State, map_tensors, tensors_of, walk
from torchdeq.randomness import Randomness
from torchdeq.reach import reachable_modules

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (Tensor, bool, int, float, str, type(None))  # attributes that a call may replace


class OutOfTime(RuntimeError):
    """The error of a map that is called after its time limit."""


class Clock:
    """The time that an examination may take.

    Args:
        seconds: in all.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._began = seconds, time.monotonic()

    @property
    def spent(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began

    def passed(self, share: float) -> bool:
        """Return whether a share of the time has passed."""
        return self.spent >= share * self.seconds

    def limited(self, f: Callable[..., Any], share: float) -> Callable[..., Any]:
        """Return `f` such that calls raise `OutOfTime` once a share of the time has passed.

        So do products with its transposed Jacobian, which pass the hooks of its outputs.
        """

        def check(_: object = None) -> None:
            if self.passed(share):
                raise OutOfTime(f"{self.spent:.1f} s of {self.seconds:.1f} s have passed")

        def call(*inputs: Any) -> Any:
            check()
            out = f(*inputs)
            for t in tensors_of(out):
                if t.grad_fn is not None and not function_transforms_active():
                    t.register_hook(check)
            return out

        return call


class Copying:
    """A map that gives `f` copies of the state, and notices what `f` writes to.

    Args:
        f: the map.
        packing: the layout of its state.
    """

    def __init__(self, f: Callable[..., Any], packing: Packing) -> None:
        self._f = f
        template = packing.template
        # The state comes as that many arguments; the others belong to the caller.
        self._inputs = len(template) if isinstance(template, (tuple, list)) else 1
        self._inputs = 1 if isinstance(template, Leaf) else self._inputs
        self._last: list[tuple[Tensor, Tensor]] = []  # outputs, with copies of their values
        self.wrote_input = self.wrote_output = False

    def __call__(self, *inputs: Any) -> State:
        state, rest = inputs[: self._inputs], inputs[self._inputs :]
        copies = tuple(map_tensors(z, Tensor.clone) for z in state)
        out = self._f(*copies, *rest)
        self.wrote_output |= any(not same(a, b) for a, b in self._last)
        pairs = zip(walk(state), walk(copies), strict=True)
        self.wrote_input |= any(not same(a, b) for (_, a), (_, b) in pairs)
        tensors = [t for _, t in walk(out) if isinstance(t, Tensor)]
        self._last = [(t, t.detach().clone()) for t in tensors]
        return map_tensors(out, Tensor.clone)


def frozen(f: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return `f` such that every call draws the same random numbers; generators do not advance."""
    randomness = Randomness(device)

    def call(*inputs: Any) -> Any:
        with randomness.replayed():
            return f(*inputs)

    return call


class _Snapshot(NamedTuple):
    """What a call may change in a module: buffers, with copies of their values, and attributes."""

    module: nn.Module
    buffers: dict[str, tuple[Tensor, Tensor]]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Snapshot:
        buffers = dict(module.named_buffers(recurse=False))
        scripted = isinstance(module, torch.jit.ScriptModule)
        attributes = {} if scripted else vars(module)
        return cls(
            module,
            {name: (t, t.detach().clone()) for name, t in buffers.items()},
            {name: value for name, value in attributes.items() if isinstance(value, _PLAIN)},
        )

    @torch.no_grad()
    def restore(self) -> None:
        for name, (t, value) in self.buffers.items():
            if not isinstance(self.module, torch.jit.ScriptModule):
                self.module._buffers[name] = t
            if not same(t, value):
                t.copy_(value)
        for name, value in self.attributes.items():
            vars(self.module)[name] = value


@contextmanager
def untouched(*objects: Any) -> Iterator[None]:
    """Return a block after which the modules that objects reach are as they were before.

    Calls of `f` may update running statistics, vectors of power iterations and counters. Buffers
    get their tensors and values back; attributes that are tensors or plain values, their objects.
    """
    snapshots = [_Snapshot.of(module) for module in reachable_modules(objects).values()]
    try:
        yield
    finally:
        for snapshot in snapshots:
            snapshot.restore()


def leaving_modules(measure: Callable[P, R]) -> Callable[P, R]:
    """Return a function that leaves the modules that its arguments reach as they were."""

    @wraps(measure)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with untouched(args, kwargs):
            return measure(*args, **kwargs)

    return call


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal values; NaN equals NaN."""
    a, b = a.detach(), b.detach()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
