"""What a solve reports: residuals by step, and how each sample ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any

import torch
from torch import Tensor

from torchdeq.numbers import row_norm
from torchdeq.stopping import Status, StopRule, relative

_GROWTH = 10.0  # a residual that ends this many times above its first value has diverged


@dataclass(frozen=True)
class Trace:
    """The raw record of a solve: one row per iterate, one column per sample."""

    sizes: Tensor  # (N, B): |f(z) - z|
    norms: Tensor  # (N, B): |f(z)|
    nfe: Sequence[int]  # evaluations spent when each iterate was known
    stalled: Tensor | None = None  # (B,) the row at which each sample stalled, else -1
    shared: Tensor | None = None  # (N, B) what decided about iterates that all samples share

    def scores(self, stop: StopRule) -> Tensor:
        """Return (N, B) what decides about iterates."""
        return stop.measure(self.sizes, self.norms) if self.shared is None else self.shared

    def all_met(self, stop: StopRule) -> bool:
        """Whether every sample was within the tolerance at some iterate; reads the device."""
        met = self.scores(stop) <= stop.goal
        return bool((met.any(0) & self.sizes.isfinite().all(0)).all())

    def of_each(self, batch: int) -> Trace:
        """Return the record of one system as that of each of its samples."""
        stalled = None if self.stalled is None else self.stalled.expand(batch)
        sizes, norms = (t.expand(-1, batch) for t in (self.sizes, self.norms))
        return Trace(sizes, norms, self.nfe, stalled, self.shared)

    def then(self, later: Trace, spent: int) -> Trace:
        """This record followed by that of a second solve of the same samples.

        What was not finite here is only very large from now on: the sample got another chance.
        """
        shared = None
        if self.shared is not None and later.shared is not None:
            shared = _after(self.shared, later.shared)
        return Trace(
            _after(self.sizes, later.sizes),
            torch.cat((self.norms, later.norms)),
            [*self.nfe, *(spent + n for n in later.nfe)],
            _stalls(self, later),
            shared,
        )


def _after(first: Tensor, later: Tensor) -> Tensor:
    """Return residuals of two solves, those of the first made finite."""
    most = torch.finfo(first.dtype).max
    return torch.cat((first.nan_to_num(nan=most, posinf=most), later))


def _stalls(first: Trace, later: Trace) -> Tensor | None:
    if later.stalled is None:
        return first.stalled
    moved = torch.where(later.stalled < 0, -1, later.stalled + len(first.sizes))
    return moved if first.stalled is None else torch.where(moved < 0, first.stalled, moved)


def _filled(name: str) -> Any:
    """A method of dict that computes what is still owed before it looks."""
    method = getattr(dict, name)

    @wraps(method)
    def call(self: SolverStat, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        return method(self, *args, **kwargs)

    return call


class SolverStat(dict[str, Tensor]):
    """Statistics of a solve, as attributes and as the mapping of torchdeq 0.1.0.

    Keys, each also an attribute (``B`` samples, ``N`` iterates):

    - ``abs_lowest``, ``rel_lowest`` (B,): residuals :math:`|f(z) - z|` and that over :math:`|f(z)|`
      at the returned state; root mean squares if the stop rule says ``norm="rms"``;
    - ``abs_trace``, ``rel_trace`` (B, N): the same by iterate; after a sample has converged its
      value is repeated;
    - ``nstep`` (B,): evaluations of ``f`` after which each returned state was known;
    - ``sradius`` (B,): spectral radius of the Jacobian where it was asked for, else -1.

    Attributes only: ``nfe``, calls of ``f`` (products with its Jacobian included), and ``status``
    (B,), :class:`Status` codes. Everything is computed when it is first looked at.
    """

    nfe: int

    def __init__(
        self, *args: Any, nfe: int = 0, status: Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if args and isinstance(args[0], SolverStat):
            nfe, status = nfe or args[0].nfe, args[0].status if status is None else status
        self.nfe = nfe
        self._status = status
        self._owed: tuple[Trace, StopRule, float] | None = None

    for _name in (
        *("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__", "__or__"),
        *("get", "keys", "values", "items", "copy", "pop", "setdefault", "__delitem__"),
    ):
        locals()[_name] = _filled(_name)
    del _name

    def __getattr__(self, name: str) -> Tensor:
        if not name.startswith("_") and name in self:
            return self[name]
        raise AttributeError(f"solver statistics have no {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self), self.nfe, self.status)

    @property
    def status(self) -> Tensor:
        """(B,) :class:`Status` codes."""
        self._fill()
        assert self._status is not None
        return self._status

    @property
    def converged(self) -> Tensor:
        """(B,) whether each sample met the tolerance."""
        return self.status == int(Status.CONVERGED)

    @property
    def failed(self) -> Tensor:
        """(B,) whether each sample's state should not be trusted."""
        return ~self.converged & (self.status != int(Status.STALLED))

    def summary(self) -> str:
        """One line for people; reads the device."""
        codes = self.status.tolist()
        counts = {s.name: codes.count(s) for s in Status if s in codes}
        worst = float(self["rel_lowest"].max()) if codes else 0.0
        told = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no samples"
        return f"{told}; {self.nfe} evaluations; worst relative residual {worst:.1e}"

    @classmethod
    def from_trace(cls, trace: Trace, stop: StopRule, nfe: int, eps: float) -> SolverStat:
        """Everything per sample from the raw record, computed when it is first looked at."""
        stats = cls(nfe=nfe)
        stats._owed = (trace, stop, eps)
        return stats

    def _fill(self) -> None:
        if self._owed is not None:
            owed, self._owed = self._owed, None
            values, self._status = _summarise(*owed)
            for key, value in values.items():
                dict.setdefault(self, key, value)  # what the caller has set stays
        for key in ("abs_lowest", "rel_lowest", "nstep", "sradius", "abs_trace", "rel_trace"):
            if not dict.__contains__(self, key):
                self[key] = torch.full((1, 1) if "trace" in key else (1,), -1.0)
        if self._status is None:
            lowest = dict.__getitem__(self, "abs_lowest")
            self._status = torch.full_like(lowest, int(Status.MAX_ITER), dtype=torch.int8)

    @classmethod
    def from_final_step(
        cls, z: Tensor | Sequence[Tensor], fz: Tensor | Sequence[Tensor], nstep: int = 0
    ) -> SolverStat:
        """Statistics of the last pair ``z, f(z)`` alone, for solvers that watch nothing else."""
        if not isinstance(z, Tensor):
            z, fz = (torch.cat([t.flatten(1) for t in ts], dim=1) for ts in (z, fz))
        assert isinstance(fz, Tensor)
        size, norm = (row_norm(t.flatten(1)) for t in (fz - z, fz))
        rel = relative(size, norm)
        return cls(
            abs_lowest=size,
            rel_lowest=rel,
            abs_trace=size[:, None],
            rel_trace=rel[:, None],
            nstep=torch.full_like(size, nstep),
            nfe=nstep,
        )


