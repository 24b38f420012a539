"""Baselines of the language models: explicit networks, other starts, decoding without a memory.

Two networks are stored as `explicit`: `Explicit`, a Transformer-XL, in the results of
`benchmarks.lm`, and `Plain`, the blocks of an attractor, in those of `lm_designs` and
`lm_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.lm import DEQTransformer, LMConfig, LMOutput, Memory
from deq_zoo.lm.attention import Context, causal_mask, sinusoids
from deq_zoo.lm.attractor.layers import Surroundings
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.task import LanguageTask
from torchdeq import SolverStat, reset_dropout, reset_norm


class Explicit(DEQTransformer):
    """A Transformer-XL: the blocks of the redesigned model, applied once to the embedding.

    Every block has a memory of its own. This is `explicit` of `benchmarks.lm`, and not of
    `lm_designs`.
    """

    def forward(
        self, ids: Tensor, z0: Tensor | None = None, *, memory: Memory | None = None, **call: Any
    ) -> LMOutput:
        if self.training:
            reset_dropout(self)
        reset_norm(self.func)
        z = self.embedding_drop(self.vocabulary.embed(ids))
        u = self.injection(z)
        memory = memory or self.empty_memory(u)
        past, length, width = memory.z.shape[1], ids.shape[1], self.config.width
        positions = self.position_drop(sinusoids(past + length, width, like=z)[None])[0]
        mask = causal_mask(length, past, self.config.window, like=u)
        seen = []
        for block, z_past in zip(self.func, memory.z.split(width, dim=2), strict=True):
            seen.append(z.detach())
            keys = block.attention.keys(block.normalise_memory(z_past), memory.u)
            z = block(z, Context(u, *keys, block.attention.distances(positions), mask))
        kept = torch.cat(seen, dim=2)
        return LMOutput(
            predictions=[z], state=z.detach(), stats=SolverStat(), u=u, kept=kept, f=lambda z: z
        )

    def empty_memory(self, like: Tensor) -> Memory:
        z, u = super().empty_memory(like)
        return Memory(z.repeat(1, 1, self.config.blocks), u)


class Recomputing:
    """A decoder that solves the whole text again for every token.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._text: Tensor | None = None

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Add tokens (B, n) to the text; return log-probabilities (B, V) of the token after."""
        self._text = ids if self._text is None else torch.cat((self._text, ids), dim=1)
        return self.model.log_prob(self.model(self._text).z[:, -1:])[:, 0]


class Plain(Attractor):
    """The blocks of an attractor, all of them explicit: as many, and of the same width.

    This is `explicit` of `benchmarks.lm_designs` and `lm_reference`, and not of `benchmarks.lm`.

    Args:
        config: the shape of the attractor.
        deq: options of the DEQ, without effect.
    """

    def __init__(self, config: LMConfig, deq: Any = None) -> None:
        super().__init__(replace(config, backbone=config.backbone + config.blocks, blocks=1), deq)
        self.core = nn.ModuleList()

    def solve(
        self,
        c: Tensor,
        around: Sequence[Surroundings],
        kept: Tensor,
        z0: Tensor | None = None,
        **call: Any,
    ) -> LMOutput:
        return LMOutput(
            predictions=[c], state=c.detach(), stats=SolverStat(), u=c, kept=kept, f=lambda z: z
        )


class FromZeros(Attractor):
    """An attractor whose solve starts at zeros, not at the output of the backbone."""

    def forward(
        self, ids: Tensor, z0: Tensor | None = None, *, memory: Memory | None = None, **call: Any
    ) -> LMOutput:
        zeros = self.output_norm.weight.new_zeros(*ids.shape, self.config.width)
        return super().forward(ids, zeros if z0 is None else z0, memory=memory, **call)


@dataclass(frozen=True)
class RivalTask(LanguageTask):
    """A task of language models that may build a baseline in their place.

    Args:
        rival: the class of the baseline.
    """

    rival: type[Attractor] | None = None

    def build(self, facts: Mapping[str, Any] | None = None) -> LanguageModel:
        own = super().build(facts)
        return own if self.rival is None else self.rival(self.net, own.deq.config)


#: Changes of a task by which `Plain` takes the place of an attractor.
EXPLICIT: dict[str, Any] = {"rival": Plain, "ahead": 0, "explicit": 0, "consistency": 0.0}
