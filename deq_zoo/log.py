"""Lines of a run's log: one JSON object each.

A line has a kind and a step. Lines of kind `train` have numbers by their names; lines of kind
`eval` and `test` have `metrics` (numbers by name) and `solver` (see `SolverRecord.summary`). A
number that is NaN or infinite is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

_NO_SOLVER: dict[str, Any] = {"nfe": None, "residual": None, "statuses": {}, "trace": []}


def read_line(text: str) -> dict[str, Any] | None:
    """Return a line of the log; None if it is torn, or not a line that training writes.

    Values of other types than they should have are dropped, so that readers need no checks.
    """
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    if not isinstance(line.get("step"), int) or isinstance(line["step"], bool):
        return None
    if line["kind"] == "train":
        numbers = {k: v for k, v in line.items() if _is_number(v) and k != "step"}
        return {"kind": "train", "step": line["step"], **numbers}
    if line["kind"] in ("eval", "test"):
        metrics = _numbers(line.get("metrics"))
        return {**line, "metrics": metrics, "solver": _solver(line)} if metrics else None
    return line


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in a line that `read_line` returned; null is NaN again."""
    return {name: nan if value is None else value for name, value in line["metrics"].items()}


def as_json(values: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinity become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(values))


def _solver(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of the solver in a line, with every key that readers expect."""
    solver = line.get("solver")
    given = solver if isinstance(solver, dict) else {}
    trace, band = given.get("trace"), given.get("band")
    optional: dict[str, Any] = {}
    if isinstance(band, list) and len(band) == 2 and all(map(_is_trace, band)):
        optional["band"] = band
    if isinstance(given.get("steps"), dict):
        steps = _numbers(given["steps"])
        optional["steps"] = {k: v for k, v in steps.items() if k.isdecimal() and v}
    numbers = _numbers(given)
    if numbers.get("spectral_radius", 0) is None:
        del numbers["spectral_radius"]
    return {
        **_NO_SOLVER,
        **numbers,
        "statuses": {k: v for k, v in _numbers(given.get("statuses")).items() if v is not None},
        "trace": trace if _is_trace(trace) else [],
        **optional,
    }


def _numbers(values: Any) -> dict[str, float | None]:
    return {k: v for k, v in values.items() if _is_number(v)} if isinstance(values, dict) else {}


def _is_trace(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_number, values))


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or null in the place of one."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
