"""What `train`, `evaluate`, `predict` and `sample` print, and the listing of results."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from deq_zoo.log import as_json
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.task import Evaluation, Split, Task

if TYPE_CHECKING:
    from deq_zoo.training import Result

_STATUSES = {"MAX_ITER": "budget spent", "NONFINITE": "not finite"}


def show_results(
    results: Iterable[Prediction | Failure], out: OutFolder, listing: str, json: bool
) -> int:
    """Print results as they come, failures to stderr; return 1 if there was a failure, else 0.

    Args:
        results: predictions or samples.
        out: the folder; if the user named it, all results are written to `listing` in it, too.
        listing: the name of a file of JSON lines.
        json: print JSON lines, for programs, instead of text.
    """
    lines: list[str] = []
    failed = False
    try:
        for result in results:
            lines.append(as_json(_as_data(result)))
            if isinstance(result, Failure):
                failed = True
                print(f"deq-zoo: {_reason(result)}", file=sys.stderr, flush=True)
            elif not json:
                print(result.text, flush=True)
            if json:
                print(lines[-1], flush=True)
    finally:  # what was computed before an interruption is kept
        if out.asked and lines:
            out.write(listing, "".join(f"{line}\n" for line in lines))
    return int(failed)


def _as_data(result: Prediction | Failure) -> dict[str, Any]:
    if isinstance(result, Failure):
        return {"source": result.source, "failure": result.reason}
    files = [str(file) for file in result.files]
    return {"source": result.source, "data": dict(result.data), "files": files}


def _reason(failure: Failure) -> str:
    named = failure.source in failure.reason
    return failure.reason if named else f"{failure.source}: {failure.reason}"


def evaluation_as_data(evaluation: Evaluation, split: Split) -> dict[str, Any]:
    """Return an evaluation as plain values, with the residual after each step of the solver."""
    solver = evaluation.solver.summary()
    return {"split": split, "metrics": dict(evaluation.metrics), "solver": solver}


def show_training(result: Result, json: bool) -> int:
    """Print how a run ended, in its main process alone; return the exit code.

    Args:
        result: of the run.
        json: print JSON on a terminal, too.
    """
    if not result.main:
        return 0
    if not result.finished:
        print(
            f"deq-zoo: stopped at step {result.step} of {result.steps}; --resume goes on from "
            f"{result.run.path}, deq-zoo evaluate and deq-zoo report show how far it has come",
            file=sys.stderr,
        )
        if result.interrupted:
            return 128 + result.interrupted
    _print_metrics(result, json)
    return 0


def _print_metrics(result: Result, json: bool) -> None:
    """Print metrics line by line on a terminal, else one object of JSON."""
    run, preset = result.run, result.run.preset()
    if json or not sys.stdout.isatty():
        print(as_json({"run": str(run.path), **result.metrics}))
        return
    for name, value in result.metrics.items():
        print(f"{name}: {value:.4g}")
    if preset.target is not None:
        print(f"published {preset.target.metric}: {preset.target.value} ({preset.target.source})")
    print(f"run: {run.path}" + (f", report: {run.report}" if run.report.exists() else ""))


def describe_evaluation(evaluation: Evaluation, task: Task) -> Iterator[str]:
    """Yield the lines that people read: a metric each, and one about the solver."""
    for name, value in evaluation.metrics.items():
        unit = f" {task.score.unit}" if name == task.score.name and task.score.unit else ""
        yield f"{name}: {value:.4g}{unit}"
    solver = evaluation.solver.summary()
    if not evaluation.solver.samples:
        return
    statuses = solver["statuses"]
    total = sum(statuses.values())
    shares = [
        f"{100 * count / total:.3g} % {_STATUSES.get(name) or name.lower().replace('_', ' ')}"
        for name, count in sorted(statuses.items(), key=lambda item: -item[1])
    ]
    parts = [f"{solver['nfe']:.4g} evaluations", f"relative residual {solver['residual']:.1e}"]
    if "spectral_radius" in solver:
        parts.append(f"mean spectral radius {solver['spectral_radius']:.2f}")
    yield f"solver: {', '.join(parts + shares)}"
