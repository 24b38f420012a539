"""The choice among several attempts at one puzzle, without labels, and how good a choice it was."""

from __future__ import annotations

from collections import Counter
from math import comb

import torch
from torch import Tensor


def convergence_scores(logits: Tensor, window: int = 3) -> Tensor:
    """Return (B,), how much the logits still moved at the end; the lowest is chosen.

    Args:
        logits: (D, B, L, V) after each supervision step.
        window: steps over which the movement is averaged; 0 takes all of them. One step has no
            movement: its score is infinite, so that it is chosen last.
    """
    if len(logits) < 2:
        return logits.new_full((logits.shape[1],), torch.inf)
    moves = (logits[1:] - logits[:-1]).norm(dim=-1).mean(-1)  # (D - 1, B)
    score: Tensor = moves[-window:].mean(0)
    return score


def vote(answers: Tensor) -> Tensor:
    """Return (P, L), the most frequent of the answers (P, R, L); of equal ones the first."""
    chosen = []
    for attempts in answers:
        counts = Counter(tuple(row) for row in attempts.tolist())  # in order of appearance
        chosen.append(max(counts, key=lambda answer: counts[answer]))
    return torch.tensor(chosen, dtype=answers.dtype).view(len(answers), -1)


def pass_rate(right: int, attempts: int, k: int) -> float:
    """Return the probability that one of `k` attempts, drawn from all, is right."""
    return 1 - comb(attempts - right, k) / comb(attempts, k)


def selection_metrics(
    scores: Tensor, answers: Tensor, labels: Tensor, ignored: int, best: int
) -> dict[str, float]:
    """Return how often a choice among attempts is right.

    Puzzles without a scored cell are left out, where they would count as solved.

    Args:
        scores: (P, R), the lowest is best.
        answers: (P, R, L).
        labels: (P, L).
        ignored: the label of cells that are not scored.
        best: attempts of the lowest scores that count as chosen, k.
    """
    scored = labels != ignored
    kept = scored.any(1)
    scores, answers, labels, scored = scores[kept], answers[kept], labels[kept], scored[kept]
    right = ((answers == labels[:, None]) | ~scored[:, None]).all(2)  # (P, R)
    ranked = right.gather(1, scores.argsort(dim=1))
    voted = vote(answers)
    r = right.shape[1]

    def mean(values: Tensor) -> float:
        return float(values.double().mean())

    metrics = {
        "one": mean(right),
        "any": mean(right.any(1)),
        "vote": mean(((voted == labels) | ~scored).all(1)),
        "vote_cells": float(((voted == labels) & scored).sum() / scored.sum()),
        "top_any": mean(ranked[:, :best].any(1)),
        "top_score": mean(scores.sort(dim=1).values[:, :best]),
    }
    metrics |= {f"top{k}": mean(ranked[:, :k]) for k in range(1, best + 1)}
    for k in (2**e for e in range(r.bit_length()) if 2**e <= r):
        rates = [pass_rate(int(n), r, k) for n in right.sum(1)]
        metrics[f"pass@{k}"] = sum(rates) / len(rates)
    return metrics
