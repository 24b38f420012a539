"""A computed weight: notices when it is written to, and can be copied and pickled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from torchdeq._torch import version
from torchdeq.callers import stack_level

Parts = dict[str, Tensor]  # what a weight is computed from, by the suffix of its name
Recipe = Callable[[Parts], Tensor]


def computed(recipe: Recipe, parts: Parts, watched: tuple[str, ...], fresh: bool = False) -> Tensor:
    """``recipe(parts)``, with its origin on it.

    Args:
        recipe: makes a new tensor; must pickle.
        parts: the parameters and buffers of the module.
        watched: the parameters among them.
        fresh: whether initialisers are expected: a copy is kept, which finds writes through
            ``.data`` too.
    """
    weight = recipe(parts)
    origin = _Origin(weight, recipe, parts, watched, fresh)
    # Attributes of a plain tensor: compiled functions refuse a subclass.
    vars(weight).update(
        _deq_origin=origin, __deepcopy__=origin.deepcopy, __reduce_ex__=origin.reduce_ex
    )
    return weight


def was_overwritten(weight: Tensor, parts: Parts) -> bool:
    """Whether a computed weight holds other values, meant for the parameters ``parts``."""
    origin: _Origin | None = getattr(weight, "_deq_origin", None)
    return origin is not None and origin.was_overwritten(weight, parts)


class _Origin:
    """How a weight was computed, and in which state everything was then.

    A copied or unpickled module gets a weight computed from its own parameters: torch does not
    deepcopy a tensor with a graph, and a detached one would give the parameters no gradient.
    """

    def __init__(
        self, weight: Tensor, recipe: Recipe, parts: Parts, watched: tuple[str, ...], fresh: bool
    ) -> None:
        self.weight = ref(weight)  # which owns this: a cycle would keep it until a collection
        self.recipe, self.parts, self.watched = recipe, parts, watched
        self.copy = weight.detach().clone() if fresh else None
        self.version, self.grad_fn = version(weight), weight.grad_fn
        self.versions = {suffix: version(part) for suffix, part in parts.items()}

    def was_overwritten(self, weight: Tensor, parts: Parts) -> bool:
        if weight.is_meta or weight.grad_fn is not self.grad_fn:
            return False  # autograd recorded the write: part of a computation
        if version(weight) == self.version and (self.copy is None or _equal(weight, self.copy)):
            return False
        if self.unchanged(parts):
            return True
        warnings.warn(
            "a normalised weight was written to, but its parameters have changed as well since it "
            "was computed: the write is dropped; call reset_norm just before and after it",
            stacklevel=stack_level(),
        )
        return False

    def unchanged(self, parts: Parts) -> bool:
        """Return whether the parameters are what they were.

        A write through ``.data`` has no version: as long as there is a copy to compare with, the
        weight that the parameters make now is compared with the one that they made then.
        """
        if not all(
            parts[suffix] is self.parts[suffix] and version(parts[suffix]) == self.versions[suffix]
            for suffix in self.watched
        ):
            return False
        if self.copy is None:
            return True
        with torch.no_grad():
            now = self.recipe(parts).to(self.copy)
        return torch.allclose(now, self.copy, rtol=0.02, atol=1e-6, equal_nan=True)  # after a move

    def deepcopy(self, memo: dict[int, Any]) -> Tensor:
        recipe, parts, *rest = self.reduce_ex(2)[1]
        return _rebuild(recipe, deepcopy(parts, memo), *rest)

    def reduce_ex(self, protocol: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        weight = self.weight()
        assert weight is not None  # called through it
        written = weight.detach() if self.was_overwritten(weight, self.parts) else None
        fresh = self.copy is not None
        return _rebuild, (self.recipe, self.parts, self.watched, fresh, written)


def _rebuild(
    recipe: Recipe, parts: Parts, watched: tuple[str, ...], fresh: bool, written: Tensor | None
) -> Tensor:
    weight = computed(recipe, parts, watched, fresh)
    if written is not None:
        with torch.no_grad():
            weight.copy_(written)
    return weight


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
