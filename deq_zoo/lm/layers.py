"""The maps whose fixed point, or unrolled iteration, is the transformer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from deq_zoo.lm.attention import Context, RelativeAttention
from torchdeq import VariationalDropout1d, mem_gc


class FeedForward(nn.Module):
    r"""Two linear maps on every token, $W_2 \, \mathrm{relu}(W_1 x + b_1) + b_2$."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.ff1_net, self.ff2_net = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop1, self.drop2 = VariationalDropout1d(dropout), VariationalDropout1d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop2(self.ff2_net(self.drop1(self.ff1_net(x).relu())))
        return out


class Block(nn.Module):
    """Attention and a feed-forward net; subclasses say how they join the state.

    Args:
        width: D.
        heads: H.
        inner: hidden features of the feed-forward net.
        dropout: of both outputs and the hidden features, frozen during a solve.
        attention_dropout: of the attention weights, likewise.
        recompute: keep no activations of the two halves, compute them again for the gradient.
    """

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
        """(B, Lq, D) the next state."""
        return self._run(self.transform, self._run(self.attend, z, context))

    def attend(self, z: Tensor, *context: Any) -> Tensor:
        """The half with attention; `context` are the fields of a `Context`."""
        raise NotImplementedError

    def transform(self, z: Tensor) -> Tensor:
        """The half with the feed-forward net."""
        raise NotImplementedError

    def remembered(self, z: Tensor) -> Tensor:
        """States as keys and values are made of them."""
        raise NotImplementedError

    def _run(self, half: Callable[..., Tensor], z: Tensor, context: Sequence[Any] = ()) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = mem_gc(half, (z, *context))
            return out
        return half(z, *context)


class PostNormBlock(Block):
    r"""The block of the original DEQ transformer: norms without parameters on the outputs.

    $$y = \mathrm{LN}(z + A(z)), \qquad f(z) = \mathrm{LN}(y + F(y))$$
    """

    affine = False

    def attend(self, z: Tensor, *context: Any) -> Tensor:
        y: Tensor = self.norm1(z + self.drop(self.attention(z, Context(*context))))
        return y

    def transform(self, z: Tensor) -> Tensor:
        y: Tensor = self.norm2(z + self.feed_forward(z))
        return y

    def remembered(self, z: Tensor) -> Tensor:
        return z


class PreNormBlock(Block):
    r"""The block of the redesigned transformer: norms on the inputs, the state is their sum.

    $$y = z + A(\mathrm{LN}(z)), \qquad f(z) = y + F(\mathrm{LN}(y))$$
    """

    affine = True

    def attend(self, z: Tensor, *context: Any) -> Tensor:
        y: Tensor = z + self.drop(self.attention(self.norm1(z), Context(*context)))
        return y

    def transform(self, z: Tensor) -> Tensor:
        y: Tensor = z + self.feed_forward(self.norm2(z))
        return y

    def remembered(self, z: Tensor) -> Tensor:
        h: Tensor = self.norm1(z)
        return h


class Stack(nn.Module):
    """The map f: blocks one after the other, all with the same injection and memory.

    Args:
        blocks: at least one.
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
        """How many states of a token the memory holds."""
        return 1

    def remember(self, z: Tensor, contexts: Sequence[Context]) -> Tensor:
        """(B, L, M) what the memory holds of solved states: as published, the states."""
        return z

    def recall(self, held: Tensor) -> list[Tensor]:
        """(B, L, D) for each block: what it makes keys and values of."""
        return [held] * len(self.blocks)


class LeakyStack(Stack):
    r"""The same after a learnt leak of the state, which gives it a fixed point.

    $$f(z) = \lambda z + g(\lambda z), \qquad \lambda = \sigma(\ell) \in (0, 1)^D$$

    where $z + g(z)$ is the stack of pre-norm blocks. There, $g$ depends on $z$
    through norms only, so it is bounded, and without a leak $f(z + c 1) = f(z) + c 1$: sums
    of bounded steps, which go on for ever. With it all iterates stay within
    $\max |g| / (1 - \max \lambda)$, and a fixed point exists (Brouwer).

    The memory holds what every block has seen of a token in equilibrium. Then a text read in pieces
    has the equilibrium of the whole text, which is not so if all blocks share the final state.

    Args:
        blocks: pre-norm blocks.
        leak: of every feature at first.
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

    def recall(self, held: Tensor) -> list[Tensor]:
        return list(held.chunk(len(self.blocks), dim=-1))
