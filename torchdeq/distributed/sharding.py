"""Sharded parameters inside `f`: gathered once per solve instead of once per evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from torchdeq._torch import (
    UnitSettings,
    reduce_unit_gradients,
    sharding_unit_type,
    unit_in_forward,
    unit_is_sharded,
)
from torchdeq.reach import reachable_modules

#: When a block ends: scatter the units that it gathered, as their setting for the forward pass
#: says, or in no case.
Scatter = Literal["always", "by_setting", "never"]


def units_inside(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the units of `fully_shard` with parameters of their own among modules.

    A unit in whose forward pass the program is, such as the layer that contains the solve, is
    gathered until that pass ends and does not count.
    """
    kind = sharding_unit_type()
    if kind is None:
        return ()
    units = (m for m in modules if isinstance(m, kind) and unit_is_sharded(m))
    return tuple(unit for unit in units if not unit_in_forward(unit))


@contextmanager
def hold(f: Any) -> Iterator[None]:
    """Keep the parameters of `fully_shard` units gathered for a block.

    The units are gathered at the beginning of the block. Forward and backward passes in the block
    find their parameters there. At the end of the block, also after an exception, the units get
    their own settings back, and those that the block has gathered are scattered again.

    Every solve holds the units inside its `f` in this way by itself. Use `hold` around several
    solves, or around other code that evaluates a unit a different number of times in each process.

    Args:
        f: a module, or a function, whose closure, owner and globals are searched for units.
    """
    units = units_inside(reachable_modules(f).values())
    with gathered(units, "always", at_once=True):
        yield


def reduce_gradients(
    units: tuple[Any, ...], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Give the gradients of gathered parameters to their units, which sum them over processes.

    A unit does this by itself after a backward pass through its calls, but not for gradients that
    come from elsewhere.

    Args:
        units: units that are gathered.
        inputs: tensors, among them parameters of the units.
        grads: their gradients.

    Returns:
        The gradients of the other tensors, and None in the place of those of the parameters.
    """
    owned = {id(p) for unit in units for p in unit.parameters()}
    rest = list(grads)
    for i, (t, grad) in enumerate(zip(inputs, grads, strict=True)):
        if id(t) in owned and grad is not None:
            t.grad = grad if t.grad is None else t.grad + grad
            rest[i] = None
    for unit in units:
        reduce_unit_gradients(unit)
    return rest


@contextmanager
def gathered(units: tuple[Any, ...], scatter: Scatter, at_once: bool = False) -> Iterator[None]:
    """Return a block in which units stay gathered.

    Args:
        units: the units.
        scatter: which units to scatter when the block ends.
        at_once: gather all units at the beginning, not each at its first use.
    """
    with ExitStack() as stack:
        for unit in units:
            stack.push(partial(_release, unit, UnitSettings(unit), scatter))
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            # By default a unit prefetches the one that was called before it. The recorded calls
            # differ between processes, and with them the order of all-gathers.
            unit.set_modules_to_backward_prefetch([unit])
            if at_once:
                unit.unshard()
        yield


def _release(
    unit: Any,
    settings: UnitSettings,
    scatter: Scatter,
    error: type[BaseException] | None,
    *details: Any,
) -> None:
    """Restore the settings of a unit, and scatter the unit if the block has gathered it.

    After an exception the unit may be inside its forward pass. Left there, it would look like one
    around all later solves, which would not hold it.
    """
    settings.restore()
    if error is not None and scatter != "never":
        settings.leave_call()
    if settings.gathered or scatter == "never":
        return
    if scatter == "always" or settings.reshards_after_forward:
        unit.reshard()
