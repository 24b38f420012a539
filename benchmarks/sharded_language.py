"""A language model that FSDP2 can shard by its layer, by the blocks of f or by their linear maps.

It is the model of `deq_zoo.lm` with what counts of bytes and collectives need: a plain softmax, and
blocks of f that compute the keys of the memory in their own `forward`, since FSDP gathers the
weights of a unit for its `forward` only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from deq_zoo.lm.adaptive import AdaptiveVocabulary
from deq_zoo.lm.attention import Context, RelativeAttention, causal_mask, sinusoids
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.layers import Block
from deq_zoo.lm.memory import Memory
from deq_zoo.lm.model import DEQTransformer
from torchdeq import DEQConfig

TOKENS_AT_ONCE = 50  # of the softmax


class Layer(nn.Module):
    """The equilibrium layer: its `forward` holds the whole solve.

    Args:
        core: injection, f and DEQ.
    """

    def __init__(self, core: DEQTransformer) -> None:
        super().__init__()
        self.core = core

    def forward(self, e: Tensor, memory: Memory, budget: int) -> Tensor:
        """Return the states (B, L, D) for vectors of tokens (B, L, D)."""
        core, given = self.core, list[Any]()
        u = core.injection(e)
        if isinstance(core.func.blocks[0], Unit):
            past, length = memory.z.shape[1], e.shape[1]
            rest = (
                sinusoids(past + length, e.shape[2], like=e),
                causal_mask(length, past, 0, like=e),
            )
            given = [(u, z, memory.u, *rest) for z in core.func.recall(memory.z)]
        else:
            given = list(core.contexts(u, memory))
        states, _ = core.deq(
            lambda z: core.func(z, given), torch.zeros_like(e), f_max_iter=budget,
            solver_kwargs={"return_final": True},
        )  # fmt: skip
        z: Tensor = core.output_norm(states[-1])
        return z


class Unit(nn.Module):
    """A block of f that computes keys and values of the memory itself.

    Args:
        block: the block.
        by_calls: whether linear maps are called, so that each can be a unit of its own.
    """

    def __init__(self, block: Block, by_calls: bool) -> None:
        super().__init__()
        self.block = block
        if by_calls:
            calls = _Calls(block.attention)
            block.attention._project = calls.project  # type: ignore[method-assign,assignment]
            block.attention.keys = calls.keys  # type: ignore[method-assign,assignment]

    def forward(self, z: Tensor, given: Any) -> Tensor:
        """Return the next state, given injection, memory, distances and mask."""
        u, kept, memory_u, positions, mask = given
        attention = self.block.attention
        keys = attention.keys(self.block.normalise_memory(kept), memory_u)
        out: Tensor = self.block(z, Context(u, *keys, attention.distances(positions), mask))
        return out


class _Calls:
    """Queries, keys and values by calls of the linear map, so that its weight is gathered."""

    def __init__(self, attention: RelativeAttention) -> None:
        self.attention = attention

    def project(self, x: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, H, L, d)."""
        flat: Tensor = self.attention.qkv_net(x) + u
        q, k, v = flat.unflatten(2, (3, self.attention.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def keys(self, x: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values (B, H, L, d) of the memory."""
        return self.project(x, u)[1:]


class Language(nn.Module):
    """A language model with a plain softmax around an equilibrium layer.

    Args:
        config: the shape.
        deq: options of the DEQ.
    """

    def __init__(self, config: LMConfig, deq: DEQConfig) -> None:
        super().__init__()
        core = DEQTransformer(config, deq)
        self.vocabulary: AdaptiveVocabulary = core.vocabulary
        for name in ("cluster_weight", "cluster_bias"):  # without clusters: no rows to shard
            empty = getattr(self.vocabulary, name).detach()
            delattr(self.vocabulary, name)
            self.vocabulary.register_buffer(name, empty)
        del core.vocabulary
        self.layer = Layer(core)

    def forward(self, ids: Tensor, target: Tensor, memory: Memory, budget: int) -> Tensor:
        """Return the mean loss of the tokens that follow."""
        z = self.layer(self.vocabulary.embed(ids), memory, budget)
        parts = zip(z.flatten(0, 1).split(TOKENS_AT_ONCE), target.flatten().split(TOKENS_AT_ONCE),
                    strict=True)  # fmt: skip
        losses = [
            checkpoint(self.vocabulary.nll, a[None], b[None], use_reentrant=False) for a, b in parts
        ]
        return torch.cat(losses, dim=1).mean()


def shard(model: Language, unit: str, world: int) -> None:
    """Shard a model, with units of one kind inside its layer."""
    with unset_fake_temporarily():  # torch reads the ranks of a mesh
        mesh = init_device_mesh("cpu", (world,))
    func = model.layer.core.func
    if unit != "layer":
        func.blocks = nn.ModuleList(Unit(block, unit == "linear") for block in func)
        kind = Unit if unit == "block" else nn.Linear
        for module in [m for m in func.modules() if isinstance(m, kind)]:
            fully_shard(module, mesh=mesh)
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
