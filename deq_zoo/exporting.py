"""Exported models: the file of a run for another runtime, and the page of facts beside it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from deq_zoo.errors import ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.files import write_atomically
from deq_zoo.packages import optional
from torchdeq import DEQConfig, Status, export
from torchdeq.solver import SOLVERS, Solver, make_solver

SUFFIXES = {"pt2": ".pt2", "onnx": ".onnx", "aoti": ".aoti.pt2"}
_REPORT = {
    "status": "how the solve of each sample ended, by number; see `statuses`",
    "steps": "evaluations of f up to the answer of each sample",
    "residual": "of the answer of each sample, in the terms of the tolerance",
    "evaluations": "calls of f",
}


def pick_solver(name: str | None, deq: DEQConfig) -> Solver[Any]:
    """Return the solver of an export; raise `ZooError` for one that a graph cannot hold.

    Args:
        name: of the solver that the user asked for; None takes that of the model.
        deq: the options of the model, whose options of this solver hold.
    """
    chosen = deq.f_solver if name is None else name
    try:
        options = deq.f_solver_kwargs if chosen == deq.f_solver else {}
        solver = make_solver(chosen, options)
        export.check_solver(solver)
    except KeyError as error:
        raise ZooError(str(error.args[0])) from None
    except ValueError as error:
        if name is None:
            names = ", ".join(n for n, kind in SOLVERS.items() if kind in export.EXPORTABLE)
            raise ZooError(
                f"the model was trained with f_solver={deq.f_solver}, which cannot be exported "
                f"({error}). Another solver finds the same fixed point with another number of "
                f"evaluations: choose it by --solver, one of {names}, and compare with deq-zoo "
                "evaluate RUN --f_solver NAME"
            ) from None
        raise ZooError(str(error)) from None
    return solver


def write_export(
    exportable: Exportable, deq: DEQConfig, solver: str | None, kind: str, path: Path
) -> list[Path]:
    """Write an exported model and the JSON page about it; return both paths.

    Args:
        exportable: the module with its example.
        deq: the options of its equilibrium.
        solver: the name of the solver that the user asked for; None for that of the model.
        kind: `pt2`, `onnx` or `aoti`.
        path: the file to write.
    """
    _check_packages(kind)
    example = tuple(exportable.example.values())
    shapes = None if exportable.open_batch else tuple(None for _ in example)
    try:
        program = export.export(
            exportable.module, example, solver=_solver_of(exportable, solver, deq),
            dynamic_shapes=shapes,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError) as error:
        raise ZooError(f"this model cannot be exported: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        try:
            _WRITERS[kind](program, part)
        except RuntimeError as error:
            raise ZooError(f"this model cannot be written as {kind}: {error}") from error
        page = path.with_name(path.name + ".json")
        facts = describe(program, exportable, deq, kind, path.name)
        for file in Path(folder).iterdir():  # large weights of ONNX are in a second file
            shutil.move(file, path.parent / file.name)
    write_atomically(page, json.dumps(facts, indent=1) + "\n")
    return [path, page]


def _solver_of(exportable: Exportable, name: str | None, deq: DEQConfig) -> Solver[Any] | None:
    """Return the solver for all solves of a module; None if it has no equilibrium."""
    if not exportable.solves:
        if name is not None:
            raise ZooError("this network has no equilibrium to solve for: drop --solver")
        return None
    return pick_solver(name, deq)


def describe(
    program: ExportedProgram, exportable: Exportable, deq: DEQConfig, kind: str, file: str
) -> dict[str, Any]:
    """Return the facts about an exported model, as plain values."""
    with torch.no_grad():
        outputs: dict[str, Tensor] = program.module()(*exportable.example.values())
    batch = next(iter(exportable.example.values())).shape[0] if exportable.open_batch else None
    page: dict[str, Any] = {
        "file": file,
        "format": kind,
        "inputs": [
            _tensor(n, t, batch, exportable.meanings) for n, t in exportable.example.items()
        ],
        "outputs": [_tensor(n, t, batch, exportable.meanings) for n, t in outputs.items()],
        "before": exportable.before,
        "after": exportable.after,
        "facts": dict(exportable.facts),
    }
    if exportable.solves:
        page["solve"] = {"tolerance": deq.f_tol, "mode": deq.f_stop_mode}
        page["statuses"] = {str(int(code)): f"{code.name}: {code.sentence}" for code in Status}
    return page


def _tensor(name: str, t: Tensor, batch: int | None, meanings: Mapping[str, str]) -> dict[str, Any]:
    """Return name, type, shape and meaning of an input or output."""
    shape: list[int | str] = list(t.shape)
    if shape and shape[0] == batch:
        shape[0] = "batch"
    meaning = meanings.get(name) or _REPORT.get(name.rstrip("0123456789").rstrip("_"), "")
    kind = str(t.dtype).removeprefix("torch.")
    return {"name": name, "dtype": kind, "shape": shape, "meaning": meaning}


def _check_packages(kind: str) -> None:
    if kind == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            optional(package, "export", "models in ONNX")


def _save(program: ExportedProgram, path: Path) -> None:
    torch.export.save(program, path)


_WRITERS: dict[str, Callable[[ExportedProgram, Path], object]] = {
    "pt2": _save,
    "onnx": export.to_onnx,
    "aoti": export.to_aoti,
}
