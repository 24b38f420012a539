"""The map f of each design: its fixed point or its iterates are the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from deq_zoo.lm.attention import Context, RelativeAttention
from deq_zoo.lm.config import LMConfig
from torchdeq import VariationalDropout1d, mem_gc


class FeedForward(nn.Module):
    r"""Two linear maps of every token, $W_2 \, \mathrm{relu}(W_1 x + b_1) + b_2$."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.ff1_net, self.ff2_net = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop1, self.drop2 = VariationalDropout1d(dropout), VariationalDropout1d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop2(self.ff2_net(self.drop1(self.ff1_net(x).relu())))
        return out


class Block(nn.Module):
    """Attention and a feed-forward net; subclasses define where the norms are.

    Args:
        width: D.
        heads: H.
        inner: hidden features of the feed-forward net.
        dropout: probability of dropping a feature, hidden or of an output; fixed during a solve.
        attention_dropout: probability of dropping an attention weight; fixed during a solve.
        recompute: keep no activations of the two halves, and compute them again for the gradient.
    """

    #: Whether norms have parameters, and attention has one between its heads and its output.
    affine: bool

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        dropout: float,
        attention_dropout: float,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        after = nn.LayerNorm(width) if self.affine else nn.Identity()
        self.attention = RelativeAttention(width, heads, after, attention_dropout)
        self.feed_forward = FeedForward(width, inner, dropout)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=self.affine)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=self.affine)
        self.drop = VariationalDropout1d(dropout)
        self.recompute = recompute

    def forward(self, z: Tensor, context: Context) -> Tensor:
        """Return the next state (B, Lq, D)."""
        return self._run(self.transform, self._run(self.attend, z, context))

    def attend(self, z: Tensor, *context: Any) -> Tensor:
        """Return the state after the half with attention; `context` has the fields of `Context`."""
        raise NotImplementedError

    def transform(self, z: Tensor) -> Tensor:
        """Return the state after the half with the feed-forward net."""
        raise NotImplementedError

    def normalise_memory(self, z: Tensor) -> Tensor:
        """Return remembered states as attention takes them."""
        raise NotImplementedError

    def _run(self, half: Callable[..., Tensor], z: Tensor, context: Sequence[Any] = ()) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = mem_gc(half, (z, *context))
            return out
        return half(z, *context)


class PostNormBlock(Block):
    r"""The block of the original DEQ transformer, with norms on its outputs.

    $$y = \mathrm{LN}(z + A(z)), \qquad f(z) = \mathrm{LN}(y + F(y))$$
    """

    affine = False

    def attend(self, z: Tensor, *context: Any) -> Tensor:
        y: Tensor = self.norm1(z + self.drop(self.attention(z, Context(*context))))
        return y

    def transform(self, z: Tensor) -> Tensor:
        y: Tensor = self.norm2(z + self.feed_forward(z))
        return y

    def normalise_memory(self, z: Tensor) -> Tensor:
        return z


class PreNormBlock(Block):
    r"""The block of the redesigned transformer, with norms on its inputs.

    $$y = z + A(\mathrm{LN}(z)), \qquad f(z) = y + F(\mathrm{LN}(y))$$
    """

    affine = True

    def attend(self, z: Tensor, *context: Any) -> Tensor:
        y: Tensor = z + self.drop(self.attention(self.norm1(z), Context(*context)))
        return y

    def transform(self, z: Tensor) -> Tensor:
        y: Tensor = z + self.feed_forward(self.norm2(z))
        return y

    def normalise_memory(self, z: Tensor) -> Tensor:
        h: Tensor = self.norm1(z)
        return h


class PlainPreNormBlock(PreNormBlock):
    """The original block under the authors' option `--pre_lnorm`: its norms have no parameters."""

    affine = False


class Stack(nn.Module):
    """The map f: blocks one after the other, all with the same injection and memory.

    Args:
        blocks: one or more.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(cast("Sequence[Block]", self.blocks))

    def forward(self, z: Tensor, contexts: Sequence[Context]) -> Tensor:
        for block, context in zip(self, contexts, strict=True):
            z = block(z, context)
        return z

    @property
    def memory_states(self) -> int:
        """Return how many states of a token the memory keeps."""
        return 1

    def remember(self, z: Tensor, contexts: Sequence[Context]) -> Tensor:
        """Return the features (B, L, M) that a memory keeps of solved states."""
        return z

    def recall(self, kept: Tensor) -> list[Tensor]:
        """Return for each block the states (B, L, D) that a memory keeps."""
        return [kept] * len(self.blocks)


class LeakyStack(Stack):
    r"""A stack of pre-norm blocks after a learnt leak of the state: a map with a fixed point.

    $$f(z) = \lambda z + g(\lambda z), \qquad \lambda = \sigma(\ell) \in (0, 1)^D$$

    where $z + g(z)$ is the stack of pre-norm blocks. As $g$ depends on $z$ only through norms, $g$
    is bounded. Without a leak $f(z + c 1) = f(z) + c 1$, so iterates are sums of bounded steps and
    grow for ever. With the leak all iterates stay within $\max |g| / (1 - \max \lambda)$, and a
    fixed point exists (Brouwer).

    The memory keeps the input of every block for each token in equilibrium. So a text that is read
    in pieces has the equilibrium of the whole text; if all blocks shared the final state, it would
    not.

    Args:
        blocks: pre-norm blocks.
        width: D.
        leak: of every feature, before training.
    """

    def __init__(self, blocks: Sequence[Block], width: int, leak: float) -> None:
        super().__init__(blocks)
        if not 0 < leak < 1:
            raise ValueError(f"the leak must lie in (0, 1), got {leak}")
        self.leak = nn.Parameter(torch.full((width,), leak).logit())

    def forward(self, z: Tensor, contexts: Sequence[Context]) -> Tensor:
        return super().forward(self.leak.sigmoid() * z, contexts)

    @property
    def memory_states(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def remember(self, z: Tensor, contexts: Sequence[Context]) -> Tensor:
        seen = [self.leak.sigmoid() * z]
        for block, context in zip(list(self)[:-1], contexts, strict=False):
            seen.append(block(seen[-1], context))
        return torch.cat(seen, dim=-1)

    def recall(self, kept: Tensor) -> list[Tensor]:
        return list(kept.chunk(len(self.blocks), dim=-1))


def make_map(config: LMConfig) -> Stack:
    """Return the map f of a design, freshly initialised."""
    c = config
    kind: type[Block] = PreNormBlock
    if c.design == "original":
        kind = PlainPreNormBlock if c.pre_norm else PostNormBlock
    blocks = [
        kind(c.width, c.heads, c.inner, c.dropout, c.attention_dropout, c.recompute)
        for _ in range(c.blocks)
    ]
    return LeakyStack(blocks, c.width, c.leak) if c.design == "convergent" else Stack(blocks)
