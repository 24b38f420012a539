"""States as trees: tensors in tuples, lists and dicts, in any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, TypeVar

from torch import Tensor

State = Any  # a tensor, or a tuple, list or dict of states
S = TypeVar("S")  # the type of a caller's state, which is also the type of the solved one


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as `[0]['h']`, in the order of the containers."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from walk(child, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for i, child in enumerate(tree):
            yield from walk(child, f"{path}[{i}]")
    else:
        yield path, tree


def map_children(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with `fn` applied to its children, or the leaf itself."""
    if isinstance(tree, Mapping):
        mapped = copy(tree)  # keeps what the type stores beside its items, e.g. a default factory
        for key, child in tree.items():
            mapped[key] = fn(child)  # type: ignore[index]
        return mapped
    if isinstance(tree, (tuple, list)):
        children = [fn(child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return tree


def map_tensors(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Return the tree with `fn` applied to every tensor; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return fn(tree)
    return map_children(tree, lambda child: map_tensors(child, fn))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in the order of the containers."""
    return [leaf for _, leaf in walk(tree) if isinstance(leaf, Tensor)]


def take_rows(tree: Any, rows: Tensor) -> Any:
    """Return the tree with the batch of every tensor indexed by `rows`."""
    return map_tensors(tree, lambda t: t.index_select(0, rows.to(t.device)))


def check_batched(args: tuple[Any, ...], batch: int) -> None:
    """Raise `ValueError` unless the first dimension of every tensor in `args` is the batch.

    Compaction drops samples, so it must be able to drop the rows of a sample from every argument.
    """
    for path, leaf in walk(args):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != batch):
            raise ValueError(
                f"compact=True needs the batch of {batch} as the first dimension of every tensor "
                f"in args: got shape {tuple(leaf.shape)} at args{path}; let f close over a tensor "
                "without a batch"
            )
