"""Tensors within nested tuples, named tuples, lists and dicts; anything else is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, Mapping):
        yield from tensors(list(tree.values()))


def map_tensors(f: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the tree with `f` applied to every tensor."""
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(f, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(f, item) for item in tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(f, item) for key, item in tree.items()}
    return tree


def to_device(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the tree with every tensor on a device, those of floats in `dtype` if it is given."""

    def move(t: Tensor) -> Tensor:
        kind = t.dtype if dtype is None or not t.is_floating_point() else dtype
        return t.to(device, kind, non_blocking=True)

    return map_tensors(move, tree)


def detached(tree: Any) -> Any:
    """Return the tree with every tensor outside of any graph."""
    return map_tensors(Tensor.detach, tree)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this process holds; others as they are."""
    to_local = getattr(tensor, "to_local", None)  # importing DTensor to ask for it takes long
    return tensor if to_local is None else to_local()
