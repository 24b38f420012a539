"""Checkpointing: compute activations again in the backward pass instead of storing them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torchdeq._torch import function_transforms_active
from torchdeq.closures import with_own_closure
from torchdeq.modules import ModuleState
from torchdeq.reach import scripted


def mem_gc(func: Callable[..., Any], in_args: tuple[Any, ...] | None = None) -> Any:
    """Return `func(*in_args)`; the backward pass computes its activations again.

    Gradients reach the arguments, the parameters of modules and every tensor in the closure of
    `func`. The second evaluation uses the random numbers, autocast state, module tensors and
    closure variables of the first, and does not update running statistics. Inside `torch.func`
    transforms, which cannot recompute, this is a plain call and stores the activations.

    Args:
        func: the function.
        in_args: its arguments.
    """
    if not isinstance(in_args, (tuple, list, type(None))):
        raise TypeError(
            f"in_args must be a tuple of arguments, as in mem_gc(f, (z,)): got "
            f"{type(in_args).__name__}"
        )
    args = () if in_args is None else tuple(in_args)
    if function_transforms_active():
        return func(*args)
    func = with_own_closure(func)
    recomputation = _Recomputation()
    # Torch ends a recomputation early by an exception, which a scripted function does not pass on.
    early_stop = set_checkpoint_early_stop(False) if scripted(func) else nullcontext()
    with early_stop:
        out = checkpoint(
            func, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputation)
        )
    recomputation.modules = ModuleState(func)  # after the call, with the masks that it has drawn
    return out


class _Recomputation:
    """The context in which torch computes activations again, once per backward pass."""

    modules: ModuleState | None = None  # None until the first evaluation has ended

    def __init__(self) -> None:
        self._block = ExitStack()

    def __enter__(self) -> None:
        if self.modules is not None:
            self._block.enter_context(self.modules.restored("copied"))

    def __exit__(self, *error: object) -> None:
        self._block.close()
