"""What one call costs: `f`, `f` with a graph, and products with its Jacobian."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from torchdeq._torch import after_operations, tree_leaves
from torchdeq.checks import require_whole
from torchdeq.diagnostics.guarding import leaving_modules
from torchdeq.diagnostics.linearisation import Linearisation
from torchdeq.pytree import State


@dataclass(frozen=True)
class CallCost:
    """Seconds of one call each, medians; None if `f` cannot be differentiated that way.

    Args:
        f: without a graph.
        graph: with a graph.
        vjp: a product with the transposed Jacobian, on a graph that exists.
        jvp: a product with the Jacobian.
        saved_bytes: bytes that a call with a graph saves for its backward pass, with parameters.
    """

    f: float
    graph: float
    vjp: float | None
    jvp: float | None
    saved_bytes: int


@leaving_modules
def call_cost(
    f: Callable[..., Any], z: State, args: tuple[Any, ...] = (), *, repeats: int = 5
) -> CallCost:
    """Time a call of `f` at `z`, and products with its Jacobian.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z: a state.
        args: further arguments of `f`.
        repeats: calls of each kind, after one that is not timed.
    """
    require_whole("repeats", repeats)
    linear = Linearisation(f, z, args)
    h = linear.z.clone().requires_grad_()

    def with_graph() -> Tensor:
        with torch.enable_grad():
            return linear.f(h)

    def timed(call: Callable[[], object]) -> float | None:
        try:
            return _seconds(call, repeats, linear.z.device)
        except (NotImplementedError, RuntimeError):
            return None

    with torch.no_grad():
        plain = _seconds(lambda: linear.f(linear.z), repeats, linear.z.device)
    saved = saved_bytes(with_graph)
    graph = _seconds(with_graph, repeats, linear.z.device)
    v = torch.ones_like(linear.z)
    vjp, jvp = timed(lambda: linear.vjp(v)), timed(lambda: linear.jvp(v))
    return CallCost(plain, graph, vjp, jvp, saved)


def saved_bytes(call: Callable[[], object]) -> int:
    """Return the bytes that a call saves for a backward pass; each block of memory counts once."""
    blocks: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        blocks[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call()
        del out
    return sum(blocks.values())


class PeakMemory:
    """A block that measures the peak of the memory that torch allocates inside it.

    On an accelerator torch counts itself; elsewhere the block adds up the tensors that operations
    return while they live, which misses the scratch memory inside an operation. `peak` is in bytes,
    beyond what was allocated before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stack = device, ExitStack()
        self._live: dict[int, int] = {}
        self._now = self.peak = 0

    def __enter__(self) -> PeakMemory:
        module = self._module()
        if module is None:
            self._stack.enter_context(after_operations(self._observe))
        else:
            module.synchronize()
            module.reset_peak_memory_stats(self._device)
            self._before = module.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        module = self._module()
        if module is not None:
            module.synchronize()
            self.peak = module.max_memory_allocated(self._device) - self._before

    def _module(self) -> Any:
        """Return the module of torch that counts the memory of the device, or None."""
        if self._device.type == "cpu":
            return None
        module = torch.get_device_module(self._device)
        return module if hasattr(module, "max_memory_allocated") else None

    def _observe(self, outputs: Any) -> None:
        for t in tree_leaves(outputs):
            if isinstance(t, Tensor) and t.device == self._device:
                storage = t.untyped_storage()
                key = id(storage)
                if key not in self._live:
                    self._live[key] = storage.nbytes()
                    self._now += storage.nbytes()
                    finalize(storage, self._release, key)
        self.peak = max(self.peak, self._now)

    def _release(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of a call, after one that is not timed."""
    call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times)
