"""Inference that spends evaluations where they are needed: streams, halting and restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.reason.core import States
from deq_zoo.reason.reasoned import relative_change
from deq_zoo.reason.search import Search
from deq_zoo.record import SolverRecord
from deq_zoo.task import generator
from torchdeq.stream import Request, Result, Stream, StreamStatus

if TYPE_CHECKING:
    from deq_zoo.reason.model import Reasoner


@dataclass(frozen=True)
class Answer:
    """The answer to one puzzle.

    Args:
        tokens: (L,).
        status: how the search ended.
        residual: the distance of the states from their image, relative to its size; low for an
            answer that is settled.
        head: the probability, by the halting head, that the answer is right.
        evaluations: supervision steps of all attempts.
        attempts: starts that were tried.
    """

    tokens: Tensor
    status: StreamStatus
    residual: float
    head: float
    evaluations: int
    attempts: int

    @property
    def settled(self) -> bool:
        """Return whether the search ended before its budget did."""
        return not self.status.failed


def open_search(model: Reasoner, search: Search) -> Stream:
    """Return a stream whose requests are puzzles, in evaluation mode.

    Args:
        model: in evaluation mode.
        search: the options.
    """
    deq, net = model.deq, model.net
    solver, budget = deq.make_solver({}), deq.eval_f_max_iter
    if not budget or not solver.streams:
        raise ZooError(
            "a search needs a solver whose puzzles can come and go, and a budget: got "
            f"{solver} and {budget} evaluations; set f_solver to fixed_point_iter, anderson or "
            "broyden, and eval_f_max_iter"
        )
    if search.restarts and net.kind != "eqr":
        raise ZooError(
            f"restarts={search.restarts} need random starts, which EqR has: {net.kind.upper()} "
            "always starts from the same states"
        )
    if search.halt == "both" and not _tolerance(model):
        raise ZooError("halt=both needs a relative tolerance: set f_stop_mode=rel and f_tol")
    stop = replace(deq.config.f_stop, max_iter=budget)
    if search.halt != "residual":
        stop = replace(stop, tol=None, rtol=None, atol=None, return_final=True)
    halt = None if search.halt == "residual" else partial(_halts, search, _tolerance(model))
    votes: Any = partial(_vote, model)
    return Stream(
        partial(_step, model),
        slots=search.slots,
        solver=solver,
        stop=stop,
        has_aux=True,
        halt=halt,
        restart=partial(_start_again, model, search) if search.restarts else None,
        restarts=search.restarts,
        choose=votes if search.choose == "vote" else "residual",
    )


def find_answers(
    model: Reasoner, tokens: Tensor, search: Search, ids: Tensor | None = None
) -> Iterator[Answer]:
    """Yield the answer to each puzzle, in order.

    A puzzle's start depends on the seed and on its place alone.

    Args:
        model: in evaluation mode.
        tokens: (B, L).
        search: the options.
        ids: (B,), the row of each puzzle's own vector.
    """
    stream = open_search(model, search)
    for result in stream.run(_requests(model, tokens, search, ids), ordered=True):
        if result.error is not None:
            raise result.error
        yield as_answer(model, result)


def _requests(
    model: Reasoner, tokens: Tensor, search: Search, ids: Tensor | None
) -> Iterator[Request]:
    ids = torch.zeros_like(tokens[:, 0]) if ids is None else ids
    places = torch.arange(len(tokens)).split(search.slots)
    for part in places:
        x = model.inject(tokens[part].to(model.device), ids[part].to(model.device))
        for row, place in zip(x, part.tolist(), strict=True):
            start = start_of(model, search, place, 0)
            noise = model.freeze_noise(start, generator("noise", search.seed, place))
            z0 = tuple(h[0] for h in start)
            yield Request(z0, (row, *(eps[0] for eps in noise)), id=place)


def start_of(model: Reasoner, search: Search, place: int, attempt: int) -> States:
    """Return the start of one attempt at one puzzle, with a batch of 1."""
    return model.start(1, generator("start", search.seed, place, attempt))


def _start_again(model: Reasoner, search: Search, request: Request, attempt: int) -> Any:
    return tuple(h[0] for h in start_of(model, search, request.id, attempt))


def _step(model: Reasoner, y: Tensor, z: Tensor, *args: Tensor) -> tuple[Any, Any]:
    """Return the states after one supervision step; beside them, what halting looks at."""
    after = model.apply_step(y, z, *args)
    aux = {"q": model.body.halting(after.y), "change": relative_change(States(y, z), after)}
    return tuple(after), aux


def _halts(search: Search, tolerance: float, states: Any, aux: dict[str, Tensor]) -> Tensor:
    """Return (b,) which puzzles halt: the head says so, and the residual, too, with `both`."""
    sure = aux["q"][:, 0] > 0
    if search.halt == "both":
        sure = sure & (aux["change"] <= tolerance)
    return sure


def _tolerance(model: Reasoner) -> float:
    """Return the relative tolerance of the DEQ, for halting by both."""
    stop = model.deq.config.f_stop
    if stop.mode == "rel" and stop.tol:
        return stop.tol
    return stop.rtol or 0.0


def _vote(model: Reasoner, result: Result) -> tuple[int, ...]:
    return tuple(_read(model, result).tolist())


def _read(model: Reasoner, result: Result) -> Tensor:
    y: Any = result.z[0]
    return model.body.read(y[None])[0].argmax(-1)


def as_answer(model: Reasoner, result: Result) -> Answer:
    """Return the answer of a finished request."""
    q = model.body.halting(result.z[0][None])[0, 0]
    return Answer(
        _read(model, result).cpu(),
        result.status,
        result.relative,
        float(q.sigmoid()),
        result.evaluations,
        result.attempts,
    )


def record_answers(record: SolverRecord, answers: Sequence[Answer]) -> None:
    """Add the evaluations, residuals and statuses of answers to a record."""
    for answer in answers:
        record.samples += 1
        record.nfe += answer.evaluations
        record.statuses[answer.status.name] += 1
        record.steps[answer.evaluations] += 1
        if answer.residual < float("inf"):
            record.residual += answer.residual
            record.finite += 1
