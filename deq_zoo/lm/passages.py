"""Scoring many passages of one length, without a memory: each is a sample of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.lm.attention import Context
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.model import DEQTransformer
from deq_zoo.lm.reading import join_stats
from deq_zoo.streaming import open_stream
from torchdeq import SolverStat, reset_norm


def score_passages(
    model: LanguageModel, ids: Tensor, slots: int = 0, batch: int = 64
) -> tuple[Tensor, SolverStat]:
    """Return log-probabilities (N, L) of the tokens after the first, and statistics.

    Args:
        model: in evaluation mode.
        ids: (N, L + 1) tokens of N passages.
        slots: passages that are solved at the same time, where one that has converged makes room
            for the next; 0 solves each batch to its end.
        batch: passages whose log-probabilities are computed at once.
    """
    parts = [part.to(model.device) for part in ids.split(batch)]
    with torch.no_grad():
        if not slots:
            solved = list(_in_batches(model, parts))
        elif isinstance(model, DEQTransformer):
            solved = list(_in_stream(model, parts, slots))
        else:
            raise ZooError(
                f"slots={slots} needs passages that are samples, and the positions of an attractor "
                "are: set slots=0"
            )
        log_probs = [-model.nll(z, part[:, 1:]) for part, (z, _) in zip(parts, solved, strict=True)]
    return torch.cat(log_probs).float().cpu(), join_stats([stats for _, stats in solved])


def _in_batches(model: LanguageModel, parts: list[Tensor]) -> Iterator[tuple[Tensor, SolverStat]]:
    """Yield states and statistics of every batch, each solved to its end."""
    for part in parts:
        out = model(part[:, :-1])
        yield out.z, out.stats


def _in_stream(
    model: DEQTransformer, parts: list[Tensor], slots: int
) -> Iterator[tuple[Tensor, SolverStat]]:
    """Yield states and statistics of every batch; passages enter and leave a running batch."""
    reset_norm(model.func)
    shared = model.contexts(model.inject(parts[0][:1, :-1])) if parts else []

    def f(z: Tensor, u: Tensor) -> Tensor:
        out: Tensor = model.func(z, [_of_batch(context, u) for context in shared])
        return out

    def batches() -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        for part in parts:
            u = model.inject(part[:, :-1])
            dtype = model.dtype
            yield u.new_zeros(*u.shape[:2], model.config.width, dtype=dtype), (u,)

    stream = open_stream(model.deq, f, slots, return_final=not model.config.has_fixed_point)
    for solution in stream.solve_batches(batches(), on_failure=model.deq.config.on_failure):
        yield solution.z, solution.stats


def _of_batch(context: Context, u: Tensor) -> Context:
    """Return the context of one passage for a batch: there is no memory, so only u differs."""
    k, v = (t.expand(len(u), -1, -1, -1) for t in (context.k, context.v))
    return context._replace(u=u, k=k, v=v)
