"""Stop rules: the budget and the tolerance of a solve, and the status in which a sample ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf, nan
from typing import Literal

import torch
from torch import Tensor

from torchdeq.checks import require_choice, require_whole
from torchdeq.distributed.peers import SyncStop, check_sync_stop

EPS = 1e-9  # keeps the relative residual of a zero state finite, as in torchdeq 0.1.0
MODES = ("abs", "rel")
NORMS = ("l2", "rms")


class Status(IntEnum):
    """How the solve of one sample ended."""

    CONVERGED = 0
    MAX_ITER = 1
    STALLED = 2
    DIVERGED = 3
    NONFINITE = 4

    @property
    def sentence(self) -> str:
        """Return what the status means, as a sentence."""
        return _SENTENCES[self]

    @property
    def failed(self) -> bool:
        """Return whether the returned state is unreliable; a stalled state is reliable."""
        return self not in (Status.CONVERGED, Status.STALLED)


_SENTENCES = {
    Status.CONVERGED: "the residual met the tolerance",
    Status.MAX_ITER: "the budget of evaluations ran out before the tolerance was met",
    Status.STALLED: "the residual has reached the limit of the precision in which f computes",
    Status.DIVERGED: "the residual grew to more than ten times its first value",
    Status.NONFINITE: "f returned a NaN or an infinity; the best finite state is kept",
}


@dataclass(frozen=True)
class StopRule:
    r"""An exact budget of evaluations and a tolerance on the residual of each sample.

    With $g = f(z) - z$ of one sample, over the whole packed state, the tolerance is met if

    - `mode="abs"`: $|g| \le$ `tol`;
    - `mode="rel"`: $|g| / (|f(z)| + \epsilon) \le$ `tol`;
    - `rtol` and `atol` (with `tol=None`): $|g| \le$ `atol + rtol` $|f(z)|$.

    With `norm="rms"` both norms are divided by $\sqrt D$, for states of $D$ numbers per sample, so
    that an absolute tolerance means the same at every size. The residuals in the statistics are
    then root mean squares, too.

    Args:
        max_iter: the exact number of evaluations of `f`; 0 returns the start.
        tol: the tolerance. With 0 or None a solve spends its whole budget: it never stops early,
            warns about nothing and reads nothing back from the device.
        mode: `"abs"` or `"rel"`.
        rtol: relative part of the joint test.
        atol: absolute part of the joint test.
        check_every: evaluations between two checks of the residuals by the host. With `"auto"` a
            solve on an accelerator looks less often while the residual is far from the goal and
            shrinks steadily, which costs a few evaluations more; where the host reads for free, and
            in a linear solve, `"auto"` is 1.
        return_final: spend the budget and return the last state instead of the best one.
        norm: `"l2"`, or `"rms"` for the root mean square over the numbers of a sample (over all
            numbers of the batch if its samples are one coupled system).
        sync_stop: which processes of a distributed program go on until all of them are done, so
            that they evaluate `f` equally often: a process group, True or `"world"` for all
            processes, False for none. By default a solve finds out whether `f` needs it: `f` calls
            a `SyncBatchNorm`, or a function that `torchdeq.distributed.collective` announces. Each
            sample keeps the state, the status and the number of steps of its own convergence.
    """

    max_iter: int = 40
    tol: float | None = 1e-3
    mode: str = "abs"
    rtol: float | None = None
    atol: float | None = None
    check_every: int | Literal["auto"] = 1
    return_final: bool = False
    norm: str = "l2"
    sync_stop: SyncStop = None

    def __post_init__(self) -> None:
        require_choice("stop mode", self.mode, MODES)
        require_choice("norm", self.norm, NORMS)
        require_whole("max_iter", self.max_iter, 0)
        check_sync_stop(self.sync_stop)
        object.__setattr__(self, "max_iter", int(self.max_iter))  # 40.0 from a config file
        if self.check_every != "auto":
            require_whole('check_every, unless it is "auto",', self.check_every)
            object.__setattr__(self, "check_every", int(self.check_every))
        for name in ("tol", "rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ValueError(f"{name} must be None or a finite number >= 0, got {value}")
        if (self.rtol is None) != (self.atol is None):
            raise ValueError(
                f"rtol and atol go together, got rtol={self.rtol} and atol={self.atol}: give both "
                "(0 is allowed) or neither"
            )
        if self.rtol is not None and self.tol is not None:
            raise ValueError(
                "rtol and atol are a stopping test instead of tol, got all three: pass tol=None"
            )

    @property
    def interval(self) -> int:
        """Return `check_every`, or 1 for `"auto"`."""
        return 1 if self.check_every == "auto" else self.check_every

    @property
    def goal(self) -> float:
        """Return the largest value of `measure` that stops a solve; 0 if nothing stops it early."""
        if self.return_final:
            return 0.0
        if self.rtol is not None and self.atol is not None:
            return 1.0 if self.rtol or self.atol else 0.0
        return self.tol or 0.0

    def length(self, size: int) -> float:
        """Return the divisor from the Euclidean norm of `size` numbers to the norm of this rule."""
        return max(size, 1) ** 0.5 if self.norm == "rms" else 1.0

    def measure(self, size: Tensor, norm: Tensor) -> Tensor:
        """Return the residual that `goal` limits, from `size` = $|g|$ and `norm` = $|f(z)|$."""
        if self.goal and self.rtol is not None and self.atol is not None:
            allowed = self.rtol * norm + self.atol
            limits = torch.finfo(allowed.dtype)
            ratio = size / allowed.clamp_min(limits.tiny)
            # A zero image allows no residual: keep the ratio finite and increasing with |g|.
            half = limits.max / 2
            ratio = torch.where(ratio > half, half + half * (size / (size + 1)), ratio)
            return torch.where((allowed == inf) | (size == inf), inf, ratio)
        return relative(size, norm) if self.mode == "rel" else size


def parse_interval(value: object) -> int | Literal["auto"]:
    """Return the interval of checks that an option or a flag names; raise `ValueError` if none."""
    if value == "auto":
        return "auto"
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = nan
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError(f"expected a whole number or auto, got {value!r}")
    return int(number)


def relative(size: Tensor, norm: Tensor) -> Tensor:
    """Return |f(z) - z| / (|f(z)| + eps), and infinity where |f(z)| overflows."""
    allowed = norm + EPS
    return torch.where(allowed == inf, inf, size / allowed)


def precision_floor(eps: float) -> float:
    """Return the relative residual that a map with machine epsilon `eps` can hardly go below."""
    return eps if eps > 1e-4 else 4 * eps  # half types get below their eps, others near it
