"""Statistics of a solve: residuals, steps and status of each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from torchdeq.numbers import row_norm
from torchdeq.stopping import Status, StopRule, relative
from torchdeq.trace import Trace, summarise
from torchdeq.tracing import untraced

P = ParamSpec("P")
R = TypeVar("R")


def _computing_first(name: str) -> Any:
    """Return the `dict` method of that name, changed so that it computes the statistics first."""
    method = getattr(dict, name)

    @wraps(method)
    def call(self: SolverStat, *args: Any, **kwargs: Any) -> Any:
        self._compute()
        return method(self, *args, **kwargs)

    return call


class SolverStat(dict[str, Tensor]):
    """Statistics of a solve, as attributes and as the mapping of torchdeq 0.1.0.

    Keys, each also an attribute (`B` samples, `N` iterates):

    - `abs_lowest`, `rel_lowest` (B,): the residual $|f(z) - z|$, and this divided by $|f(z)|$, at
      the returned state; root mean squares if the stop rule says `norm="rms"`;
    - `abs_trace`, `rel_trace` (B, N): the same by iterate; the value of a sample that has finished
      is repeated;
    - `nstep` (B,): evaluations of `f` up to the returned state of each sample;
    - `sradius` (B,): the spectral radius of the Jacobian if the caller asked for it, else -1.

    Attributes only: `nfe`, the number of calls of `f` (products with its Jacobian included), and
    `status` (B,), codes of `Status`. The first access to a value computes all of them.
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
        self._uncomputed: tuple[Trace, StopRule, float] | None = None

    for _name in (
        *("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__", "__or__"),
        *("get", "keys", "values", "items", "copy", "pop", "setdefault", "__delitem__"),
    ):
        locals()[_name] = _computing_first(_name)
    del _name

    def __getattr__(self, name: str) -> Tensor:
        if not name.startswith("_") and name in self:
            return self[name]
        raise AttributeError(f"solver statistics have no {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self), self.nfe, self.status)

    @property
    def status(self) -> Tensor:
        """Return (B,) the `Status` code of each sample."""
        self._compute()
        assert self._status is not None
        return self._status

    @property
    def converged(self) -> Tensor:
        """Return (B,) whether each sample met the tolerance."""
        return self.status == int(Status.CONVERGED)

    @property
    def failed(self) -> Tensor:
        """Return (B,) whether the state of each sample is unreliable."""
        return ~self.converged & (self.status != int(Status.STALLED))

    def summary(self) -> str:
        """Return counts by status, evaluations and worst residual in one line; reads the device."""
        codes = self.status.tolist()
        counts = {s.name: codes.count(s) for s in Status if s in codes}
        worst = float(self["rel_lowest"].max()) if codes else 0.0
        outcomes = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no samples"
        return f"{outcomes}; {self.nfe} evaluations; worst relative residual {worst:.1e}"

    @classmethod
    def from_trace(cls, trace: Trace, stop: StopRule, nfe: int, eps: float) -> SolverStat:
        """Return statistics that are computed from a trace at the first access.

        Args:
            trace: the residuals of the solve.
            stop: its stop rule.
            nfe: calls of `f`.
            eps: machine epsilon of the precision in which `f` computes.
        """
        stats = cls(nfe=nfe)
        stats._uncomputed = (trace, stop, eps)
        return stats

    def _compute(self) -> None:
        """Compute the missing values; a value that the caller has set stays."""
        if self._uncomputed is not None:
            inputs, self._uncomputed = self._uncomputed, None
            values, self._status = summarise(*inputs)
            for key, value in values.items():
                dict.setdefault(self, key, value)
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
        """Return statistics of the last pair `z, f(z)`, for solvers that record no other pair."""
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


def untraced_solve(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function that solves such that `torch.compile` does not trace it.

    Compiled code gets statistics that have been computed: the compiler counts the entries of a dict
    without asking it, so a dict that waits for the first access makes its guards fail.
    """
    return untraced(fn, _with_statistics)


def _with_statistics(result: R) -> R:
    """Return the result of a solve after its statistics have been computed."""
    for part in result if isinstance(result, tuple) else (getattr(result, "stats", None),):
        if isinstance(part, SolverStat):
            part._compute()
    return result


def _rebuild(values: dict[str, Tensor], nfe: int, status: Tensor) -> SolverStat:
    """Return unpickled statistics."""
    return SolverStat(values, nfe=nfe, status=status)
