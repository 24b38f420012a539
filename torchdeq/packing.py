"""A pytree of (B, ...) tensors as one (B, D) matrix, and back.

Solvers see a matrix with one row per sample. A state of one tensor is viewed, never copied; a state
of several tensors is concatenated, once per evaluation of ``f``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from torchdeq._torch import versions
from torchdeq.aliasing import WriteGuard
from torchdeq.autocast import AutocastState

State = Any  # a tensor, or a tuple, list or dict of states


@dataclass(frozen=True)
class Leaf:
    """How one tensor of the state lies in the rows of the matrix."""

    path: str
    dim: int  # of the tensor, batch included; 0 for a single number
    shape: tuple[int, ...]  # of one sample, as f sees it
    size: int
    order: tuple[int, ...] | None  # dimensions as they lie in memory; None if in their own order

    @classmethod
    def of(cls, path: str, t: Tensor) -> Leaf:
        shape = tuple(t.shape[1:])
        return cls(path, t.dim(), shape, prod(shape), _channels_last(t))

    def to_rows(self, t: Tensor) -> Tensor:
        """(b, ...) -> (b, size), contiguous; a view wherever `t` has the layout of the start."""
        if self.dim == 2:
            return t.contiguous()
        if self.order is not None:
            t = t.permute(self.order)
        return t.reshape(t.shape[0] if self.dim else 1, self.size).contiguous()

    def from_rows(self, rows: Tensor) -> Tensor:
        """(b, size) -> (b, ...)."""
        if self.dim == 2:
            return rows
        if self.dim == 0:
            return rows.reshape(())
        if self.order is None:
            return rows.reshape(rows.shape[0], *self.shape)
        rows = rows.reshape(rows.shape[0], *(self.shape[d - 1] for d in self.order[1:]))
        return rows.permute([self.order.index(d) for d in range(self.dim)])


class Packing:
    """The layout of a state, fixed by its start ``z0``.

    ``(N,)`` is ``N`` samples of one number, a 0-d tensor one sample; every other tensor has the
    batch first. All tensors share batch size, device and one floating dtype.

    Args:
        z0: the start.
        joint: samples are one system: the matrix has one row, (1, B D), instead of one each.
    """

    def __init__(self, z0: State, joint: bool = False) -> None:
        self.joint = joint
        tensors = list(_leaves(z0))
        if not tensors:
            raise ValueError(
                "the state z0 holds no tensor; pass a tensor, or a tuple or dict of them"
            )
        for path, t in tensors:
            _check_tensor(path, t, *tensors[0])
        self.leaves = tuple(Leaf.of(path, t) for path, t in tensors)
        self.template = _rebuild(z0, iter(self.leaves))  # the structure, without the tensors
        first = tensors[0][1]
        if first.is_meta:
            raise ValueError(
                "the state is on the meta device, where tensors have no values to solve for"
            )
        self.dtype, self.device = first.dtype, first.device
        self.batch = _batch(first)
        self.sizes = [leaf.size for leaf in self.leaves]
        self._at = [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    def pack(self, z: State) -> Tensor:
        """The state as a (B, D) matrix."""
        return self.join([t for _, t in _leaves(z)])

    def unpack(self, z: Tensor) -> State:
        """The (B, D) matrix as a state of the start's structure; its tensors are views of ``z``."""
        return self.rebuild(self.split(z))

    def rebuild(self, tensors: list[Tensor]) -> State:
        """A state of the start's structure around other tensors."""
        return _rebuild(self.template, iter(tensors))

    def wrap(self, f: Callable[..., State], args: tuple[Any, ...] = ()) -> PackedFn:
        """``f`` as a function of the matrix that checks what ``f`` returns."""
        if not callable(f):
            raise TypeError(f"f must be callable, got {type(f).__name__}")
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"args must be a tuple of arguments, got {type(args).__name__}")
        return PackedFn(self, f, tuple(args))

    def join(self, tensors: list[Tensor], into: Tensor | None = None) -> Tensor:
        """The tensors side by side, written straight ``into`` a buffer if there is one."""
        if self.joint:
            into = None if into is None else into.view(self.batch, -1)
            return self._join(tensors, into).reshape(1, -1)
        return self._join(tensors, into)

    def _join(self, tensors: list[Tensor], into: Tensor | None) -> Tensor:
        if len(tensors) > 1:
            rows = [leaf.to_rows(t) for leaf, t in zip(self.leaves, tensors, strict=True)]
            return torch.cat(rows, dim=1, out=into)
        row = self.leaves[0].to_rows(tensors[0])
        if into is not None:
            into.copy_(row)
        return row

    def split(self, z: Tensor) -> list[Tensor]:
        """The tensors of the state, in order, as views of ``z``."""
        if self.joint:
            z = z.view(self.batch, -1)
        if len(self.leaves) == 1:
            return [self.leaves[0].from_rows(z)]
        # Not split(): autograd forbids to write into one of several views made at once.
        parts = (z.narrow(1, at, size) for at, size in zip(self._at, self.sizes, strict=True))
        return [leaf.from_rows(rows) for leaf, rows in zip(self.leaves, parts, strict=True)]


