"""Inference that spends evaluations where they are needed: streams, halting and restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.reason.core import States
from deq_zoo.reason.keyed import draw_frozen_noise, draw_starts
from deq_zoo.reason.reasoned import relative_change
from deq_zoo.reason.search import Search, relative_tolerance
from deq_zoo.record import SolverRecord
from torchdeq import SolverStat
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


def open_search(model: Reasoner, search: Search, budget: int | None = None) -> Stream:
    """Return a stream whose requests are puzzles, with the tokens of a puzzle as its `id`.

    Args:
        model: in evaluation mode.
        search: the options.
        budget: evaluations of an attempt; those of the DEQ by default.
    """
    deq, net = model.deq, model.net
    if model.training:
        raise ZooError(
            "a search needs a model in evaluation mode, which computes with the average of its "
            "weights: call model.eval()"
        )
    solver, budget = deq.make_solver({}), deq.eval_f_max_iter if budget is None else budget
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
    tolerance = relative_tolerance(deq.config.f_stop)
    if search.halt == "both" and not tolerance:
        raise ZooError("halt=both needs a relative tolerance: set f_stop_mode=rel and f_tol")
    stop = replace(deq.config.f_stop, max_iter=budget)
    if search.halt != "residual":
        stop = replace(stop, tol=None, rtol=None, atol=None, return_final=True)
    halt = None if search.halt == "residual" else partial(_halts, search, tolerance)
    votes: Any = partial(answer_key, model)
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

    A puzzle's start depends on the seed and on its tokens alone.

    Args:
        model: in evaluation mode.
        tokens: (B, L).
        search: the options.
        ids: (B,), the row of each puzzle's own vector.
    """
    for result in _run(open_search(model, search), _requests(model, tokens, search, ids)):
        yield as_answer(model, result)


def find_answer(
    model: Reasoner,
    tokens: Tensor,
    search: Search,
    z0: States | None = None,
    budget: int | None = None,
) -> tuple[Answer, States, SolverStat]:
    """Return the answer to one puzzle, its states (with a batch of 1) and their statistics.

    Args:
        model: in evaluation mode.
        tokens: (1, L).
        search: the options.
        z0: the start; there are no restarts then.
        budget: evaluations of an attempt; those of the DEQ by default.
    """
    (request,) = _requests(model, tokens, search, None)
    if z0 is not None:
        model.check_states(z0, 1)
        search = replace(search, restarts=0)
        request = replace(request, z0=tuple(h[0] for h in z0))
    (result,) = _run(open_search(model, search, budget), [request])
    states = States(*(h[None] for h in result.z))
    return as_answer(model, result), states, _as_stats(result)


def _run(stream: Stream, requests: Iterable[Request]) -> Iterator[Result]:
    for result in stream.run(requests, ordered=True):
        if result.error is not None:
            raise result.error
        yield result


def _requests(
    model: Reasoner, tokens: Tensor, search: Search, ids: Tensor | None
) -> Iterator[Request]:
    ids = torch.zeros_like(tokens[:, 0]) if ids is None else ids
    for part, own in zip(tokens.split(search.slots), ids.split(search.slots), strict=True):
        x = model.inject(part.to(model.device), own.to(model.device))
        start = draw_starts(model, part, search.seed)
        samples = (*start, x, *draw_frozen_noise(model, part, search.seed))
        for puzzle, y, z, *args in zip(part.tolist(), *samples, strict=True):
            yield Request((y, z), tuple(args), id=puzzle)


def _start_again(model: Reasoner, search: Search, request: Request, attempt: int) -> Any:
    puzzle = torch.tensor([request.id])
    return tuple(h[0] for h in draw_starts(model, puzzle, search.seed, attempt))


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


def answer_key(model: Reasoner, result: Result) -> tuple[int, ...]:
    """Return the answer of a result as numbers that a vote can count."""
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


def _as_stats(result: Result) -> SolverStat:
    """Return the statistics of a finished request; one that was halted counts as converged."""
    halted = result.status is StreamStatus.HALTED
    status = StreamStatus.CONVERGED if halted else result.status
    return SolverStat(
        abs_lowest=torch.tensor([result.residual]),
        rel_lowest=torch.tensor([result.relative]),
        nstep=torch.tensor([result.steps]),
        nfe=result.evaluations,
        status=torch.tensor([int(status)], dtype=torch.int8),
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
