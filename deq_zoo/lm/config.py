"""The shape of a language model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from deq_zoo.checks import check_choices, check_fields, check_integers

_PUBLISHED_ONLY = ("min_evaluations", "adjoint_clip")
_ATTRACTOR_ONLY = (
    *("backbone", "gate_max", "gate_start", "core_start", "rotary_base", "input_rms"),
    "mixing",
    *_PUBLISHED_ONLY,
)
_OTHERS_ONLY = ("attention_dropout", "position_dropout", "init", "leak")


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """The shape of a language model.

    An option of one design is an error in another.

    Args:
        design: the map f: original (one block with norms on its outputs), redesigned (blocks with
            norms on their inputs, a map without a fixed point), convergent (the redesigned blocks
            after a leak of the state, a map with a fixed point) or attractor (gated blocks that
            refine the output of an explicit backbone).
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
        backbone: explicit blocks before the equilibrium, in the attractor.
        gate_max: the largest factor of a branch in a gated block of the attractor.
        gate_start: that factor before training.
        core_start: the last matrix of each branch of a gated block before training: zeros, with
            which the output of the backbone is the fixed point at first, or random, as published.
        rotary_base: the base of the rotary angles in the attractor.
        input_rms: root mean square of the attractor's embeddings before training: a constant factor
            brings them there. With 0 there is no factor, as published: the embeddings are so small
            that a new model with `core_start="random"` has no fixed point which iteration finds.
        mixing: how the attractor is solved: positions (each token has mixing weights and a stop of
            its own, so no later token has an effect on an earlier one, at any number of
            evaluations) or published (the authors' solver and gradients: one set of weights for a
            sequence, and the whole batch stops together).
        min_evaluations: evaluations before a solve with `mixing="published"` may stop.
        adjoint_clip: with `mixing="published"`, the largest size of the one-step correction of the
            gradient, relative to the gradient; 0 does not limit it.
    """

    design: Literal["original", "redesigned", "convergent", "attractor"] = "redesigned"
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
    backbone: int = 3
    gate_max: float = 0.75
    gate_start: float = 0.25
    core_start: Literal["zeros", "random"] = "zeros"
    rotary_base: float = 50_000.0
    input_rms: float = 0.5
    mixing: Literal["positions", "published"] = "positions"
    min_evaluations: int = 6
    adjoint_clip: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self)
        sizes = ("tokens", "width", "heads", "inner", "blocks", "shrink")
        check_integers(1, **{name: getattr(self, name) for name in sizes})
        check_integers(0, embed=self.embed, window=self.window, backbone=self.backbone)
        check_fields(self, 0, "input_rms", "adjoint_clip", "gate_max", finite=True)
        check_fields(self, 0, "rotary_base", "leak", finite=True)
        self._check_used()
        if self.design == "attractor":
            self._check_attractor()
        if self.width % 2 or self.width % self.heads:
            raise ValueError(
                f"width must be even and a multiple of heads, got {self.width} and {self.heads}"
            )
        if self.pre_norm and self.design != "original":
            raise ValueError(
                f"pre_norm would have no effect: the {self.design} design always normalises the "
                "inputs of its blocks"
            )

    def _check_used(self) -> None:
        """Raise `ValueError` for options that have no effect in this design."""
        unused = _OTHERS_ONLY if self.design == "attractor" else _ATTRACTOR_ONLY
        if self.design == "attractor" and self.mixing == "positions":
            unused = (*unused, *_PUBLISHED_ONLY)
        defaults = {f.name: f.default for f in fields(self)}
        wrong = [name for name in unused if getattr(self, name) != defaults[name]]
        if wrong:
            where = f"the design {self.design}"
            where += f" with mixing={self.mixing}" if wrong[0] in _PUBLISHED_ONLY else ""
            raise ValueError(
                f"{wrong[0]}={getattr(self, wrong[0])} would have no effect in {where}: drop it"
            )

    def _check_attractor(self) -> None:
        """Raise `ValueError` for sizes that the attractor cannot have."""
        if self.width // self.heads % 2:
            raise ValueError(
                f"rotary angles need heads of even width, got {self.width} / {self.heads}"
            )
        if not 0 < self.gate_start <= self.gate_max:
            raise ValueError(
                f"gate_start must lie in (0, gate_max = {self.gate_max}], got {self.gate_start}"
            )
        if self.rotary_base <= 1:
            raise ValueError(f"rotary_base must be above 1, got {self.rotary_base}")

    @property
    def has_fixed_point(self) -> bool:
        """Return whether f has a fixed point; without one, iterates grow for ever."""
        return self.design in ("convergent", "attractor") or (
            self.design == "original" and not self.pre_norm
        )
