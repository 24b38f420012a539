"""Decisions about rows of different ages, on the host: who improved, who has ended, and how."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from torchdeq.solver.stalls import PATIENCE
from torchdeq.stopping import EPS, StopRule, precision_floor
from torchdeq.stream.request import StreamStatus
from torchdeq.stream.verdict import Ending, Residuals, Verdict
from torchdeq.trace import GROWTH


class RowJudge:
    """The progress of every row, in tensors of the host, with the decisions of `torchdeq.solve`.

    A row ends when its residual meets the tolerance, is not finite or has stalled, when the rule of
    the caller halts it, or when its budget is spent. It returns its first state within the
    tolerance, the state at which it was halted, or else its best state.

    Every operation here delays the next evaluation, so ages and budgets are Python numbers, and
    the usual case, in which no row ends, needs few operations.

    Args:
        every: iterates of one check.
        dtype: of residuals.
        size: numbers in the state of a row.
        eps: returns the precision in which `f` computes.
    """

    def __init__(self, every: int, dtype: torch.dtype, size: int, eps: Callable[[], float]) -> None:
        self._window, self._size, self._eps, self._dtype = PATIENCE * every, size, eps, dtype
        self._tick = 0  # of the next iterate
        self.start([])

    def start(self, rules: list[StopRule]) -> None:
        """Begin with so many rows, all of them fresh."""
        b = len(rules)
        self._rules, self._first_tick = list(rules), [0] * b
        self._last_tick: list[int | None] = [None] * b  # at which budgets are spent; None: idle
        self._numbers = torch.zeros(4, b, dtype=self._dtype)
        self._best = torch.zeros(2, b, dtype=self._dtype)  # |g| and |f(z)| at the best state
        self._values = self._best  # |g| and |f(z)| at the last iterate
        self._best_tick = torch.zeros(b, dtype=torch.int64)
        self._scores = torch.zeros(self._window, b, dtype=self._dtype)  # of the last iterates
        self._due = torch.zeros(self._window, b, dtype=torch.bool)  # when rows are examined
        self._at_floor = torch.zeros(b, dtype=torch.bool)
        self.idle = torch.ones(b, dtype=torch.bool)
        self._fresh: Tensor | None = None  # rows whose next iterate is their first one
        self._near_floor = False
        self._name_rows()
        self._set_groups()
        self._set_horizon()
        if rules:
            self.enter(torch.arange(b), rules)

    def _name_rows(self) -> None:
        self._goal, self._lowest, self._first, self._before = self._numbers.unbind(0)

    @property
    def keeps_best(self) -> bool:
        """Return whether a row may return its best state, so that these must be kept."""
        return not all(rule.return_final for rule, _ in self._groups)

    @property
    def most_left(self) -> int:
        """Return how many evaluations a row may still spend, at most."""
        return self._latest - self._tick + 1

    def take(self, rows: Tensor) -> None:
        """Keep the given rows only, in this order; a row may appear more than once."""
        self._numbers, self._best = self._numbers[:, rows], self._best[:, rows]
        self._scores, self._due = self._scores[:, rows], self._due[:, rows]
        self._best_tick, self._at_floor = self._best_tick[rows], self._at_floor[rows]
        self.idle = self.idle[rows]
        kept = rows.tolist()
        self._rules = [self._rules[row] for row in kept]
        self._first_tick = [self._first_tick[row] for row in kept]
        self._last_tick = [self._last_tick[row] for row in kept]
        self._set_horizon()
        self._name_rows()
        self._set_groups()

    def enter(self, rows: Tensor, rules: list[StopRule]) -> None:
        """Let rows begin, each with its rule."""
        for row, rule in zip(rows.tolist(), rules, strict=True):
            self._rules[row] = rule
            self._first_tick[row] = self._tick
            self._last_tick[row] = self._tick + rule.max_iter - 1
        self._set_horizon()
        if len(self._groups) != 1 or any(rule is not self._groups[0][0] for rule in rules):
            self._set_groups()
        goals = torch.tensor([rule.goal or -1.0 for rule in rules], dtype=self._dtype)
        self._numbers[1:, rows] = inf
        self._goal[rows] = goals  # without a goal -1, which no residual meets
        self._due[:, rows] = False
        self._due[(self._tick - 1) % self._window, rows] = True
        self.idle[rows], self._at_floor[rows] = False, False
        self._fresh = rows if self._fresh is None else torch.cat((self._fresh, rows))

    def _set_groups(self) -> None:
        """Collect the rules that differ, each with flags of its rows."""
        by_id = {id(rule): rule for rule in self._rules}
        self._groups = [
            (rule, torch.tensor([r is rule for r in self._rules])) for rule in by_id.values()
        ]

    def observe(self, check: Residuals, k: int, halted: Tensor | None) -> Verdict:
        """Judge the iterate of number `k` of a check.

        Args:
            check: the residuals of its iterates.
            k: which of them.
            halted: (b,) whether the rule of the caller halts a row.
        """
        tick, self._tick = self._tick, self._tick + 1
        values, score = self._measure(check.values[:, k], check.ordinary)
        self._values = values
        if self._fresh is not None:
            self._first[self._fresh] = score[self._fresh]
            self._fresh = None
        better = score < self._lowest  # never true for a NaN, nor for an idle row
        all_better = bool((better | self.idle).all())
        torch.fmin(score, self._lowest, out=self._lowest)
        if all_better:
            self._best = values
            self._best_tick.fill_(tick)
        else:
            self._best = torch.where(better, values, self._best)
            self._best_tick = torch.where(better, tick, self._best_tick)
        alive = score > self._goal
        if not check.ordinary:
            alive &= score < inf
        if halted is not None:
            alive &= ~halted
        stalled = self._find_stalls(check, values, score, tick)
        if stalled is not None:
            alive &= ~stalled
        spent = self._soonest <= tick
        if not spent and bool((alive | self.idle).all()):
            return Verdict(better, all_better, [])
        if spent:
            alive &= torch.tensor([last is None or last > tick for last in self._last_tick])
        ended = (~alive & ~self.idle).nonzero().squeeze(1)
        endings = self._endings(ended, values, score, halted, stalled)
        self.retire(ended)
        return Verdict(better, all_better, endings)

    def end(self, rows: list[int], status: StreamStatus) -> list[Ending]:
        """End rows at the last iterate for another reason than their residuals.

        They return their best states, or the last ones if their rule says so.
        """
        ended = torch.tensor([row for row in rows if not self.idle[row]], dtype=torch.int64)
        now = zip(*self._values[:, ended].tolist(), strict=True)
        endings = []
        for (row, age, steps, size, norm), (g, fz) in zip(self._columns(ended), now, strict=True):
            current = self._rules[row].return_final
            if current:
                size, norm, steps = g, fz, age
            endings.append(Ending(row, status, age, steps, *_both(size, norm), current))
        self.retire(ended)
        return endings

    def retire(self, rows: Tensor) -> None:
        """Let rows be idle: no residual of theirs is better than the lowest or meets a goal."""
        self.idle[rows] = True
        self._numbers[:2, rows] = -inf
        for row in rows.tolist():
            self._last_tick[row] = None
        self._set_horizon()

    def _set_horizon(self) -> None:
        """Set the ticks at which the first and the last of the rows spend their budgets."""
        ticks = [tick for tick in self._last_tick if tick is not None]
        self._soonest, self._latest = (min(ticks), max(ticks)) if ticks else (self._tick, -1)

    def _measure(self, values: Tensor, ordinary: bool) -> tuple[Tensor, Tensor]:
        """Return $|g|$ and $|f(z)|$ in the norm of each row's rule, and the scores to compare."""
        if len(self._groups) == 1:
            return _measured(self._groups[0][0], values, self._size, ordinary)
        scaled, score = values, values[0]
        for rule, rows in self._groups:
            own_values, own_score = _measured(rule, values, self._size, ordinary)
            scaled = torch.where(rows, own_values, scaled)
            score = torch.where(rows, own_score, score)
        return scaled, score

    def _find_stalls(
        self, check: Residuals, values: Tensor, score: Tensor, tick: int
    ) -> Tensor | None:
        """Return (b,) which rows have stalled, by the test of `StallFinder`; None if none has.

        Each row is examined whenever its age is a multiple of the window.
        """
        slot, floor, stalled = tick % self._window, precision_floor(self._eps()), None
        self._scores[slot] = score
        due = self._due[slot]
        if not check.smallest > floor * check.largest:
            self._at_floor |= values[0] <= floor * values[1]
            self._near_floor = True
        if self._near_floor:
            candidates = self._at_floor & due & ~self.idle & (self._goal > 0)
            if bool(candidates.any()):
                recent = self._scores.roll(-slot - 1, 0)  # the oldest first
                lowest, before = recent.amin(0), self._before
                steady = (recent.diff(dim=0) < 0).all(0) & (lowest < before)
                stalled = candidates & ~(lowest < 0.9 * before) & ~steady
            self._near_floor = bool((self._at_floor & ~self.idle).any())
        torch.where(due, self._lowest, self._before, out=self._before)
        return stalled

    def _endings(
        self,
        ended: Tensor,
        values: Tensor,
        score: Tensor,
        halted: Tensor | None,
        stalled: Tensor | None,
    ) -> list[Ending]:
        """Return how rows have ended at this iterate."""
        none = torch.zeros_like(self.idle)
        flags = torch.stack([none if t is None else t for t in (halted, stalled)])[:, ended]
        figures = torch.stack((score, self._goal, self._first, *values))[:, ended]
        now = zip(*figures.tolist(), *flags.tolist(), strict=True)
        noise, endings = self._eps() ** 0.5, []
        for column, (value, goal, first, g, fz, halts, stalls) in zip(
            self._columns(ended), now, strict=True
        ):
            row, age, steps, size, norm = column
            if value <= goal:
                status = StreamStatus.CONVERGED
            elif not value < inf:
                status = StreamStatus.NONFINITE
            elif halts or stalls:
                status = StreamStatus.HALTED if halts else StreamStatus.STALLED
            elif value > GROWTH * first and g / (fz + EPS) > noise:
                status = StreamStatus.DIVERGED
            else:
                status = StreamStatus.MAX_ITER
            current = status is StreamStatus.HALTED or self._rules[row].return_final
            if current:
                size, norm, steps = g, fz, age
            endings.append(Ending(row, status, age, steps, *_both(size, norm), current))
        return endings

    def _columns(self, rows: Tensor) -> list[tuple[int, int, int, float, float]]:
        """Return row, age, steps and the residual of the best state; steps are 0 without one."""
        columns = []
        for row, best, first, size, norm in zip(
            rows.tolist(),
            self._best_tick[rows].tolist(),
            self._first[rows].tolist(),
            *self._best[:, rows].tolist(),
            strict=True,
        ):
            begun, tick = self._first_tick[row], self._tick - 1
            improved = first < inf  # the first finite residual is better than none
            steps = best - begun + 1 if improved else 0
            columns.append(
                (row, tick - begun + 1, steps, size if steps else inf, norm if steps else inf)
            )
        return columns


def _both(size: float, norm: float) -> tuple[float, float]:
    """Return the absolute and the relative residual."""
    return size, size / (norm + EPS) if norm < inf else inf


def _measured(rule: StopRule, values: Tensor, size: int, ordinary: bool) -> tuple[Tensor, Tensor]:
    """Return (2, b) residuals in the norm of a rule, and (b,) the scores that its goal limits."""
    length = rule.length(size)
    values = values if length == 1 else values / length
    if ordinary and rule.rtol is None and rule.mode == "rel":  # as `relative`, without overflow
        return values, values[0] / (values[1] + EPS)
    return values, rule.measure(*values)
