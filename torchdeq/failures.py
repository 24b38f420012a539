"""Reports about samples that did not converge: warnings, errors, and the policy that chooses."""

from __future__ import annotations

import warnings

from torch import Tensor

from torchdeq.callers import stack_level
from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.registry import suggest
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status

POLICIES = ("ignore", "auto", "warn", "raise")
BACKWARD = "the backward solve"  # the name of that solve in reports

_HINT = "allow more evaluations, loosen the tolerance, damp f or choose another solver"


class ConvergenceWarning(UserWarning):
    """The warning about samples that did not converge."""


class ConvergenceError(RuntimeError):
    """The error about samples that did not converge, for `on_failure="raise"`."""


def check_policy(on_failure: str) -> None:
    """Raise `ValueError` for an unknown failure policy."""
    if on_failure not in POLICIES:
        raise ValueError(f"unknown failure policy {on_failure!r}{suggest(on_failure, POLICIES)}")


def report_failures(stats: SolverStat, policy: str, solve: str, peers: Peers = ALONE) -> None:
    """Warn or raise if a sample failed.

    The text of a warning carries no numbers, so that Python shows it once per call site; the text
    of an error carries them.

    Args:
        stats: statistics of the solve.
        policy: `"warn"`, `"raise"` or `"auto"`. The last warns, except about a forward solve that
            spends its budget, or that returns a good state after which its residual grew.
        solve: the name of the solve in the text; every name but `BACKWARD` is a forward solve.
        peers: the processes of the solve: an error in one of them is an error in all, because the
            others would wait for it.
    """
    codes = [Status(code) for code in stats.status.tolist()]
    failed = sorted({code for code in codes if code.failed})
    if policy == "auto" and solve != BACKWARD:
        failed = [code for code in failed if code > Status.DIVERGED]
        if Status.DIVERGED in codes and bool(_useless(stats).any()):
            failed.insert(0, Status.DIVERGED)
    if bool((stats["abs_lowest"] < 0).any()):  # -1: the solver reports no residuals
        failed = []
    if policy == "raise" and peers.any(bool(failed)) and not failed:
        raise ConvergenceError(f"{solve} failed in another process, whose error says why")
    if not failed:
        return
    reasons = "; ".join(f"{code.name}: {code.sentence}" for code in failed)
    if policy == "raise":
        raise ConvergenceError(
            f"{solve} failed for some samples: {stats.summary()} ({reasons}); {_HINT}"
        )
    warnings.warn(
        f"{solve} did not converge for some samples ({reasons}); {_HINT}; the statistics say "
        'which, on_failure="ignore" silences this',
        ConvergenceWarning,
        stacklevel=stack_level(),
    )


def _useless(stats: SolverStat) -> Tensor:
    """Return (B,) whether a sample diverged without ever having halved its first residual."""
    diverged = stats.status == int(Status.DIVERGED)
    if not stats["abs_trace"].shape[1]:  # a stream keeps no traces
        return diverged
    return diverged & ~(stats["abs_lowest"] < 0.5 * stats["abs_trace"][:, 0])
