"""Batches through the slots of a stream, without a pause between one batch and the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchdeq.failures import check_policy, report_failures
from torchdeq.numbers import norm_dtype
from torchdeq.packing import Packing
from torchdeq.pytree import map_tensors, walk
from torchdeq.solution import FixedPoint
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule
from torchdeq.stream.layout import Layout, Rows, join_rows
from torchdeq.stream.pool import Finished, Pool
from torchdeq.stream.request import StreamStatus
from torchdeq.stream.rule import Counts, Rule
from torchdeq.stream.verdict import Ending

Batch = tuple[Any, tuple[Any, ...]]  # starts and further arguments of `f`, with the batch first


def solve_batches(
    rule: Rule, counts: Counts, batches: Iterable[Batch], ahead: int, on_failure: str
) -> Iterator[FixedPoint[Any]]:
    """Yield the fixed points of every batch, in order; see `Stream.solve_batches`."""
    check_policy(on_failure)
    feed, pool = _Feed(rule, batches, ahead), None
    while True:
        rows = feed.take(rule.slots if pool is None else pool.free)
        if rows is not None:
            assert feed.layout is not None
            pool = pool or Pool(rule, feed.layout, counts)
            n = len(rows[0])
            pool.enter(list(range(feed.taken - n, feed.taken)), rows, [rule.stop] * n)
        if pool is not None and pool.busy:
            _distribute(pool.tick(), feed.open)
        while feed.open and not feed.open[0].unfinished:
            yield feed.open.popleft().solution(rule.stop, on_failure)
        if feed.exhausted and not feed.open:
            return


class _Feed:
    """The samples of all batches, one after the other.

    Args:
        rule: of the stream.
        batches: read one by one, when their samples can enter.
        ahead: once so many samples beyond the slots have been taken since the oldest unfinished
            batch, no further batch is read.
    """

    def __init__(self, rule: Rule, batches: Iterable[Batch], ahead: int) -> None:
        self._rule, self._coming, self._most = rule, iter(batches), rule.slots + ahead
        self.open: deque[_OpenBatch] = deque()  # batches with samples that have not left the pool
        self.layout: Layout | None = None
        self.taken = 0  # samples of all batches; also the next ticket
        self.exhausted = False

    def take(self, room: int) -> Rows | None:
        """Return the next samples, at most `room`; None if there are none at the moment."""
        parts: list[Rows] = []
        while room and self._may_take():
            if not self.open or not self.open[-1].waiting:
                self._open_next()
                continue
            parts.append(self.open[-1].take(room))
            n = len(parts[-1][0])
            room, self.taken = room - n, self.taken + n
        return join_rows(parts) if parts else None

    def _may_take(self) -> bool:
        """Return whether a sample waits, or another batch may be read."""
        if self.open and self.open[-1].waiting:
            return True
        if self.open and not self.open[0].unfinished:
            return False  # the caller gets this one first
        ahead = self.open and self.taken - self.open[0].first >= self._most
        return not (ahead or self.exhausted)

    def _open_next(self) -> None:
        """Read the next batch; raise if its samples differ from those before."""
        given = next(self._coming, None)
        if given is None:
            self.exhausted = True
            return
        batch = _OpenBatch(*given, self._rule, self.taken)
        self.layout = self.layout or batch.layout()
        batch.pack(self.layout)
        self.open.append(batch)


def _distribute(finished: Finished, batches: Iterable[_OpenBatch]) -> None:
    """Give samples that have left the pool to their batches; raise the error of one that failed."""
    if not finished.tickets:
        return
    for ticket, error in finished.errors.items():
        batch = next(b for b in batches if b.first <= ticket < b.first + b.size)
        error.add_note(f"f raised this for sample {ticket - batch.first} of its batch")
        raise error
    z, aux = finished.z, finished.split_aux()
    for batch in batches:
        last = batch.first + batch.size
        own = [i for i, ticket in enumerate(finished.tickets) if batch.first <= ticket < last]
        if own:
            part = z if len(own) == len(finished.tickets) else z[torch.tensor(own).to(z.device)]
            batch.add(
                [finished.tickets[i] - batch.first for i in own],
                [finished.endings[i] for i in own],
                part,
                [aux[i] for i in own] if aux else [],
            )


class _OpenBatch:
    """A batch whose samples are on their way; those that `f` never evaluates keep their starts.

    Args:
        z0: the starts.
        args: further arguments of `f`.
        rule: of the stream.
        first: the ticket of the first sample.
    """

    def __init__(self, z0: Any, args: tuple[Any, ...], rule: Rule, first: int) -> None:
        self._z0, self._args, self.first = z0, tuple(args), first
        self._packing = Packing(z0)
        self.size = n = self._packing.batch
        _check_batched(z0, self._args, n)
        self._aux: list[Any] | None = [None] * n if rule.has_aux else None
        self._figures = torch.full((3, n), torch.inf, dtype=norm_dtype(self._packing.dtype))
        self._figures[2] = 0.0  # steps
        self._status = torch.full((n,), int(StreamStatus.MAX_ITER), dtype=torch.int8)
        self._nfe = self._entered = 0
        self.unfinished = n if rule.stop.max_iter else 0
        self._z = torch.empty(0)
        self._rows: Rows | None = None

    @property
    def waiting(self) -> int:
        """Return how many samples have not entered the pool."""
        return self.unfinished and self.size - self._entered

    def layout(self) -> Layout | None:
        """Return the layout of the samples; None if the batch is empty."""
        if not self.size:
            return None
        return Layout(map_tensors(self._z0, _first), map_tensors(self._args, _first))

    def pack(self, layout: Layout | None) -> None:
        """Pack the samples; raise if they differ from the layout."""
        if layout is not None and self.size:
            self._packing = layout.packing  # one order of memory for all batches
            self._z, tensors = layout.rows(self._z0, self._args)
        else:
            self._z, tensors = self._packing.pack(self._z0).detach(), []
        if len(self._packing.leaves) == 1:  # the memory of the caller
            self._z = self._z.clone()
        # Starts and answers share their memory: a row is read before its answer is written.
        self._rows = self._z, tensors

    def take(self, most: int) -> Rows:
        """Return the next samples, which enter the pool."""
        assert self._rows is not None
        z, tensors = self._rows
        part = slice(self._entered, min(self.size, self._entered + most))
        self._entered = part.stop
        return z[part], [t[part] for t in tensors]

    def add(self, rows: list[int], endings: list[Ending], z: Tensor, aux: list[Any]) -> None:
        """Store samples that have left the pool."""
        at = torch.tensor(rows)
        if z.untyped_storage().data_ptr() == self._z.untyped_storage().data_ptr():
            z = z.clone()  # `f` returned the start itself
        solved = torch.tensor([ending.steps > 0 for ending in endings])
        if bool(solved.all()):
            self._z.index_copy_(0, at.to(z.device), z)
        else:  # without a finite residual, the start is the answer
            kept = solved.nonzero().squeeze(1)
            self._z.index_copy_(0, at[kept].to(z.device), z[kept.to(z.device)])
        figures = [(e.residual, e.relative, float(e.steps)) for e in endings]
        self._figures[:, at] = torch.tensor(figures, dtype=self._figures.dtype).mT
        self._status[at] = torch.tensor([int(e.status) for e in endings], dtype=torch.int8)
        self._nfe = max(self._nfe, *(ending.evaluations for ending in endings))
        for row, one in zip(rows, aux, strict=False):
            assert self._aux is not None
            self._aux[row] = one
        self.unfinished -= len(rows)

    def solution(self, stop: StopRule, on_failure: str) -> FixedPoint[Any]:
        """Return the states and statistics; warn or raise if samples have failed."""
        size, relative, steps = self._figures.to(self._z.device)
        status = self._status.to(self._z.device)
        stats = SolverStat(
            abs_lowest=size,
            rel_lowest=relative,
            abs_trace=size.new_empty(self.size, 0),
            rel_trace=size.new_empty(self.size, 0),
            nstep=steps,
            nfe=self._nfe,
            status=status,
        )
        if on_failure != "ignore" and stop.goal and stop.max_iter:
            report_failures(stats, on_failure, "the fixed-point solve")
        return FixedPoint(self._packing.unpack(self._z), [], stats, self._aux)


def _first(t: Tensor) -> Tensor:
    return t[0]


def _check_batched(z0: Any, args: tuple[Any, ...], batch: int) -> None:
    """Raise `ValueError` unless the first dimension of every tensor is the batch."""
    for name, tree in (("z0", z0), ("args", args)):
        for path, leaf in walk(tree):
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != batch):
                raise ValueError(
                    f"a stream needs the batch of {batch} as the first dimension of every tensor: "
                    f"got shape {tuple(leaf.shape)} at {name}{path}; let f close over a tensor "
                    "without a batch"
                )
