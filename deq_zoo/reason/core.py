"""The networks of a reasoner and its recursion on two states: the answer y and the scratch z."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.reason.config import ReasonConfig
from deq_zoo.reason.layers import Embedding, Linear, Network, Tables, make_rotation

#: The part of a supervision step that has a graph: its last inner and its last answer step, its
#: last round, or all of it.
Tail = Literal["one_step", "round", "all"]
#: Returns the noise of the next step, of the shape of a state; None for a step without noise.
Noise = Callable[[Tensor], Tensor | None]

_LEARNED = 0.707106781  # as published, with nine digits


class States(NamedTuple):
    """The two states of a reasoner, (B, N, d) each: the answer and the scratch."""

    y: Tensor
    z: Tensor


def no_noise(h: Tensor) -> None:
    """Return None: the steps are without noise."""
    return None


def check_whole(name: str, numbers: Tensor) -> None:
    """Raise `TypeError` for tensors that are no whole numbers; flags would select, not index."""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, got {numbers.dtype}")


def check_tokens(tokens: Tensor, net: ReasonConfig) -> None:
    """Raise for tensors that are no puzzles of a network."""
    if tokens.dim() != 2 or tokens.shape[1] != net.cells:
        raise ValueError(f"puzzles must be (batch, {net.cells}), got {tuple(tokens.shape)}")
    check_whole("puzzles", tokens)
    if tokens.device.type != "cpu" or torch.compiler.is_exporting() or not tokens.numel():
        return  # an accelerator checks indices itself, and a graph cannot ask for numbers
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < net.vocab:
        raise ValueError(
            f"tokens must be from 0 to {net.vocab - 1}, got {int(tokens.min())} to "
            f"{int(tokens.max())}"
        )


class Core(nn.Module):
    r"""The trained part of a reasoner: embedding, networks and heads.

    A round is $n$ inner steps $z \leftarrow F(z, y + x)$ and one answer step
    $y \leftarrow F(y, z)$; a supervision step is $T$ rounds. EqR relaxes each step and adds noise:
    $(1 - \lambda)\,h + \lambda\,F(h, \cdot) + \beta\,\epsilon$.

    Args:
        net: the shape.
    """

    def __init__(self, net: ReasonConfig) -> None:
        super().__init__()
        self.net = net
        self.embed_tokens = Embedding(net.vocab, net.width)
        self.lm_head = Linear(net.width, net.vocab)
        self.q_head = Linear(net.width, 2, bias=True)
        if net.position == "learned":
            self.embed_pos = Embedding(net.positions, net.width)
        if net.answer_blocks:
            self.H_level = Network(net, net.answer_blocks)
        self.L_level = Network(net, net.blocks)
        self._rotation = make_rotation(net)
        with torch.no_grad():  # no puzzle halts early before the head has learnt when to
            self.q_head.weight.zero_()
            assert self.q_head.bias is not None
            self.q_head.bias.fill_(-5.0)

    def embed(self, tokens: Tensor, rows: Tensor | None) -> Tensor:
        """Return the injection x (B, N, d).

        Args:
            tokens: (B, L).
            rows: (B, k), the own vector of each puzzle; None without slots.
        """
        net = self.net
        check_tokens(tokens, net)
        # Indexing by hand: autocast leaves the rows in the precision of the weights.
        x = self.embed_tokens.embedding_weight[tokens.long()]  # bytes would select by a mask
        if rows is not None:
            missing = net.extra * net.width - rows.shape[1]
            padded = torch.nn.functional.pad(rows, (0, missing)).view(-1, net.extra, net.width)
            x = torch.cat((padded.to(x.dtype), x), dim=1)
        if net.position == "learned":
            x = _LEARNED * (x + self.embed_pos.embedding_weight)
        return sqrt(net.width) * x

    def inner_step(self, states: States, x: Tensor, eps: Tensor | None = None) -> States:
        """Return the states after one step of z."""
        y, z = states
        return States(y, self._step(self.L_level, z, y + x, eps))

    def answer_step(self, states: States, eps: Tensor | None = None) -> States:
        """Return the states after one step of y."""
        y, z = states
        network = self.H_level if self.net.answer_blocks else self.L_level
        return States(self._step(network, y, z, eps), z)

    def _step(self, network: Network, h: Tensor, inject: Tensor, eps: Tensor | None) -> Tensor:
        image: Tensor = network(h, inject, self._tables(h))
        if self.net.kind != "eqr":
            return image
        share = self.net.step_share
        h = (1 - share) * h + share * image
        return h if eps is None or not self.net.noise else h + self.net.noise * eps

    def _tables(self, h: Tensor) -> Tables | None:
        return None if self._rotation is None else self._rotation.tables(h)

    def rounds(
        self, states: States, x: Tensor, noise: Noise = no_noise, tail: Tail = "all"
    ) -> Iterator[States]:
        """Yield the states after each round of a supervision step.

        Args:
            states: where to start. They get a gradient only if all of the step has a graph.
            x: the injection.
            noise: called once for each step, in order.
            tail: the part that has a graph, if the grad mode is on.
        """
        net, wanted = self.net, torch.is_grad_enabled()
        first = {"all": 0, "round": net.calls - net.inner - 1, "one_step": net.calls - 2}[tail]
        for k in range(net.calls):
            if k == first and tail != "all":
                states = States(*(h.detach() for h in states))
                if torch.is_autocast_enabled(x.device.type):
                    torch.clear_autocast_cache()  # it holds weights that were cast without a graph
            with torch.set_grad_enabled(wanted and k >= first):
                answers = (k + 1) % (net.inner + 1) == 0
                h = states.y if answers else states.z
                eps = noise(h) if net.kind == "eqr" and net.noise else None
                if answers:
                    states = self.answer_step(states, eps)
                else:
                    states = self.inner_step(states, x, eps)
            if answers:
                yield states

    def supervise(
        self, states: States, x: Tensor, noise: Noise = no_noise, tail: Tail = "all"
    ) -> States:
        """Return the states after one supervision step; see `rounds`."""
        for after in self.rounds(states, x, noise, tail):
            states = after
        return states

    def read(self, y: Tensor) -> Tensor:
        """Return the logits (B, L, V) of an answer state."""
        logits: Tensor = self.lm_head(y[:, self.net.extra :])
        return logits

    def halting(self, y: Tensor) -> Tensor:
        """Return (B, 2), logits of halting and of going on.

        They are read from the first position; from the mean of all where positions only see their
        neighbours.
        """
        q: Tensor = self.q_head(y.mean(1) if self.net.mixer == "conv" else y[:, 0])
        return q if q.dtype == torch.float64 else q.float()
