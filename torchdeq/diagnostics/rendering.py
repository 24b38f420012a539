"""A diagnosis as text, as tables of `rich`, and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import isfinite
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdeq.diagnostics.conclusions import shown

if TYPE_CHECKING:
    from torchdeq.diagnostics.diagnosis import Diagnosis
    from torchdeq.diagnostics.trials import BackwardTrial, SolverTrial

_WIDTH = 100
_MARKS = {0: "note", 1: "WARNING", 2: "ERROR"}
_COLOURS = {0: "green", 1: "yellow", 2: "red"}


class Table(NamedTuple):
    """A table: its title, the names of its columns, and its cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as plain text."""
    parts = [heading(diagnosis), "", *_findings(diagnosis)]
    for table in tables(diagnosis):
        parts += ["", *_lines_of(table)]
    jacobian = list(_jacobian(diagnosis))
    parts += ["", *jacobian] if jacobian else []
    parts += ["", "Recommendation"]
    parts += [_wrapped(f"- {sentence}", 4) for sentence in diagnosis.recommendation.words]
    if diagnosis.recommendation.flags:
        parts.append("  flags: " + " ".join(diagnosis.recommendation.flags))
    parts += [_wrapped(line, 4) for line in _notes(diagnosis)]
    return "\n".join(parts)


def show(diagnosis: Diagnosis) -> None:
    """Print a diagnosis, by `rich` if it is installed (extra `insight`)."""
    if find_spec("rich") is None:
        print(as_text(diagnosis))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console()
    console.print(f"[bold]{escape(heading(diagnosis))}[/bold]")
    for finding in diagnosis.findings:
        colour = _COLOURS[finding.severity]
        console.print(f"[{colour}]{_MARKS[finding.severity]}[/{colour}] {escape(str(finding))}")
    for table in tables(diagnosis):
        grid = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            grid.add_column(column, justify="left" if i == 0 else "right")
        for row in table.rows:
            grid.add_row(*(escape(cell) for cell in row))
        console.print(grid)
    for line in _jacobian(diagnosis):
        console.print(escape(line))
    console.print("[bold]Recommendation[/bold]")
    for sentence in diagnosis.recommendation.words:
        console.print(escape(f"- {sentence}"))
    if diagnosis.recommendation.flags:
        console.print("  " + escape(" ".join(diagnosis.recommendation.flags)))
    for line in _notes(diagnosis):
        console.print(f"[dim]{escape(line)}[/dim]")


def heading(diagnosis: Diagnosis) -> str:
    """Return one line about the map that was examined."""
    s = diagnosis.subject
    samples = f"{s.batch} sample{'s' if s.batch != 1 else ''}"
    coupled = ", one coupled system" if s.coupled else ""
    return (
        f"{samples} of {s.size} numbers, {s.dtype} on {s.device}{coupled}; "
        f"tolerance {s.tolerance}; examined in {diagnosis.seconds:.1f} s"
    )


def tables(diagnosis: Diagnosis) -> Iterator[Table]:
    """Yield the tables of solvers, gradients and costs."""
    columns: tuple[str, ...]
    if diagnosis.solvers:
        columns = ("solver", "evaluations", "time", "residual", "status", "memory")
        yield Table("Solvers", columns, [_solver_row(t) for t in diagnosis.solvers])
    if diagnosis.backwards:
        columns = ("gradient", "products", "time", "cosine", "length", "adjoint", "memory")
        yield Table("Gradients", columns, [_backward_row(t) for t in diagnosis.backwards])
    cost = diagnosis.cost
    if cost is not None:
        row = (seconds(cost.f), seconds(cost.graph), seconds(cost.vjp), seconds(cost.jvp))
        columns = ("one call", "with graph", "J^T u", "J v", "saved for backward")
        yield Table("Cost of f", columns, [(*row, size(cost.saved_bytes))])


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as numbers and strings in dicts and lists; NaN and infinity are None."""
    jacobian = diagnosis.jacobian
    values = [] if jacobian is None else jacobian.spectrum.values.tolist()
    return {
        "subject": vars(diagnosis.subject),
        "findings": [
            {
                "kind": finding.kind.name,
                "severity": finding.severity.name,
                "evidence": finding.evidence,
                "cure": finding.cure,
                "flags": list(finding.flags),
            }
            for finding in diagnosis.findings
        ],
        "solvers": [_fields(t, ("stats", "z")) for t in diagnosis.solvers],
        "backwards": [_fields(t, ()) for t in diagnosis.backwards],
        "eigenvalues": [[[v.real, v.imag] for v in row] for row in values],
        "cost": None if diagnosis.cost is None else vars(diagnosis.cost),
        "recommendation": {
            "words": list(diagnosis.recommendation.words),
            "flags": list(diagnosis.recommendation.flags),
        },
        "seconds": diagnosis.seconds,
        "skipped": list(diagnosis.skipped),
    }