class PackedFn:
    """``f`` on the packed matrix: views in, checks and at most one copy out.

    A tuple or list state is unpacked, ``f(*z, *args)``; a tensor or dict state is ``f(z, *args)``.
    ``f`` runs in the autocast mode in force when this was made; ``eps`` is that of the coarsest
    precision it may compute in.
    """

    def __init__(self, packing: Packing, f: Callable[..., State], args: tuple[Any, ...]) -> None:
        self.packing, self.f, self.args = packing, f, args
        self.eps = torch.finfo(packing.dtype).eps
        self.autocast = AutocastState(packing.device)
        if self.autocast.dtype is not None:
            self.eps = max(self.eps, torch.finfo(self.autocast.dtype).eps)
        self._guard = WriteGuard()
        self._bare = isinstance(packing.template, Leaf)  # a tensor, not in any container
        self._unpacks = isinstance(packing.template, (tuple, list))
        self.coupled: bool | Literal["adjoint"] | None = None  # whether samples depend on others

    def __call__(self, z: Tensor, into: Tensor | None = None) -> Tensor:
        """f(z) as a (b, D) matrix.

        ``into`` receives the image too: a state of several tensors is concatenated straight into it
        and ``into`` is returned; one tensor is copied there and f's own tensor is returned.
        """
        packing = self.packing
        return packing.join(self.on_tensors(packing.split(z)), into)

    def on_tensors(self, tensors: list[Tensor]) -> list[Tensor]:
        """The same on the tensors of the state, without packing them."""
        given = self._guard.lend(tensors)
        before = versions(given)
        outputs = self._outputs(given)
        self._guard.check(given, before, outputs)
        return outputs

    def _outputs(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.autocast.enabled:
            with self.autocast.restored():
                out = self._call(tensors)
        else:
            out = self._call(tensors)
        first = tensors[0]
        if self._bare and _same_kind(out, first):
            return [out]
        return self._checked(out, first.shape[0] if first.dim() else 1)

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """The Jacobian at ``z`` times ``v``: f's own ``jvp(z, v)``, or forward mode."""
        own = (
            getattr(self.f, "jvp", None) if self._bare and self.packing.leaves[0].dim == 2 else None
        )
        product: Tensor = own(z, v) if own else torch.func.jvp(self, (z,), (v,))[1]
        return product

    def take(self, rows: Tensor) -> PackedFn:
        """The same function for some of the samples: every tensor among ``args`` is indexed."""
        part = copy(self)
        part.args = take_rows(self.args, rows)
        return part

    def _call(self, tensors: list[Tensor]) -> State:
        if self._bare:
            return self.f(tensors[0], *self.args)
        state = self.packing.rebuild(tensors)
        return self.f(*state, *self.args) if self._unpacks else self.f(state, *self.args)

    def _checked(self, out: State, batch: int) -> list[Tensor]:
        """The tensors of what ``f`` returned, in the state's order, in the state's dtype."""
        packing = self.packing
        tensors = list(_matching(packing.template, out, "f's output"))
        expected = [(batch, *leaf.shape) if leaf.dim else () for leaf in packing.leaves]
        if [t.shape for t in tensors] != expected:
            raise ValueError(
                "f must return the shapes it receives: got "
                f"{_show([tuple(t.shape) for t in tensors])}, expected {_show(expected)}"
            )
        for i, t in enumerate(tensors):
            path = packing.leaves[i].path
            _check_kind(t, f"what f returned{path}")
            if t.device != packing.device:
                raise ValueError(
                    f"f must keep the device of the state: got {t.device}{path}, "
                    f"expected {packing.device}"
                )
            if t.dtype != packing.dtype:
                if not t.is_floating_point():
                    raise TypeError(
                        "f must return floating-point tensors: got "
                        f"{t.dtype}{path}, expected {packing.dtype}"
                    )
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
                tensors[i] = t.to(packing.dtype)  # autocast: the state keeps its own precision
        return tensors


def _same_kind(out: State, z: Tensor) -> bool:
    """The common case, checked in one go; what fails here is looked at again, and explained."""
    return (
        type(out) is Tensor
        and out.layout is z.layout
        and out.shape == z.shape
        and out.dtype == z.dtype
        and out.device == z.device
    )


def without_aux(f: Callable[..., Any]) -> Callable[..., State]:
    """Return the map of an ``f`` that returns ``(z, aux)``."""

    def main(*inputs: Any) -> State:
        return _pair(f(*inputs))[0]

    return main


def aux_at(f: Callable[..., Any], z: State, args: tuple[Any, ...]) -> Any:
    """Return what ``f`` returns beside its image at ``z``."""
    inputs = z if isinstance(z, (tuple, list)) else (z,)
    return _pair(f(*inputs, *args))[1]


def _pair(out: Any) -> tuple[State, Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        got = f"{len(out)} items" if isinstance(out, tuple) else type(out).__name__
        raise TypeError(f"with has_aux=True f must return a pair (z, aux): got {got}")
    return out


def take_rows(tree: Any, rows: Tensor) -> Any:
    """Index the batch of every tensor in a pytree; anything else stays as it is."""
    if isinstance(tree, Tensor):
        return tree.index_select(0, rows)
    return _map_children(tree, lambda child: take_rows(child, rows))


def check_batched(args: tuple[Any, ...], batch: int) -> None:
    """Compaction drops samples, so every tensor among ``args`` must lead with the batch."""
    for path, leaf in _walk(args, ""):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != batch):
            raise ValueError(
                f"compact=True needs every tensor in args to lead with the batch of {batch}: got "
                f"shape {tuple(leaf.shape)} at args{path}; let f close over what is not per sample"
            )


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in the order of the containers."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from _walk(child, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for i, child in enumerate(tree):
            yield from _walk(child, f"{path}[{i}]")
    else:
        yield path, tree


def _leaves(z: State) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in _walk(z, ""):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"the state z0 must hold tensors only: got {type(leaf).__name__} at z0{path}"
            )
        yield f" at {path}" if path else "", leaf


