"""All private names of torch that the library uses, each behind one function.

Torch may change these names at any time. Where one is missing, its function falls back to a safe
answer, or raises an error that says which torch is needed. No other module of the library may use
private names of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.modules.batchnorm
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")


def _private(*paths: str) -> Callable[..., Any]:
    """Return the first of these names that torch has, or a function that raises when called.

    The error waits for the call, so that a name which torch has moved or removed does not stop
    programs that never use it.
    """
    for path in paths:
        try:
            value: Any = torch
            for name in path.split(".")[1:]:
                value = getattr(value, name)
        except AttributeError:
            continue
        return cast(Callable[..., Any], value)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch {torch.__version__} has no {paths[0]}, which this part of torchdeq needs: "
            "torchdeq is tested with torch 2.6 to 2.15; install one of them, or a newer torchdeq"
        )

    return missing


#: Return a structure of containers with a function applied to each leaf: `tree_map(f, tree)`.
#: Torch has no public name for this function and `tree_leaves`; many libraries use these two.
tree_map = _private("torch.utils._pytree.tree_map")

#: Return the leaves of a structure of containers, in order.
tree_leaves: Callable[[Any], list[Any]] = _private("torch.utils._pytree.tree_leaves")

#: Return whether a `torch.func` transform is active.
function_transforms_active: Callable[[], bool] = _private(
    "torch._C._are_functorch_transforms_active"
)


def dual_level_active() -> bool:
    """Return whether a level of forward-mode differentiation is open."""
    try:
        return forward_ad._current_level >= 0
    except AttributeError:
        return _can_make_duals()


def _can_make_duals() -> bool:
    """Return whether a dual tensor can be made, which is possible inside a dual level only.

    The public but slower way to answer `dual_level_active`.
    """
    try:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:
        return False
    return True


def transforms_active() -> bool:
    """Return whether a `torch.func` transform is active or a level of forward mode is open."""
    return function_transforms_active() or dual_level_active()


#: Return a block in which forward-mode differentiation is on (True) or off (False).
forward_mode: Callable[[bool], AbstractContextManager[Any]] = _private(
    "torch.autograd.forward_ad._set_fwd_grad_enabled"
)

#: Return whether a tensor belongs to a level of `torch.func`.
is_wrapped: Callable[[Tensor], bool] = _private("torch._C._functorch.is_functorch_wrapped_tensor")

#: Return whether a tensor is wrapped by `torch.func.vmap`.
is_batched: Callable[[Tensor], bool] = _private("torch._C._functorch.is_batchedtensor")

#: Return the tensor one level below a wrapped tensor.
unwrapped: Callable[[Tensor], Tensor] = _private("torch._C._functorch.get_unwrapped")

#: Return the tensor that the `grad` or `jvp` level of this number wraps; a tensor of another level
#: comes back unchanged.
without_level: Callable[[Tensor, int], Tensor] = _private("torch._C._functorch._unwrap_for_grad")

#: Return whether a tensor carries the batch of `is_grads_batched` or `vectorize=True`.
is_legacy_batched: Callable[[Tensor], bool] = _private(
    "torch._C._functorch.is_legacy_batchedtensor"
)

_maybe_get_level = _private("torch._C._functorch.maybe_get_level")
_maybe_current_level = _private("torch._C._functorch.maybe_current_level")
_enter_legacy_batch = _private("torch._C._vmapmode_increment_nesting")
_leave_legacy_batch = _private("torch._C._vmapmode_decrement_nesting")
_remove_batch_dim = _private("torch._remove_batch_dim")
_add_batch_dim = _private("torch._add_batch_dim")


def level_of(t: Tensor) -> int:
    """Return the level of `torch.func` that a tensor belongs to; 0 for a plain tensor."""
    level: int = _maybe_get_level(t)  # -1 for a plain tensor
    return max(0, level)


def current_level() -> int:
    """Return the innermost level of `torch.func`; 0 outside all transforms."""
    level: int | None = _maybe_current_level()
    return level or 0


def legacy_batch_level() -> int:
    """Return the open level of `is_grads_batched`; 0 outside."""
    level: int = _enter_legacy_batch() - 1
    _leave_legacy_batch()
    return level


def without_legacy_batch(t: Tensor, level: int, size: int) -> Tensor:
    """Return a plain tensor whose first dimension is the batch of `is_grads_batched`."""
    plain: Tensor = _remove_batch_dim(t, level, size, 0)
    return plain


def with_legacy_batch(t: Tensor, level: int) -> Tensor:
    """Return a tensor whose first dimension has become the batch of `is_grads_batched`."""
    batched: Tensor = _add_batch_dim(t, 0, level)
    return batched


def version(t: Tensor) -> int | None:
    """Return how often a tensor was written to; None for an inference tensor: it has no count."""
    return None if t.is_inference() else t._version


def versions(tensors: list[Tensor]) -> list[int | None]:
    """Return the version of each tensor."""
    return [None if t.is_inference() else t._version for t in tensors]


def share_counter(a: Tensor, b: Tensor) -> bool:
    """Return whether writing into `b` counts as writing into `a`: one is a view of the other.

    False if torch cannot answer: for inference tensors, or if the name is missing.
    """
    preserve_version = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    if preserve_version is None or a.is_inference() or b.is_inference():
        return False
    before = a._version
    with preserve_version(b):
        torch.autograd.graph.increment_version(b)
        return a._version != before


_storage_owners = _private("torch._C._storage_Use_Count")
_tensor_owners = _private("torch.Tensor._use_count")


@cache
def _owners_of_new_tensor() -> tuple[int, int]:
    """Return how many owners torch counts for a new tensor and for its memory."""
    t = torch.empty(1)
    return _tensor_owners(t), _storage_owners(t.untyped_storage()._cdata)


def has_other_owners(t: Tensor) -> bool:
    """Return whether another tensor, or code in C++, uses the memory of a tensor too.

    True if torch cannot answer. References from Python to the tensor itself are not counted, and a
    view of a deleted tensor counts only outside inference mode.
    """
    try:
        of_tensor, of_memory = _owners_of_new_tensor()
        if _tensor_owners(t) > of_tensor:
            return True
        return bool(_storage_owners(t.untyped_storage()._cdata) > of_memory)
    except (NotImplementedError, RuntimeError):  # no storage, or the names are missing
        return True


_BATCH_NORMS = getattr(
    torch.nn.modules.batchnorm,
    "_BatchNorm",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def normalises_over_batch(module: nn.Module) -> bool:
    """Return whether a module is a batch normalisation that uses the statistics of the batch."""
    if not isinstance(module, _BATCH_NORMS):
        return False
    return module.training or module.running_mean is None


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost pair of hooks on saved tensors, e.g. of a checkpoint or `save_on_cpu`.

    None if there is no pair, but also before torch 2.7, which cannot answer: None does not prove
    that there are no hooks.
    """
    try:
        top = torch._C._autograd._top_saved_tensors_default_hooks
    except AttributeError:
        return None
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = top(False)
    return hooks


