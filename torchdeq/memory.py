"""Trading time for memory: evaluate again in the backward pass instead of keeping activations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torchdeq._torch import function_transforms_active
from torchdeq.modules import ModuleState, scripted


def mem_gc(func: Callable[..., Any], in_args: tuple[Any, ...] | None = None) -> Any:
    """``func(*in_args)`` whose activations are computed again when the gradient needs them.

    Gradients reach the arguments, the parameters of modules and every tensor that ``func`` closes
    over. Random numbers, autocast and the tensors of modules are as in the first evaluation, and
    running statistics are not updated again. Inside ``torch.func`` transforms, which cannot
    recompute, it is a plain call.
    """
    if not isinstance(in_args, (tuple, list, type(None))):
        raise TypeError(
            f"in_args must be a tuple of arguments, as in mem_gc(f, (z,)): got "
            f"{type(in_args).__name__}"
        )
    args = () if in_args is None else tuple(in_args)
    if function_transforms_active():
        return func(*args)
    again = _Recomputing()
    # Recomputation is cut short by an exception, which a scripted function does not pass on.
    whole = set_checkpoint_early_stop(False) if scripted(func) else nullcontext()
    with whole:
        out = checkpoint(
            func, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again)
        )
    again.modules = ModuleState(func)  # now, with the masks that this call has drawn
    return out


class _Recomputing:
    """The block in which activations are computed again; entered once per backward pass."""

    modules: ModuleState | None = None  # as they are until the first evaluation has ended

    def __init__(self) -> None:
        self._block = ExitStack()

    def __enter__(self) -> None:
        if self.modules is not None:
            self._block.enter_context(self.modules.restored("copied"))

    def __exit__(self, *error: object) -> None:
        self._block.close()
