"""The pool behind a stream: samples enter free rows, all rows step together, finished ones leave.

It knows samples only by their tickets. `Stream.solve` drives it with the rows of one batch,
`torchdeq.stream.jobs` with requests that have time limits, restarts and errors of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdeq import numbers
from torchdeq.packed import PackedFn
from torchdeq.pytree import map_tensors, take_rows, tensors_of
from torchdeq.solver.base import Iterate
from torchdeq.solver.residual_history import as_block, measure, measure_safely
from torchdeq.stopping import StopRule
from torchdeq.stream.isolation import IsolatingFn, OwnOutput
from torchdeq.stream.layout import Layout, Rows, split_samples
from torchdeq.stream.occupancy import Occupancy
from torchdeq.stream.request import StreamStatus
from torchdeq.stream.row_judge import RowJudge
from torchdeq.stream.rule import Counts, Rule
from torchdeq.stream.slots import Slots
from torchdeq.stream.verdict import Ending, Residuals, Verdict


@dataclass
class Finished:
    """Samples that leave the pool, each at the same place of all lists."""

    tickets: list[int] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # (n, D) each, in order
    aux: list[Any] = field(default_factory=list)  # trees of (n, ...), in order
    errors: dict[int, Exception] = field(default_factory=dict)  # by ticket

    @property
    def z(self) -> Tensor:
        """Return the states, (n, D)."""
        return self.states[0] if len(self.states) == 1 else torch.cat(self.states)

    def split_aux(self) -> list[Any]:
        """Return `aux` of each sample, without the batch dimension; nothing without `has_aux`."""
        parts = zip(self.aux, map(len, self.states), strict=False)
        return [one for tree, n in parts for one in split_samples(tree, n)]


class Pool:
    """Samples in rows, at most `slots` of them at a time.

    Args:
        rule: what to do with every sample.
        layout: of the samples.
        counts: to add to.
    """

    def __init__(self, rule: Rule, layout: Layout, counts: Counts) -> None:
        self._rule, self._counts = rule, counts
        own = OwnOutput(rule.f, rule.has_aux)
        packed = PackedFn(layout.packing, own)
        packed.autocast = rule.autocast.get(layout.device.type, packed.autocast)
        computes = packed.autocast.dtype or layout.packing.dtype
        packed.eps = max(torch.finfo(t).eps for t in (computes, layout.packing.dtype))
        packed.eps = max(packed.eps, rule.eps or 0.0)
        self._f = IsolatingFn(packed, own)
        self._slots = Slots(layout, self._f, rule.solver)
        self._every = rule.stop.interval
        self._free = numbers.reads_are_free(layout.device)  # on others, a second read costs more
        self._dtype = numbers.norm_dtype(layout.packing.dtype)
        self._judge = RowJudge(self._every, self._dtype, layout.size, lambda: packed.eps)
        self._rows = Occupancy()
        self._entered = False  # whether samples have entered since the last tick
        self._best_aux: Any = None

    @property
    def busy(self) -> int:
        """Return the number of samples in the pool."""
        return self._rows.busy

    @property
    def free(self) -> int:
        """Return how many samples may enter."""
        return self._rule.slots - self.busy

    def enter(self, tickets: list[int], samples: Rows, rules: list[StopRule]) -> None:
        """Let samples enter free rows, at most `free` of them."""
        with _plain_mode():
            self._enter(tickets, *samples, rules)

    def _enter(
        self, tickets: list[int], z: Tensor, args: list[Tensor], rules: list[StopRule]
    ) -> None:
        self._entered = True
        if not self.busy:
            self._slots.clear()  # frees the memory of former samples before new ones take some
            self._best_aux = None
            self._rows.start(tickets)
            self._slots.start(z, args)
            self._judge.start(rules)
            return
        self._take(self._rows.shrink(len(tickets)))
        self._take(self._rows.grow(len(tickets)))
        at = torch.tensor(self._rows.occupy(tickets))
        self._slots.enter(at, z, args)
        self._judge.enter(at, rules)

    def tick(self, expired: Iterable[int] = ()) -> Finished:
        """Evaluate `f` on all rows until the next check; return the samples that have ended.

        Args:
            expired: tickets to end at this check in any case, because their time is over.
        """
        if not self._entered:  # rows that have just been filled must not move before a step
            self._take(self._rows.shrink(0))
        self._entered = False
        with _plain_mode(), self._f.packed.autocast.suspended():
            return self._tick(set(expired))

    def _tick(self, expired: set[int]) -> Finished:
        left = self._judge.most_left
        self._f.allow(left)
        count = min(self._every, left)
        pending = [self._evaluate(last=k + 1 == count) for k in range(count)]
        check, halted = self._read(pending)
        verdicts = [
            self._judge.observe(check, k, None if halted is None else halted[k])
            for k in range(count)
        ]
        if self._judge.keeps_best:
            self._keep_best(pending, verdicts)
        endings = [(k, ending) for k, verdict in enumerate(verdicts) for ending in verdict.endings]
        if expired:
            late = self._judge.end(self._rows.rows_of(expired), StreamStatus.TIME_LIMIT)
            endings += [(count - 1, ending) for ending in late]
        return self._leave(pending, endings)

    def drop(self, tickets: Iterable[int]) -> None:
        """Remove samples without a result."""
        rows = self._rows.rows_of(set(tickets))
        if rows:
            self._judge.retire(torch.tensor(rows))
            self._rows.vacate(rows)

    def _evaluate(self, last: bool) -> _Step:
        """Evaluate all rows once and measure the residuals."""
        assert self._slots.best is not None
        it = self._slots.step()
        self._counts.calls += 1
        self._counts.evaluations += len(self._rows)
        self._slots.best.pass_step()
        measured = measure(it) if self._free else measure_safely(it).to(self._dtype)
        halt = self._rule.halt
        halted = None if halt is None else self._f.halted(halt, it.answer)
        aux, errors, self._f.errors = self._f.own.aux, self._f.errors, {}
        if not last:  # the solver and `f` may write into these before the check
            it = Iterate(it.z, it.fz.clone(), x=None if it.x is None else it.x.clone())
            aux = map_tensors(aux, Tensor.clone)
        return _Step(it, measured, halted, aux, errors)

    def _read(self, pending: list[_Step]) -> tuple[Residuals, Tensor | None]:
        """Return residuals, and flags of halted rows (K, b), on the host, in one transfer."""
        block = as_block([step.measured for step in pending])
        flags = [step.halted for step in pending if step.halted is not None]
        if not flags:
            return self._safe(pending, block, block.to(numbers.HOST)), None
        values = torch.cat((block, torch.stack(flags)[None].to(block))).to(numbers.HOST)
        return self._safe(pending, block, values[:2]), values[2] > 0

    def _safe(self, pending: list[_Step], block: Tensor, values: Tensor) -> Residuals:
        """Return residuals, measured again if squares may have left the range in a busy row."""
        check = Residuals.of(values)
        if check.ordinary or not self._free:
            return check
        if bool((numbers.outside_range(values) & ~self._judge.idle).any()):
            safe = torch.stack([measure_safely(step.it) for step in pending], dim=1)
            block = torch.where(numbers.outside_range(block), safe.to(block.dtype), block)
            check = check._replace(values=block.to(numbers.HOST))
        return check

    def _keep_best(self, pending: list[_Step], verdicts: list[Verdict]) -> None:
        """Take over the states of rows that improved, each from its last better iterate."""
        best, last = self._slots.best, len(pending) - 1
        assert best is not None
        remaining: Tensor | None = None  # rows that have not improved at a later iterate
        for k in range(last, -1, -1):
            better, all_better, _ = verdicts[k]
            ended = any(verdict.endings for verdict in verdicts[:k])  # and keep their states
            if all_better and remaining is None and not ended:
                best.adopt(pending[k].it, age=last - k)
                self._keep_aux(pending[k].aux, None)
                break
            rows = better if remaining is None else better & remaining
            if bool(rows.any()):
                best.replace_some(rows, pending[k].it)
                self._keep_aux(pending[k].aux, rows)
            remaining = ~better if remaining is None else remaining & ~better
        best.copy_expired()

    def _keep_aux(self, aux: Any, better: Tensor | None) -> None:
        """Copy the rows of `aux` that belong to the best states."""
        if not self._rule.has_aux:
            return
        if better is None or self._best_aux is None:
            self._best_aux = map_tensors(aux, Tensor.clone)
            return
        rows = better.nonzero().squeeze(1)
        new = iter(tensors_of(take_rows(aux, rows)))
        map_tensors(self._best_aux, lambda t: t.index_copy_(0, rows.to(t.device), next(new)))

    def _leave(self, pending: list[_Step], endings: list[tuple[int, Ending]]) -> Finished:
        """Return the samples that have ended, and free their rows.

        Args:
            pending: the evaluations since the last check.
            endings: how rows have ended, each with the number of the evaluation.
        """
        if not endings:
            self._rows.pass_check()
            return Finished()
        finished = self._collect(pending, endings)
        self._counts.useful += sum(ending.evaluations for _, ending in endings)
        self._counts.finished += len(endings)
        harmful = (StreamStatus.NONFINITE, StreamStatus.DIVERGED)
        self._rows.vacate(
            [ending.row for _, ending in endings],
            harmful=any(ending.status in harmful for _, ending in endings),
        )
        return finished

    def _collect(self, pending: list[_Step], endings: list[tuple[int, Ending]]) -> Finished:
        """Return states, `aux` and errors of rows that have ended, in groups of one source."""
        assert self._slots.best is not None
        finished = Finished()
        source: dict[int | None, list[Ending]] = {}  # by evaluation; None for the best states
        for k, ending in endings:
            source.setdefault(k if ending.current else None, []).append(ending)
            if ending.row in pending[k].errors:  # later ones do not count: the sample had ended
                finished.errors[self._rows.ticket(ending.row)] = pending[k].errors[ending.row]
        for k_or_best, group in source.items():
            step = None if k_or_best is None else pending[k_or_best]
            rows = [ending.row for ending in group]
            z = self._slots.best.z if step is None else step.it.answer
            # If all rows have ended, nothing overwrites their states later.
            whole = rows == list(range(len(self._rows)))
            at = torch.tensor(rows)
            finished.states.append(z if whole else z.index_select(0, at.to(z.device)))
            if self._rule.has_aux:
                finished.aux.append(take_rows(self._best_aux if step is None else step.aux, at))
            finished.tickets += map(self._rows.ticket, rows)
            finished.endings += group
        return finished

    def _take(self, rows: list[int] | None) -> None:
        """Arrange all values by row as the rows of the batch have been; None changes nothing."""
        if rows is None:
            return
        at = torch.tensor(rows)
        self._slots.take(at)
        self._judge.take(at)
        if self._best_aux is not None:
            self._best_aux = take_rows(self._best_aux, at)


@contextmanager
def _plain_mode() -> Iterator[None]:
    """Run a block without gradients and outside inference mode.

    The caller may change its modes while a stream runs, and outside inference mode nobody may write
    into tensors that were made inside it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class _Step:
    """One evaluation of all rows."""

    it: Iterate
    measured: Tensor  # (2, b)
    halted: Tensor | None  # (b,)
    aux: Any
    errors: dict[int, Exception]  # by row
