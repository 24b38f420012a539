"""Trading time for memory: evaluate again in the backward pass instead of keeping activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def mem_gc(func: Callable[..., Any], in_args: tuple[Any, ...] | None = None) -> Any:
    """``func(*in_args)`` whose activations are computed again when the gradient needs them.

    Gradients reach the arguments, the parameters of modules and every tensor that ``func`` closes
    over. Random numbers and autocast are as in the first evaluation. Inside ``torch.func``
    transforms, which cannot recompute, it is a plain call.
    """
    args = () if in_args is None else tuple(in_args)
    if torch._C._are_functorch_transforms_active():
        return func(*args)
    return checkpoint(func, *args, use_reentrant=False)
