"""`f` on the packed matrix: views of the input, checks and at most one copy of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from torchdeq._torch import versions
from torchdeq.aliasing import WriteGuard
from torchdeq.autocast import AutocastState
from torchdeq.closures import with_own_closure
from torchdeq.coupling import Coupling
from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.numbers import row_norm
from torchdeq.packing import Leaf, Packing, check_block
from torchdeq.pytree import State, take_rows


class PackedFn:
    """A map of states as a function of their packed matrix, which checks what the map returns.

    The map is called as `f(*z, *args)` for a tuple or list state, and as `f(z, *args)` for a tensor
    or dict state. It runs in the autocast mode that was in force when the `PackedFn` was created;
    `eps` is the machine epsilon of the coarsest precision in which it may compute.

    Args:
        packing: the layout of the state.
        f: the map.
        args: further arguments of `f`.
        coupled: what the caller declares about the coupling of samples.
    """

    def __init__(
        self,
        packing: Packing,
        f: Callable[..., State],
        args: tuple[Any, ...] = (),
        coupled: Coupling = None,
    ) -> None:
        if not callable(f):
            raise TypeError(f"f must be callable, got {type(f).__name__}")
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"args must be a tuple of arguments, got {type(args).__name__}")
        self.packing, self.f, self.args, self.coupled = packing, f, tuple(args), coupled
        self.eps = torch.finfo(packing.dtype).eps
        self.autocast = AutocastState(packing.device)
        if self.autocast.dtype is not None:
            self.eps = max(self.eps, torch.finfo(self.autocast.dtype).eps)
        self.peers: Peers = ALONE  # the processes that evaluate the map together
        self.spans = False  # whether the samples of all these processes are one system
        self._guard = WriteGuard()
        self._bare = isinstance(packing.template, Leaf)  # one tensor without a container
        self._unpacks = isinstance(packing.template, (tuple, list))

    def __call__(self, z: Tensor, into: Tensor | None = None) -> Tensor:
        """Return f(z) as a (b, D) matrix.

        Args:
            z: (b, D).
            into: a buffer that receives the image too. A state of several tensors is concatenated
                straight into it and `into` is returned; one tensor is copied there and the tensor
                of `f` itself is returned.
        """
        packing = self.packing
        return packing.join(self.on_tensors(packing.split(z)), into)

    def on_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return f(z) as the tensors of the state, from the tensors of the state."""
        inputs = self._guard.prepare_input(tensors)
        before = versions(inputs)
        outputs = self._outputs(inputs)
        self._guard.check(inputs, before, outputs)
        return outputs

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the Jacobian at `z` times `v`, by the map's own `jvp(z, v)` or by forward mode."""
        is_matrix = self._bare and self.packing.leaves[0].dim == 2
        jvp = getattr(self.f, "jvp", None) if is_matrix else None
        product: Tensor = jvp(z, v) if jvp else torch.func.jvp(self, (z,), (v,))[1]
        return product

    def norm(self, rows: Tensor, keepdim: bool = False) -> Tensor:
        """Return the norms of the samples, (b, D); of one system, over all processes."""
        return self.peers.norm(rows, keepdim) if self.spans else row_norm(rows, keepdim)

    def take(self, rows: Tensor) -> PackedFn:
        """Return the function for some of the samples, with the rows of these samples in `args`."""
        part = copy(self)
        part.args = take_rows(self.args, rows)
        return part

    def with_own_closure(self) -> PackedFn:
        """Return the function for calls in the backward pass; see `torchdeq.closures`."""
        kept = copy(self)
        kept.f = with_own_closure(self.f)
        return kept

    def as_one_system(self) -> PackedFn:
        """Return the function of the matrix with one row, (1, B D)."""
        joint = copy(self)
        joint.packing, joint.spans = self.packing.as_one_system(), True
        return joint

    def _outputs(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call `f` in its autocast mode; return its tensors, checked."""
        if self.autocast.enabled:
            with self.autocast.restored():
                out = self._call(tensors)
        else:
            out = self._call(tensors)
        first = tensors[0]
        if self._bare and _same_kind(out, first):
            return [out]
        return self._checked(out, first.shape[0] if first.dim() else 1)

    def _call(self, tensors: list[Tensor]) -> State:
        """Return what `f` returns, unchecked."""
        if self._bare:
            return self.f(tensors[0], *self.args)
        state = self.packing.rebuild(tensors)
        return self.f(*state, *self.args) if self._unpacks else self.f(state, *self.args)

    def _checked(self, out: State, batch: int) -> list[Tensor]:
        """Return the tensors in the output of `f`, in the order and the dtype of the state."""
        packing = self.packing
        tensors = list(leaves_like(packing.template, out, "f's output"))
        expected = [(batch, *leaf.shape) if leaf.dim else () for leaf in packing.leaves]
        if [t.shape for t in tensors] != expected:
            raise ValueError(
                "f must return the shapes it receives: got "
                f"{_show([tuple(t.shape) for t in tensors])}, expected {_show(expected)}"
            )
        return [self._cast(t, leaf.path) for t, leaf in zip(tensors, packing.leaves, strict=True)]

    def _cast(self, t: Tensor, path: str) -> Tensor:
        """Return a tensor in the output of `f`, cast to the dtype of the state, or raise."""
        packing = self.packing
        check_block(t, f"the output of f{path}")
        if t.device != packing.device:
            raise ValueError(
                f"f must keep the device of the state: got {t.device}{path}, "
                f"expected {packing.device}"
            )
        if t.dtype == packing.dtype:
            return t
        if not t.is_floating_point():
            raise TypeError(
                f"f must return floating-point tensors: got {t.dtype}{path}, expected "
                f"{packing.dtype}"
            )
        self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        return t.to(packing.dtype)  # autocast: the state keeps its own precision


def without_aux(f: Callable[..., Any]) -> Callable[..., State]:
    """Return a map that drops the `aux` of an `f` that returns `(z, aux)`."""

    def first(*inputs: Any) -> State:
        return split_pair(f(*inputs))[0]

    return first


def aux_at(f: Callable[..., Any], z: State, args: tuple[Any, ...]) -> Any:
    """Return the second value of an `f` that returns `(z, aux)`, evaluated at `z`."""
    inputs = z if isinstance(z, (tuple, list)) else (z,)
    return split_pair(f(*inputs, *args))[1]


def split_pair(out: Any) -> tuple[State, Any]:
    """Return the output of `f` if it is a pair `(z, aux)`; raise `TypeError` if not."""
    if not (isinstance(out, tuple) and len(out) == 2):
        got = f"{len(out)} items" if isinstance(out, tuple) else type(out).__name__
        raise TypeError(f"with has_aux=True f must return a pair (z, aux): got {got}")
    return out


def _same_kind(out: State, z: Tensor) -> bool:
    """Return whether `f` returned a tensor just like its input, by a fast test of the common case.

    `PackedFn._checked` examines every other output and explains what is wrong.
    """
    return (
        type(out) is Tensor
        and out.layout is z.layout
        and out.shape == z.shape
        and out.dtype == z.dtype
        and out.device == z.device
    )


def leaves_like(template: State, out: State, path: str) -> Iterator[Tensor]:
    """Yield the tensors of `out` in the order of `template`; list and tuple are equivalent."""
    if isinstance(template, Leaf):
        if not isinstance(out, Tensor):
            raise TypeError(f"{path} must be a tensor: got {type(out).__name__}")
        yield out
    elif isinstance(template, Mapping):
        keys = list(template)
        if not isinstance(out, Mapping) or set(out) != set(keys):
            got = f"keys {list(out)}" if isinstance(out, Mapping) else type(out).__name__
            raise ValueError(f"{path} must be a dict with keys {keys}: got {got}")
        for key in keys:
            yield from leaves_like(template[key], out[key], f"{path}[{key!r}]")
    else:
        if not isinstance(out, (tuple, list)) or len(out) != len(template):
            got = f"{len(out)} items" if isinstance(out, (tuple, list)) else type(out).__name__
            raise ValueError(f"{path} must be a tuple or list of {len(template)} items: got {got}")
        for i, (child, got_child) in enumerate(zip(template, out, strict=True)):
            yield from leaves_like(child, got_child, f"{path}[{i}]")


def _show(shapes: list[tuple[int, ...]]) -> str:
    """Return shapes as text for a message; one shape appears without the list around it."""
    return str(shapes[0]) if len(shapes) == 1 else str(shapes)