def _rebuild(values: dict[str, Tensor], nfe: int, status: Tensor) -> SolverStat:
    return SolverStat(values, nfe=nfe, status=status)


def _summarise(trace: Trace, stop: StopRule, eps: float) -> tuple[dict[str, Tensor], Tensor]:
    """The mapping's values and each sample's status, without reading the device."""
    sizes, norms = trace.sizes, trace.norms
    if not len(sizes):
        lowest = sizes.new_full(sizes.shape[1:], inf)
        values = {"abs_lowest": lowest, "rel_lowest": lowest, "nstep": torch.zeros_like(lowest)}
        status = torch.full_like(lowest, int(Status.MAX_ITER), dtype=torch.int8)
        return values | {"abs_trace": sizes.mT, "rel_trace": sizes.mT}, status
    rel, rows = relative(sizes, norms), torch.arange(len(sizes), device=sizes.device)[:, None]
    score = trace.scores(stop).nan_to_num(nan=inf, posinf=inf)  # (N, B)
    met = (score <= stop.goal) if stop.goal else torch.zeros_like(score, dtype=torch.bool)
    # A sample ends at the first iterate within the tolerance or not finite, or where it stalled;
    # what its mates make it do afterwards does not count.
    ends = met | (score == inf) if stop.goal else met
    last = torch.where(ends.any(0), ends.int().argmax(0), len(score) - 1)
    stalled = torch.zeros_like(ends[0])
    if trace.stalled is not None:
        stalled = (trace.stalled >= 0) & (trace.stalled <= last)
        last = torch.where(stalled, trace.stalled, last)
    after = rows > last
    converged = met.gather(0, last[None])[0]
    at = last if stop.return_final else torch.where(after, inf, score).argmin(0)
    if trace.shared is not None and stop.goal:  # chosen for all, and good enough for some
        own = (stop.measure(sizes, norms) <= stop.goal) & (rows <= last)
        converged |= own.gather(0, at[None])[0] & (score.gather(0, at[None])[0] < inf)
    steps = torch.tensor(trace.nfe, dtype=sizes.dtype).to(sizes.device)
    known = score.gather(0, at[None])[0] < inf  # otherwise the start itself was returned

    def fill(values: Tensor) -> tuple[Tensor, Tensor]:
        lowest = values.gather(0, at[None])[0]
        return lowest, torch.where(after, lowest, values).mT

    abs_lowest, abs_trace = fill(sizes)
    rel_lowest, rel_trace = fill(rel)
    values = {
        "abs_lowest": abs_lowest,
        "rel_lowest": rel_lowest,
        "abs_trace": abs_trace,
        "rel_trace": rel_trace,
        "nstep": torch.where(known, steps[at], 0.0),
    }
    # Growth below the square root of the precision is noise around a good state.
    final, rel_final = (t.gather(0, last[None])[0] for t in (score, rel))
    grown = (final > _GROWTH * score[0]) & (rel_final > eps**0.5)
    status = torch.where(grown, int(Status.DIVERGED), int(Status.MAX_ITER))
    status = torch.where(final < inf, status, int(Status.NONFINITE))
    status = torch.where(stalled, int(Status.STALLED), status)
    return values, torch.where(converged, int(Status.CONVERGED), status).to(torch.int8)