_disable_dynamo = _private("torch._compile._disable_dynamo", "torch.compiler.disable")


def without_compiler(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` such that `torch.compile` does not trace it.

    Unlike the public `torch.compiler.disable`, this does not import the compiler.
    """
    untraced: Callable[P, R] = _disable_dynamo(fn)
    return untraced


def is_compiled(part: Any) -> bool:
    """Return whether `torch.compile` made a function or module, or compiles the module's calls."""
    if isinstance(part, nn.Module):
        compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
        return part._compiled_call_impl is not None or isinstance(part, compiled)
    return "_torchdynamo_orig_callable" in getattr(part, "__dict__", ())


def compiler_loaded() -> bool:
    """Return whether this process has loaded the compiler; if not, no function is compiled."""
    return "torch._dynamo" in sys.modules


def sharding_unit_type() -> type | None:
    """Return the class of the units of `fully_shard`; None if no program has loaded it.

    The class is public, but importing its package takes a second.
    """
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def _shard_groups(unit: Any) -> list[Any]:
    """Return the groups of parameters of a unit, which torch gathers and scatters together."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one group per unit
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def unit_is_sharded(unit: Any) -> bool:
    """Return whether a unit has parameters of its own, and processes share them out."""
    groups = _shard_groups(unit)
    return bool(groups) and all(hasattr(g.mesh_info, "shard_process_group") for g in groups)


def unit_in_forward(unit: Any) -> bool:
    """Return whether the program is inside the forward pass of a unit of `fully_shard`.

    A checkpoint may compute the forward pass again in the backward pass.
    """
    state: str = unit._get_fsdp_state()._training_state.name
    return state in ("FORWARD", "PRE_BACKWARD")


class UnitSettings:
    """The settings of a unit of `fully_shard` that keep it gathered, to be restored later.

    Torch has public functions that change these settings, but none that reads them.

    Args:
        unit: the unit.
    """

    def __init__(self, unit: Any) -> None:
        state = self._state = unit._get_fsdp_state()
        self._groups = [
            (group, group.post_forward_mesh_info, group.reshard_after_backward)
            for group in _shard_groups(unit)
        ]
        self._prefetch = list(state._states_to_backward_prefetch)
        self._auto = getattr(state, "_auto_reshard_after_forward", None)  # set in torch >= 2.8
        self._phases = [(part, part._training_state) for part in (state, *_shard_groups(unit))]
        self.gathered = all(group.is_unsharded for group, *_ in self._groups)

    @property
    def reshards_after_forward(self) -> bool:
        """Return whether a forward pass of the unit ends with its parameters scattered."""
        return any(info is not None for _, info, _ in self._groups)

    def restore(self) -> None:
        """Give the unit the settings that it had."""
        for group, info, reshards in self._groups:
            group.post_forward_mesh_info, group.reshard_after_backward = info, reshards
        self._state._states_to_backward_prefetch = list(self._prefetch)
        if self._auto is not None:
            self._state._auto_reshard_after_forward = self._auto

    def leave_call(self) -> None:
        """Let the unit leave a forward pass that an exception has ended; torch does not."""
        for part, phase in self._phases:
            part._training_state = phase


def reduce_unit_gradients(unit: Any) -> None:
    """Sum the gradients of the gathered parameters of a unit over processes, into its shards."""
    for group in _shard_groups(unit):
        group.post_backward()


def graph_count(fn: Callable[..., Any]) -> int:
    """Return how many graphs the compiler keeps for a compiled function; 0 if it cannot answer."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    entries = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    inner = getattr(fn, "_torchdynamo_orig_callable", None)
    return len(entries(inner.__code__)) if entries is not None and inner is not None else 0


def keeping_buffers() -> AbstractContextManager[Any]:
    """Return a block in which the compiler makes backward graphs that may run more than once.

    By default they may overwrite saved tensors ("donated buffers") and refuse `retain_graph=True`,
    which products with a Jacobian need. Graphs that were made in such a block must run in one, too:
    elsewhere torch refuses all graphs that were not made for `retain_graph=False`.
    """
    config: Any = sys.modules.get("torch._functorch.config")
    if not hasattr(config, "donated_buffer"):
        return nullcontext()
    block: AbstractContextManager[Any] = config.patch(donated_buffer=False)
    return block


def memory_id(t: Tensor) -> int:
    """Return a number that two tensors have in common if they use the same memory."""
    number: int = t.untyped_storage()._cdata
    return number


#: Run `body(*carried)` as long as `cond(*carried)` is true, as one operation of a graph. Its name
#: is public, but torch calls it a prototype.
while_loop: Callable[..., Any] = _private("torch.while_loop", "torch._higher_order_ops.while_loop")


def compile_package(program: Any, path: str, metadata: dict[str, str]) -> None:
    """Compile an exported program ahead of time and write the library to a package, `path`.pt2."""
    from torch._inductor import aoti_compile_and_package

    configs = {"aot_inductor.metadata": metadata}
    aoti_compile_and_package(program, package_path=path, inductor_configs=configs)


def load_package(path: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """Return the compiled program in a package, as a function, and the metadata."""
    from torch._inductor import aoti_load_package

    program: Any = aoti_load_package(path)
    return program, program.get_metadata()


def after_operations(observe: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Return a block that calls `observe` with the outputs of every operation of torch in it."""
    mode = _private("torch.utils._python_dispatch.TorchDispatchMode")

    class Observer(mode):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = f(*args, **(kwargs or {}))
            observe(out)
            return out

    block: AbstractContextManager[Any] = Observer()
    return block