def _matching(template: State, out: State, path: str) -> Iterator[Tensor]:
    """The tensors of ``out`` in the order of ``template``; list and tuple are the same thing."""
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
            yield from _matching(template[key], out[key], f"{path}[{key!r}]")
    else:
        if not isinstance(out, (tuple, list)) or len(out) != len(template):
            got = f"{len(out)} items" if isinstance(out, (tuple, list)) else type(out).__name__
            raise ValueError(f"{path} must be a tuple or list of {len(template)} items: got {got}")
        for i, (child, got_child) in enumerate(zip(template, out, strict=True)):
            yield from _matching(child, got_child, f"{path}[{i}]")


def _map_children(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """A container of the same type with ``fn`` applied to its children; a leaf is returned."""
    if isinstance(tree, Mapping):
        same = copy(tree)  # keeps what the type holds beside its items, e.g. a default factory
        for key, child in tree.items():
            same[key] = fn(child)  # type: ignore[index]
        return same
    if isinstance(tree, (tuple, list)):
        children = [fn(child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return tree


def _rebuild(template: State, tensors: Iterator[Any]) -> State:
    """The containers of ``template`` around other leaves."""
    if isinstance(template, (Tensor, Leaf)):
        return next(tensors)
    return _map_children(template, lambda child: _rebuild(child, tensors))


def _check_tensor(path: str, t: Tensor, first_path: str, first: Tensor) -> None:
    _check_kind(t, f"the state{path}")
    if not t.is_floating_point():
        raise TypeError(
            f"the state must be floating point: got {t.dtype}{path}; cast it with .float()"
        )
    if t.dtype.itemsize < 2:
        raise TypeError(
            f"no solver computes in {t.dtype}{path}: cast the state to torch.float32 and let f "
            "convert it"
        )
    if t.dtype != first.dtype:
        raise TypeError(
            f"the tensors of a state must share one dtype: got {first.dtype}{first_path} and "
            f"{t.dtype}{path}; cast them to one"
        )
    if t.device != first.device:
        raise ValueError(
            f"the tensors of a state must share one device: got {first.device}{first_path} and "
            f"{t.device}{path}"
        )
    if _batch(t) != _batch(first):
        raise ValueError(
            "the tensors of a state must share one batch size: got "
            f"{tuple(first.shape)}{first_path} and {tuple(t.shape)}{path}"
        )


def _check_kind(t: Tensor, what: str) -> None:
    """Raise for tensors that are not a block of real numbers in the memory of this process."""
    if t.is_complex():
        raise TypeError(
            f"{what} is complex ({t.dtype}), and solvers compute with real numbers: use "
            "torch.view_as_real(z) as the state and torch.view_as_complex inside f"
        )
    if hasattr(t, "to_local"):
        raise TypeError(
            f"{what} is a {type(t).__name__}, spread over devices: solve for z.to_local() and let "
            "f communicate"
        )
    if t.is_nested:
        raise TypeError(
            f"{what} is a nested tensor: pad it with torch.nested.to_padded_tensor(z, 0.0)"
        )
    if t.layout is not torch.strided:
        raise TypeError(f"{what} is sparse ({t.layout}): make it dense, z.to_dense()")


def _channels_last(t: Tensor) -> tuple[int, ...] | None:
    """Return the order in memory of a channels-last tensor, None for every other layout."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if t.dim() not in formats or t.is_contiguous():
        return None
    try:
        if not t.is_contiguous(memory_format=formats[t.dim()]):
            return None
    except RuntimeError:  # a slice of vmap does not say
        return None
    return (0, *range(2, t.dim()), 1)


def _batch(t: Tensor) -> int:
    return t.shape[0] if t.dim() else 1


def _show(shapes: list[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else str(shapes)
