"""Halting, restarts and the choice among attempts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deq_zoo.errors import ZooError
from deq_zoo.reason.choice import (
    convergence_scores,
    pass_rate,
    selection_metrics,
    vote,
)
from deq_zoo.reason.evaluation import ranking
from deq_zoo.reason.inference import find_answers
from deq_zoo.reason.keyed import draw_frozen_noise, draw_starts, recursion_noise
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.search import Search
from tests.golden import assert_matches, load_facts, load_tensors, select
from tests.zoo.reason.nets import SETTLING, make_model, make_tokens, noisy
from torchdeq.stream import StreamStatus


def with_head(model: Reasoner, logit: float) -> Reasoner:
    """Give a model a halting head that always says the same."""
    with torch.no_grad():
        model.core.q_head.weight.zero_()
        assert model.core.q_head.bias is not None
        model.core.q_head.bias.fill_(logit)
    return model.eval()


@torch.no_grad()
def test_a_stream_gives_each_puzzle_the_answer_of_a_solve_of_its_own() -> None:
    model, tokens = make_model().eval(), make_tokens(7)
    search = Search(slots=3)
    answers = list(find_answers(model, tokens, search))
    for place, answer in enumerate(answers):
        row = tokens[place : place + 1]
        alone = model(row, draw_starts(model, row, search.seed))
        assert torch.equal(answer.tokens, alone.prediction[0].argmax(-1))
        assert answer.status is StreamStatus.CONVERGED
        assert answer.evaluations == int(alone.stats["nstep"][0])
        assert answer.residual <= 1e-9
        assert answer.attempts == 1
        assert answer.settled


@torch.no_grad()
def test_the_head_ends_an_attempt_and_both_need_the_residual_too() -> None:
    tokens, sure = make_tokens(4), with_head(make_model(), 5.0)
    by_head = list(find_answers(sure, tokens, Search(halt="head")))
    assert [answer.evaluations for answer in by_head] == [1] * 4
    assert by_head[0].status is StreamStatus.HALTED
    assert by_head[0].head == pytest.approx(0.9933, abs=1e-3)
    by_residual = list(find_answers(sure, tokens, Search()))
    by_both = list(find_answers(sure, tokens, Search(halt="both")))
    for one, two in zip(by_residual, by_both, strict=True):
        assert two.status is StreamStatus.HALTED
        assert two.evaluations == one.evaluations
    unsure = with_head(make_model(deq={"eval_f_max_iter": 9}), -5.0)
    late = list(find_answers(unsure, tokens, Search(halt="both")))
    assert {(answer.evaluations, answer.status) for answer in late} == {(9, StreamStatus.MAX_ITER)}


@torch.no_grad()
def test_only_puzzles_that_have_not_converged_are_tried_again() -> None:
    model, tokens = make_model(), make_tokens(6)
    model.eval()
    steps = sorted(answer.evaluations for answer in find_answers(model, tokens, Search()))
    budget = steps[2]  # three of six puzzles converge in time, or more if some are equal
    short = make_model(deq={"eval_f_max_iter": budget}).eval()
    first = list(find_answers(short, tokens, Search()))
    again = list(find_answers(short, tokens, Search(restarts=2)))
    assert any(answer.settled for answer in first)
    for one, more in zip(first, again, strict=True):
        if one.settled:
            assert (more.attempts, more.evaluations) == (1, one.evaluations)
        else:
            assert more.attempts > 1
            assert more.residual <= one.residual
    twice = list(find_answers(short, tokens, Search(restarts=2)))
    assert [answer.evaluations for answer in twice] == [answer.evaluations for answer in again]


@torch.no_grad()
def test_the_most_frequent_answer_wins_if_no_attempt_converges() -> None:
    model, tokens = make_model(deq={"eval_f_max_iter": 1}).eval(), make_tokens(2)
    search = Search(restarts=6, choose="vote")
    for place, answer in enumerate(find_answers(model, tokens, search)):
        assert answer.attempts == 7
        row = tokens[place : place + 1]
        solves = [model(row, draw_starts(model, row, search.seed, k)) for k in range(7)]
        votes = Counter(tuple(out.prediction[0].argmax(-1).tolist()) for out in solves)
        assert votes[tuple(answer.tokens.tolist())] == max(votes.values())


@torch.no_grad()
def test_noise_is_frozen_for_each_puzzle_of_a_stream() -> None:
    model, tokens = make_model(noisy(0.3), solve_noise="frozen").eval(), make_tokens(3)
    one, two = (list(find_answers(model, tokens, Search(slots=k))) for k in (1, 3))
    assert all(answer.status is StreamStatus.CONVERGED for answer in one)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert a.evaluations == b.evaluations


def test_starts_and_noise_depend_on_the_puzzle_alone() -> None:
    model, tokens = make_model(noisy(0.3), solve_noise="frozen").eval(), make_tokens(4)
    before = torch.random.get_rng_state()
    turned = tokens.flip(0)
    for a, b in zip(draw_starts(model, tokens, 3), draw_starts(model, turned, 3), strict=True):
        assert torch.equal(a, b.flip(0))
    (eps,), (same,) = (draw_frozen_noise(model, t, 3) for t in (tokens, turned))
    assert torch.equal(eps, same.flip(0))
    h = torch.zeros(4, 16, 8)
    one, other = recursion_noise(tokens, 3), recursion_noise(turned, 3)
    first = one(h)
    assert torch.equal(first, other(h).flip(0))
    assert torch.equal(one(h), other(h).flip(0))
    assert not torch.equal(one(h), first)
    assert not torch.equal(recursion_noise(tokens, 4)(h), first)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_noise_of_the_recursion_is_standard_normal(dtype: torch.dtype) -> None:
    noise = recursion_noise(make_tokens(8), 0)
    h = torch.zeros(8, 50, 100, dtype=dtype)
    drawn = [noise(h) for _ in range(2)]
    assert all(eps.dtype == dtype for eps in drawn)
    first, second = (eps.double().flatten(1) for eps in drawn)
    both = torch.stack((first, second)).flatten()
    assert abs(float(both.mean())) < 0.02
    assert float(both.var()) == pytest.approx(1, abs=0.02)
    assert float((both**4).mean()) == pytest.approx(3, abs=0.15)
    related = torch.corrcoef(torch.cat((first, second)))  # of puzzles and of steps
    assert float((related - torch.eye(16, dtype=torch.float64)).abs().max()) < 0.06
    neighbours = torch.corrcoef(torch.stack((first[:, 1:].flatten(), first[:, :-1].flatten())))
    assert abs(float(neighbours[0, 1])) < 0.02


def test_searches_that_cannot_work_are_errors() -> None:
    tokens = make_tokens(1)
    with pytest.raises(ZooError, match="evaluation mode"):
        next(find_answers(make_model().train(), tokens, Search()))
    trm = make_model(replace(SETTLING, kind="trm")).eval()
    with pytest.raises(ZooError, match="random starts"):
        next(find_answers(trm, tokens, Search(restarts=1)))
    newton = make_model(deq={"f_solver": "newton_krylov"}).eval()
    with pytest.raises(ZooError, match="come and go"):
        next(find_answers(newton, tokens, Search()))
    absolute = make_model(deq={"f_stop_mode": "abs"}).eval()
    with pytest.raises(ZooError, match="relative tolerance"):
        next(find_answers(absolute, tokens, Search(halt="both")))
    with pytest.raises(ValueError, match="slots"):
        Search(slots=0)
    with pytest.raises(ValueError, match="restarts"):
        Search(restarts=-1)


IO = select(load_tensors("reason", "common_io"), "select/")


def test_golden_choice_among_restarts_is_reproduced() -> None:
    logits, labels = IO["logits"], IO["labels"].long()
    scores = convergence_scores(logits, 3).view(2, 3)
    assert_matches(scores, IO["scores"])
    assert scores.argsort(dim=1).tolist() == IO["order"].tolist()
    answers = logits[-1].argmax(-1).view(2, 3, -1)
    best = answers[torch.arange(2), scores.argmin(1)]
    assert best.tolist() == IO["top1_prediction"].tolist()
    metrics = selection_metrics(scores, answers, labels, -100, 2)
    published: dict[str, Any] = load_facts("reason")["common"]["selection_metrics"]
    names = {
        "one": "different_init/avg_pass_rate",
        "any": "different_init/any_correct",
        "vote": "majority_vote/exact_accuracy",
        "vote_cells": "majority_vote/accuracy",
        "pass@1": "different_init/pass@1",
        "pass@2": "different_init/pass@2",
        "top1": "convergence_top_k/cumulative_exact_acc_top1",
        "top2": "convergence_top_k/cumulative_exact_acc_top2",
        "top_any": "convergence_top_k/any_correct",
        "top_score": "convergence_top_k/avg_convergence_score",
    }
    for ours, theirs in names.items():
        assert metrics[ours] == pytest.approx(published[theirs], rel=1e-6), ours


def test_padded_rows_do_not_count_as_solved() -> None:
    scores, answers = torch.zeros(2, 1), torch.ones(2, 1, 3, dtype=torch.long)
    labels = torch.tensor([[2, 2, 2], [-100, -100, -100]])
    assert selection_metrics(scores, answers, labels, -100, 1)["one"] == 0.0


def test_one_step_has_the_worst_score_and_equal_votes_go_to_the_first() -> None:
    assert convergence_scores(torch.zeros(1, 2, 3, 4)).tolist() == [torch.inf] * 2
    answers = torch.tensor([[[1, 2], [3, 4], [3, 4], [1, 2]]])
    assert vote(answers).tolist() == [[1, 2]]
    assert pass_rate(1, 4, 2) == pytest.approx(0.5)


def test_residuals_rank_right_answers_before_wrong_ones() -> None:
    residual = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert ranking(residual, torch.tensor([True, True, False, False])) == 1.0
    assert ranking(residual, torch.tensor([True, False, True, False])) == 0.75
    assert ranking(residual, torch.tensor([False] * 4)) == 0.5


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            self.numbers = max(self.numbers, t.numel() if isinstance(t, Tensor) else 0)
        return out


def test_the_ranking_is_that_of_all_pairs_without_their_memory() -> None:
    rng = torch.Generator().manual_seed(1)
    residual = torch.randint(0, 40, (300,), generator=rng).double()  # many equal ones
    right = torch.rand(300, generator=rng) < 0.4
    with Largest() as largest:
        found = ranking(residual, right)
    assert largest.numbers <= 300
    pairs = [
        1.0 if a < b else 0.5 if a == b else 0.0
        for a in residual[right].tolist()
        for b in residual[~right].tolist()
    ]
    assert found == pytest.approx(sum(pairs) / len(pairs))


def test_a_residual_that_is_nan_ranks_like_infinity() -> None:
    residual = torch.tensor([0.1, torch.nan, torch.inf, torch.nan])
    assert ranking(residual, torch.tensor([True, True, False, False])) == 0.75
    assert ranking(residual, torch.tensor([True, False, True, False])) == 0.75