def _fields(trial: Any, without: Sequence[str]) -> dict[str, Any]:
    return {k: _plain(v) for k, v in vars(trial).items() if k not in without}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return None
    if hasattr(value, "__dataclass_fields__"):
        return {k: _plain(v) for k, v in vars(value).items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def seconds(value: float | None) -> str:
    """Return a time as text."""
    if value is None:
        return "-"
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(count: float | None) -> str:
    """Return a number of bytes as text."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _solver_row(trial: SolverTrial) -> tuple[str, ...]:
    name = f"{trial.name} (yours)" if trial.configured else trial.name
    if trial.failure:
        return (name, "-", "-", "-", _brief(trial.failure), "-")
    total = sum(trial.statuses.values())
    statuses = ", ".join(
        status if count == total else f"{status} {count}/{total}"
        for status, count in trial.statuses.items()
    )
    row = (name, str(trial.evaluations), seconds(trial.seconds), f"{trial.residual:.1e}")
    return (*row, statuses, size(trial.memory))


def _backward_row(trial: BackwardTrial) -> tuple[str, ...]:
    if trial.failure or trial.quality is None:
        return (trial.name, "-", "-", "-", "-", _brief(trial.failure), "-")
    adjoint = "" if trial.residual is None else f"{trial.residual:.1e}"
    if trial.solved is False:
        adjoint += ", failed"
    quality = (f"{trial.quality.cosine:.4f}", f"{trial.quality.norm_ratio:.3g}")
    return (
        trial.name, str(trial.products), seconds(trial.seconds), *quality, adjoint,
        size(trial.memory),
    )  # fmt: skip


def _brief(failure: str) -> str:
    """Return a failure as a table can show it."""
    return failure if len(failure) < 20 else "failed"


def _notes(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what was skipped, and the failures that a table cannot show."""
    yield from (f"skipped: {reason}" for reason in diagnosis.skipped)
    trials = [(t.name, t.failure) for t in diagnosis.solvers]
    trials += [(t.name, t.failure) for t in diagnosis.backwards]
    long = [(name, why) for name, why in trials if _brief(why) != why]
    yield from (f"failed: {name}: {why.removeprefix(f'{name} ')}" for name, why in long)


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    for finding in diagnosis.findings:
        yield _wrapped(f"{_MARKS[finding.severity]}: {finding}", 4)
    if not diagnosis.findings:
        yield "nothing unusual"


def _jacobian(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield lines about the Jacobian; the slowest sample is that with the largest radius."""
    jacobian = diagnosis.jacobian
    if jacobian is None:
        return
    worst = int(jacobian.spectrum.radius.nan_to_num(nan=-1.0).argmax())
    values = [complex(v) for v in jacobian.spectrum.values[worst] if v.imag >= 0]
    yield f"Leading eigenvalues of J, slowest sample: {', '.join(shown(v) for v in values)}"
    if jacobian.directions is not None:
        smallest = float(jacobian.directions.values.min())
        yield f"Smallest singular value of I - J, of all samples: {smallest:.3g}"
    if jacobian.normality is not None:
        n = jacobian.normality
        yield (
            f"Largest norm of J, of all samples: {float(n.norm.max()):.3g}; largest transient "
            f"growth: {float(n.growth.max()):.3g}"
        )


def _lines_of(table: Table) -> Iterator[str]:
    """Yield the lines of a table as text, the first column to the left, others to the right."""
    cells = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    yield table.title
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  " + "  ".join((row[0].ljust(widths[0]), *rest)).rstrip()


def _wrapped(text: str, indent: int) -> str:
    return fill(text, _WIDTH, subsequent_indent=" " * indent)
