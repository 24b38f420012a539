"""The shape of a DEQ transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deq_zoo.checks import check_fields


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """The shape of a DEQ transformer.

    Args:
        design: the map f: original (one block with norms on its outputs), redesigned (blocks with
            norms on their inputs, a map without a fixed point) or convergent (the redesigned blocks
            after a leak of the state, a map with a fixed point).
        tokens: size of the vocabulary, V.
        width: features of the state, D.
        heads: heads of attention.
        inner: hidden features of each feed-forward net.
        blocks: blocks in one evaluation of f.
        embed: width of the vectors in the first cluster, E; 0 means `width`.
        cutoffs: ids at which further clusters of the vocabulary begin; none means a plain softmax.
        shrink: how many times narrower the vectors of each cluster are than those of the one
            before.
        pre_norm: in the original design, normalise the inputs of the block and not its outputs, as
            the authors' option `--pre_lnorm` does; this map has no fixed point.
        dropout: probability of dropping a feature, for all tokens and evaluations of f alike.
        attention_dropout: probability of dropping an attention weight.
        position_dropout: whether dropout removes features of all distances, or whole distances.
        window: how many tokens attention looks back; 0 means all there are.
        init: distribution of the matrices in f: normal (standard deviation 0.01), uniform by
            fan-in, as in the published original, or scaled: uniform by fan-in for the injection,
            too, with which small models start to learn sooner.
        leak: the factor on the state in the convergent map, before training.
        recompute: keep no activations of f, and compute them again for the gradient.
    """

    design: Literal["original", "redesigned", "convergent"] = "redesigned"
    tokens: int = 256
    width: int = 128
    heads: int = 4
    inner: int = 512
    blocks: int = 3
    embed: int = 0
    cutoffs: tuple[int, ...] = ()
    shrink: int = 1
    pre_norm: bool = False
    dropout: float = 0.05
    attention_dropout: float = 0.0
    position_dropout: Literal["features", "offsets"] = "features"
    window: int = 0
    init: Literal["normal", "uniform", "scaled"] = "normal"
    leak: float = 0.7
    recompute: bool = False

    def __post_init__(self) -> None:
        check_fields(self, 1, "tokens", "width", "heads", "inner", "blocks", "shrink")
        check_fields(self, 0, "embed", "window")
        if self.width % 2 or self.width % self.heads:
            raise ValueError(
                f"width must be even and a multiple of heads, got {self.width} and {self.heads}"
            )
        if self.pre_norm and self.design != "original":
            raise ValueError(
                f"pre_norm would have no effect: the {self.design} design always normalises the "
                "inputs of its blocks"
            )

    @property
    def has_fixed_point(self) -> bool:
        """Return whether f has a fixed point; without one, iterates grow for ever."""
        return self.design == "convergent" or (self.design == "original" and not self.pre_norm)
