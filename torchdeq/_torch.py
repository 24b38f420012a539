"""Every private name of torch that the library uses, one function each.

Torch promises nothing about these names. Where one is missing, the function falls back to what is
safe, or raises an error that says which torch is needed; nothing else in the library may touch
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.modules.batchnorm
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")


def _private(*paths: str) -> Callable[..., Any]:
    """Return the first of these names that torch has, or else a function that raises when called.

    A name that torch has moved must not be in the way of those who do not need it.
    """
    for path in paths:
        try:
            found: Any = torch
            for name in path.split(".")[1:]:
                found = getattr(found, name)
        except AttributeError:
            continue
        return cast(Callable[..., Any], found)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch {torch.__version__} has no {paths[0]}, which this part of torchdeq needs: it "
            "is known to work with torch 2.6 to 2.15; install one of them, or a newer torchdeq"
        )

    return missing


_transforms_active = _private("torch._C._are_functorch_transforms_active")


def function_transforms_active() -> bool:
    """Return whether a `torch.func` transform is at work."""
    active: bool = _transforms_active()
    return active


def dual_level_active() -> bool:
    """Return whether a level of forward-mode differentiation is open."""
    try:
        return forward_ad._current_level >= 0
    except AttributeError:
        return _can_make_duals()


def _can_make_duals() -> bool:
    """Return the same by public means: outside every level a dual tensor cannot be made."""
    try:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:
        return False
    return True


def transforms_active() -> bool:
    """Return whether a `torch.func` transform or a level of forward mode is at work."""
    return function_transforms_active() or dual_level_active()


_set_forward_mode = _private("torch.autograd.forward_ad._set_fwd_grad_enabled")


def forward_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Return a block in which forward-mode differentiation is on or off."""
    block: AbstractContextManager[Any] = _set_forward_mode(enabled)
    return block


_is_wrapped = _private("torch._C._functorch.is_functorch_wrapped_tensor")


def is_wrapped(t: Tensor) -> bool:
    """Return whether a tensor belongs to a level of `torch.func`."""
    result: bool = _is_wrapped(t)
    return result


_is_batched = _private("torch._C._functorch.is_batchedtensor")


def is_batched(t: Tensor) -> bool:
    """Return whether a tensor is wrapped by `torch.func.vmap`."""
    result: bool = _is_batched(t)
    return result


_unwrapped = _private("torch._C._functorch.get_unwrapped")


def unwrapped(t: Tensor) -> Tensor:
    """Return the tensor one level below a wrapped one."""
    result: Tensor = _unwrapped(t)
    return result


_level_of = _private("torch._C._functorch.maybe_get_level")


def level_of(t: Tensor) -> int:
    """Return the level of `torch.func` a tensor belongs to; 0 for a plain tensor."""
    result: int = max(0, _level_of(t))
    return result


_current_level = _private("torch._C._functorch.maybe_current_level")


def current_level() -> int:
    """Return the innermost level of `torch.func`; 0 outside all transforms."""
    result: int = _current_level() or 0
    return result


_without_level = _private("torch._C._functorch._unwrap_for_grad")


def without_level(t: Tensor, level: int) -> Tensor:
    """Return the tensor that a `grad` or `jvp` level wraps, or `t` itself if it is another's."""
    result: Tensor = _without_level(t, level)
    return result


_is_legacy_batched = _private("torch._C._functorch.is_legacy_batchedtensor")


def is_legacy_batched(t: Tensor) -> bool:
    """Return whether a tensor carries the batch of `is_grads_batched` or `vectorize=True`."""
    result: bool = _is_legacy_batched(t)
    return result


_enter_legacy_batch = _private("torch._C._vmapmode_increment_nesting")
_leave_legacy_batch = _private("torch._C._vmapmode_decrement_nesting")


def legacy_batch_level() -> int:
    """Return the level of `is_grads_batched` that is open; 0 outside."""
    level: int = _enter_legacy_batch() - 1
    _leave_legacy_batch()
    return level


_without_legacy_batch = _private("torch._remove_batch_dim")


def without_legacy_batch(t: Tensor, level: int, size: int) -> Tensor:
    """Return a plain tensor with the batch of `is_grads_batched` in front."""
    result: Tensor = _without_legacy_batch(t, level, size, 0)
    return result


_with_legacy_batch = _private("torch._add_batch_dim")


def with_legacy_batch(t: Tensor, level: int) -> Tensor:
    """Return a tensor whose first dimension is the batch of `is_grads_batched`."""
    result: Tensor = _with_legacy_batch(t, 0, level)
    return result


def version(t: Tensor) -> int | None:
    """Return how often a tensor was written to; None for an inference tensor: it has no count."""
    return None if t.is_inference() else t._version


def versions(tensors: list[Tensor]) -> list[int | None]:
    """Return the same of several tensors."""
    return [None if t.is_inference() else t._version for t in tensors]


def share_counter(a: Tensor, b: Tensor) -> bool:
    """Return whether writing into `b` counts as writing into `a`: one is a view of the other.

    False where torch does not tell.
    """
    keep = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    if keep is None or a.is_inference() or b.is_inference():
        return False
    before = a._version
    with keep(b):
        torch.autograd.graph.increment_version(b)
        return a._version != before


_storage_owners = _private("torch._C._storage_Use_Count")
_tensor_owners = _private("torch.Tensor._use_count")


@cache
def _owners_of_new() -> tuple[int, int]:
    """Return how many owners torch counts for a new tensor and for its memory."""
    t = torch.empty(1)
    return _tensor_owners(t), _storage_owners(t.untyped_storage()._cdata)


def has_other_owners(t: Tensor) -> bool:
    """Return whether another tensor, or a program in C++, uses the memory of a tensor too.

    True where torch does not tell. References from Python to the tensor itself are not counted, and
    a view of a tensor that is gone counts only outside inference mode.
    """
    try:
        of_tensor, of_memory = _owners_of_new()
        if _tensor_owners(t) > of_tensor:
            return True
        return bool(_storage_owners(t.untyped_storage()._cdata) > of_memory)
    except (NotImplementedError, RuntimeError):  # no storage, or torch has moved the names
        return True


_BATCH_NORMS = getattr(
    torch.nn.modules.batchnorm,
    "_BatchNorm",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def normalises_over_batch(module: nn.Module) -> bool:
    """Return whether a module is a batch normalisation that uses the batch as it is."""
    if not isinstance(module, _BATCH_NORMS):
        return False
    return module.training or module.running_mean is None


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost pair of hooks on saved tensors: of a checkpoint, of `save_on_cpu`.

    None if there is no pair, and where torch does not tell (before 2.7): a caller may rely on hooks
    that are returned, but not on their absence.
    """
    try:
        top = torch._C._autograd._top_saved_tensors_default_hooks
    except AttributeError:
        return None
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = top(False)
    return hooks


_hide = _private("torch._compile._disable_dynamo", "torch.compiler.disable")


def without_compiler(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` hidden from `torch.compile`; unlike its public form this imports no compiler."""
    hidden: Callable[P, R] = _hide(fn)
    return hidden


def compiler_loaded() -> bool:
    """Return whether anything in this process can have been compiled."""
    return "torch._dynamo" in sys.modules
