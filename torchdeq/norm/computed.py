"""Computed weights: tensors that detect writes and can be copied and pickled."""

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

Parts = dict[str, Tensor]  # the parameters and buffers behind a weight, by suffix
Recipe = Callable[[Parts], Tensor]


def computed(recipe: Recipe, parts: Parts, watched: tuple[str, ...], fresh: bool = False) -> Tensor:
    """Return `recipe(parts)`, a tensor that remembers how it was computed.

    Args:
        recipe: computes a new tensor from the parts; must pickle.
        parts: the parameters and buffers of the module.
        watched: the suffixes of the parameters among them.
        fresh: whether initialisers may follow: then a copy of the values is kept, which detects
            writes through `.data` too.
    """
    weight = recipe(parts)
    origin = _Origin(weight, recipe, parts, watched, fresh)
    # Attributes of a plain tensor, not a subclass: compiled functions refuse subclasses.
    vars(weight).update(
        _deq_origin=origin, __deepcopy__=origin.deepcopy, __reduce_ex__=origin.reduce_ex
    )
    return weight


def was_overwritten(weight: Tensor, parts: Parts) -> bool:
    """Return whether an initialiser wrote into a computed weight since it was computed.

    If its parameters have changed too, warn and return False: the write is dropped.
    """
    origin: _Origin | None = getattr(weight, "_deq_origin", None)
    return origin is not None and origin.was_overwritten(weight, parts)


class _Origin:
    """The recipe of a computed weight, with the versions of all tensors at that time.

    A copied or unpickled module gets a weight computed from its own parameters: torch does not
    deepcopy a tensor with a graph, and a detached copy would give the parameters no gradient.
    """

    def __init__(
        self, weight: Tensor, recipe: Recipe, parts: Parts, watched: tuple[str, ...], fresh: bool
    ) -> None:
        self.weight = ref(weight)  # weak: a cycle would keep the weight until a garbage collection
        self.recipe, self.parts, self.watched = recipe, parts, watched
        self.copy = weight.detach().clone() if fresh else None
        self.version, self.grad_fn = version(weight), weight.grad_fn
        self.versions = {suffix: version(part) for suffix, part in parts.items()}

    def was_overwritten(self, weight: Tensor, parts: Parts) -> bool:
        if weight.is_meta or weight.grad_fn is not self.grad_fn:
            return False  # autograd recorded the write: it is a computation, not an initialiser
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
        """Return whether the parameters are as they were when the weight was computed.

        Torch does not count writes through `.data`. If a copy of the weight is kept, it is compared
        with the weight that the current parameters give.
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
        return torch.allclose(now, self.copy, rtol=0.02, atol=1e-6, equal_nan=True)  # a move rounds

    def deepcopy(self, memo: dict[int, Any]) -> Tensor:
        recipe, parts, *rest = self.reduce_ex(2)[1]
        return _rebuild(recipe, deepcopy(parts, memo), *rest)

    def reduce_ex(self, protocol: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        weight = self.weight()
        assert weight is not None  # the weight itself calls this method
        written = weight.detach() if self.was_overwritten(weight, self.parts) else None
        fresh = self.copy is not None
        return _rebuild, (self.recipe, self.parts, self.watched, fresh, written)


def _rebuild(
    recipe: Recipe, parts: Parts, watched: tuple[str, ...], fresh: bool, written: Tensor | None
) -> Tensor:
    """Compute a copied or unpickled weight; write the values that an initialiser left in it."""
    weight = computed(recipe, parts, watched, fresh)
    if written is not None:
        with torch.no_grad():
            weight.copy_(written)
    return weight


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether all elements are equal or both NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
