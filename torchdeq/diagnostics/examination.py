"""The examination of a map before any solve: is it a fixed map of independent samples?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchdeq._torch import normalises_over_batch
from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.findings import Kind, Severity
from torchdeq.diagnostics.guarding import Clock, Copying, frozen
from torchdeq.diagnostics.linearisation import Linearisation
from torchdeq.diagnostics.precision import measured_precision
from torchdeq.grad.base import NoGraph
from torchdeq.grad.probing import probe_coupling
from torchdeq.norm.staleness import stale_norms
from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn
from torchdeq.pytree import walk
from torchdeq.reach import reachable_modules, reachable_parameters

_ROUNDINGS = 64  # rounding errors by which two equal calls may differ


def examine(case: Case, clock: Clock) -> tuple[str, ...]:
    """Examine the map of a case at its start and at random states near it; add findings.

    Return the checks that a lack of time left out.
    """
    with torch.no_grad():
        states = _probing_states(case)
    checks: dict[str, Callable[[], None]] = {
        "writes in place": lambda: _check_writes(case, states),
        "overflow": lambda: _check_finite(case),
        "randomness": lambda: _check_randomness(case, states[0]),
        "batch statistics": lambda: _check_modules(case, states[0]),
        "dependence on the state": lambda: _check_dependence(case, states),
        "precision": lambda: _check_precision(case, states[0]),
        "stale norms": lambda: _check_norms(case),
    }
    skipped = []
    for name, check in checks.items():
        if clock.passed(1.0):
            skipped.append(name)
        else:
            with torch.no_grad():
                check()
    if case.has(Kind.IGNORES_STATE, Kind.STATEFUL):
        return _left_out(skipped)
    if clock.passed(1.0):
        skipped.append("coupling")
    else:
        _check_jacobian(case, states[0])
    return _left_out(skipped)


def _left_out(names: list[str]) -> tuple[str, ...]:
    return (f"checks of f ({', '.join(names)}): out of time",) if names else ()


def _probing_states(case: Case) -> tuple[Tensor, Tensor]:
    """Return two random states of the size of `f(z0)`: at zero, dropout of the state would hide."""
    image = case.packed(Copying(case.f, case.packing))(case.start)
    size = image.square().mean().sqrt()
    size = torch.where(size.isfinite() & (size > 0), size, 1.0)
    noise = (torch.randn_like(case.start) for _ in range(2))
    first, second = (case.start + size * n for n in noise)
    return first, second


def _check_writes(case: Case, states: tuple[Tensor, Tensor]) -> None:
    copying = Copying(case.f, case.packing)
    f = case.packed(copying)
    for z in (case.start, *states):
        f(z)
    case.eps = max(case.eps, f.eps)
    if not (copying.wrote_input or copying.wrote_output):
        return
    what = "its input" if copying.wrote_input else "a tensor that it returned before"
    case.f = copying
    case.add(
        Kind.WRITES_IN_PLACE,
        Severity.ERROR,
        f"a call of f changed {what}",
        "A solver keeps states without copying them: return a new tensor each time, e.g. replace "
        "relu_() and += by relu() and +, or end f with .clone().",
    )


def _check_finite(case: Case) -> None:
    image = case.packed()(case.start)
    rows = ~image.isfinite().all(1)
    if not bool(rows.any()):
        return
    causes = [
        f"the parameter {name}"
        for name, p in reachable_parameters(case.original).items()
        if not bool(p.isfinite().all())
    ]
    causes += [
        f"args{path}"
        for path, t in walk(case.args)
        if isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all())
    ]
    if not bool(case.start.isfinite().all()):
        causes.append("the start z0")
    why = f"; {', '.join(causes[:3])} is not finite" if causes else ""
    case.add(
        Kind.OVERFLOW,
        Severity.ERROR,
        f"f(z0) is NaN or infinite for {int(rows.sum())} of {len(rows)} samples{why}",
        "Look at the inputs and parameters of f first: no solver can help.",
    )


def _check_randomness(case: Case, z: Tensor) -> None:
    difference = _change(case.packed(), z, z)
    if difference <= _ROUNDINGS * case.eps:
        return
    tamed = frozen(case.f, z.device)
    if _change(case.packed(tamed), z, z) > _ROUNDINGS * case.eps:
        case.add(
            Kind.STATEFUL,
            Severity.ERROR,
            f"two calls with the same input differ by {difference:.1e}, relative, even with the "
            "same random numbers",
            "A fixed point needs a map that does not change during a solve: look for counters, "
            "caches and buffers that f updates.",
        )
        return
    names = [
        name
        for name, module in called_modules(case, z).items()
        if module.training and "drop" in type(module).__name__.lower()
    ]
    case.f = tamed
    case.add(
        Kind.RANDOM,
        Severity.ERROR,
        f"two calls with the same input differ by {difference:.1e}, relative{_named(names)}; the "
        "figures below keep the random numbers fixed",
        "Draw one mask per solve: torchdeq.VariationalDropout with reset_dropout before each "
        "forward pass, or call model.eval().",
    )


def _check_modules(case: Case, z: Tensor) -> None:
    modules = called_modules(case, z)
    names = [name for name, module in modules.items() if normalises_over_batch(module)]
    if names:
        case.coupled = True
        case.add(
            Kind.BATCH_STATISTICS,
            Severity.WARNING,
            f"batch statistics are computed inside f{_named(names)}",
            "Samples then depend on each other and running statistics are updated at every "
            "evaluation: use GroupNorm or LayerNorm inside f, or call model.eval().",
            "--coupled true",
        )


def _check_dependence(case: Case, states: tuple[Tensor, Tensor]) -> None:
    if case.has(Kind.STATEFUL, Kind.OVERFLOW) or _change(case.packed(), *states) > 4 * case.eps:
        return
    case.add(
        Kind.IGNORES_STATE,
        Severity.ERROR,
        "f returned the same values for two different states",
        "The equilibrium is f itself after one evaluation: check that f uses its argument z and "
        "not a tensor of the same name outside.",
    )


def _check_precision(case: Case, z: Tensor) -> None:
    if case.has(Kind.STATEFUL, Kind.IGNORES_STATE):
        return
    declared, measured = case.eps, measured_precision(case.packed(), z)
    case.eps = max(declared, measured)
    own = torch.finfo(case.packing.dtype).eps
    if case.eps > 8 * own:
        how = "its output or autocast says so" if declared >= measured else "hidden inside f"
        case.add(
            Kind.LOW_PRECISION,
            Severity.NOTE,
            f"results of f carry rounding errors of about {case.eps:.0e}, relative ({how}); the "
            f"state is {case.packing.dtype}".replace("torch.", ""),
            "Residuals cannot fall below that: choose tolerances above it.",
        )


def _check_norms(case: Case) -> None:
    names = [
        name or "f"
        for name, module in reachable_modules(case.original).items()
        if stale_norms(module)
    ]
    if names:
        case.add(
            Kind.STALE_NORM,
            Severity.ERROR,
            f"the weight that f uses is not that of the current parameters{_named(names)}",
            "Call torchdeq.reset_norm(model) once at the start of every forward pass.",
        )


def _check_jacobian(case: Case, z: Tensor) -> None:
    linear = Linearisation(case.f, case.packing.unpack(z), case.args)
    u = torch.randn_like(z)
    try:
        cut = not bool(linear.vjp(u).any())
    except NoGraph:
        cut = True
    if cut:
        case.add(
            Kind.CUTS_GRAPH,
            Severity.WARNING,
            "f changes with its state, but its derivative by the state is zero",
            "Solves work, and gradients are those of one evaluation: look for detach, no_grad, "
            "item() or a step without derivative (round, argmax) inside f.",
        )
    elif len(z) > 1:
        _check_coupling(case, linear, u)


def _check_coupling(case: Case, linear: Linearisation, u: Tensor) -> None:
    if not case.coupled:
        _, case.coupled = probe_coupling(linear.vjp, u, len(u), case.eps)
    declared = case.config.coupled
    if not case.coupled or case.has(Kind.BATCH_STATISTICS):
        return
    wrong = declared is False
    case.add(
        Kind.COUPLED,
        Severity.ERROR if wrong else Severity.NOTE if declared else Severity.WARNING,
        "the Jacobian has entries between different samples of the batch"
        + (", and coupled=False says that there are none" if wrong else ""),
        "Nodes of a graph and steps of a chain are one system; if samples should be independent, "
        "look for a mean, softmax or norm over dimension 0."
        + ("" if declared else " With coupled=True both solves take the batch as one system."),
        *(() if declared else ("--coupled true",)),
    )


def called_modules(case: Case, z: Tensor) -> dict[str, nn.Module]:
    """Return the modules that a call of `f` runs, by their paths from `f`."""
    called: dict[str, nn.Module] = {}
    handles = []
    for name, module in reachable_modules(case.original).items():
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def note(m: nn.Module, _: Any, name: str = name) -> None:
            called[name or type(m).__name__] = m

        handles.append(module.register_forward_pre_hook(note))
    try:
        case.packed()(z)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _change(f: PackedFn, a: Tensor, b: Tensor) -> float:
    """Return the largest relative difference between two images, over samples; 0 for NaN."""
    first, second = f(a), f(b)
    size = torch.maximum(row_norm(first), row_norm(second))
    change = row_norm(first - second) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return float(change.nan_to_num(nan=0.0, posinf=0.0).max()) if len(change) else 0.0


def _named(names: list[str]) -> str:
    """Return up to three names of modules in parentheses, or nothing."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" ({', '.join(names[:3])}{more})"
