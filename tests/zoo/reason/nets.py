"""Tiny reasoners for tests, with a fixed point that every solver finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deq_zoo.reason.config import ReasonConfig
from deq_zoo.reason.model import Reasoner

#: A tiny EqR, whose recursion settles with the weights of `make_model`.
SETTLING = ReasonConfig(
    cells=16, vocab=6, width=8, blocks=1, rounds=1, inner=1, step_share=0.95, noise=0.0, max_steps=3
)


def make_model(net: ReasonConfig = SETTLING, seed: int = 0, **options: Any) -> Reasoner:
    """Return a model in float64 with a halting head that is not constant."""
    torch.manual_seed(seed)
    deq = {"f_max_iter": 1, "eval_f_max_iter": 200, "f_tol": 1e-9, "f_stop_mode": "rel"}
    model = Reasoner(net, {**deq, **options.pop("deq", {})}, **{"decay": 0.0, **options}).double()
    with torch.no_grad():
        for name, p in model.core.named_parameters():
            if name.startswith("L_level"):
                p.mul_(0.3)
        model.core.embed_tokens.embedding_weight.mul_(20)  # the puzzle outweighs the old states
        model.core.q_head.weight.normal_()
    model.facts = {"puzzle": "sudoku", "side": 4}
    return model


def make_tokens(n: int = 3, net: ReasonConfig = SETTLING) -> Tensor:
    """Return random tokens (n, cells)."""
    rng = torch.Generator().manual_seed(5)
    return torch.randint(1, net.vocab, (n, net.cells), generator=rng)


def noisy(scale: float = 0.05) -> ReasonConfig:
    """Return the same net with noise."""
    return replace(SETTLING, noise=scale)
