"""Programs for other runtimes: ONNX, and libraries that are compiled ahead of time."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from torchdeq._torch import tree_leaves
from torchdeq.export.package import Package, read_package, write_package

OPSET = 20
_ONNX = ("onnx", "onnxscript")
_TOLERANCE = 1e-3  # relative to the largest number of an output


def to_onnx(program: ExportedProgram, path: str | Path, check: bool = True) -> Path:
    """Write a program as an ONNX model, in which every loop is one `Loop` node.

    Inputs and outputs have the names of the program. Needs the packages `onnx` and `onnxscript`.

    Args:
        program: from `export`.
        path: the file to write.
        check: run the model in `onnxruntime` on the example of the program, and raise
            `RuntimeError` if its answers differ.
    """
    lacking = _missing(*_ONNX, *(["onnxruntime"] if check else []))
    if lacking:
        raise ModuleNotFoundError(
            f"{lacking[0]} is not installed: pip install {' '.join(lacking)}", name=lacking[0]
        )
    path = Path(path)
    expected = _run_example(program)
    with _silence("torch.onnx", "onnxscript"):
        model = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=input_names(program),
            output_names=list(expected),
            verbose=False,
        )
    assert model is not None
    model.save(str(path))
    if check:
        _compare(expected, _run_onnx(program, path), "onnxruntime")
    return path


def to_aoti(program: ExportedProgram, path: str | Path, check: bool = True) -> Path:
    """Compile a program ahead of time and write a package, which Python and C++ can load.

    The package holds machine code for the device of the program, and its weights. In Python
    `load_aoti(path)` returns it as a function; `examples/export` has a program in C++. Compiling
    needs a C++ compiler, and takes from half a minute to several minutes.

    Args:
        program: from `export`.
        path: the file to write; its name ends with `.pt2`.
        check: run the package on the example of the program, and raise `RuntimeError` if its
            answers differ.
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ValueError(f"the name of a package ends with .pt2, got {path.name}")
    with _silence("torch._inductor"):
        write_package(program, path)
    if check:
        _compare(_run_example(program), load_aoti(path)(*_example(program)), "the package")
    return path


def load_aoti(path: str | Path) -> Package:
    """Return the program in a package that `to_aoti` wrote, as a function of the inputs."""
    return read_package(Path(path))


def has_onnx() -> bool:
    """Return whether the packages for ONNX are installed: the extra `export`."""
    return not _missing(*_ONNX, "onnxruntime")


def input_names(program: ExportedProgram) -> list[str]:
    """Return the names of the inputs of a program, in order."""
    return list(program.graph_signature.user_inputs)


@contextmanager
def _silence(*names: str) -> Iterator[None]:
    """Run a block without warnings of other packages about their own code."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _example(program: ExportedProgram) -> tuple[Any, ...]:
    assert program.example_inputs is not None
    inputs: tuple[Any, ...] = program.example_inputs[0]
    return inputs


def _run_example(program: ExportedProgram) -> dict[str, Tensor]:
    with torch.no_grad():
        outputs: dict[str, Tensor] = program.module()(*_example(program))
    return outputs


def _run_onnx(program: ExportedProgram, path: Path) -> dict[str, Tensor]:
    """Return the answers of `onnxruntime` to the example of a program."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tensors = [t for t in tree_leaves(_example(program)) if isinstance(t, Tensor)]
    names = [node.name for node in session.get_inputs()]
    inputs = {n: t.numpy(force=True) for n, t in zip(names, tensors, strict=True)}
    outputs = [node.name for node in session.get_outputs()]
    answers = (torch.from_numpy(a) for a in session.run(None, inputs))
    return dict(zip(outputs, answers, strict=True))


def _compare(expected: dict[str, Tensor], got: dict[str, Tensor], who: str) -> None:
    """Raise `RuntimeError` if outputs differ by more than rounding.

    Residuals are differences of nearly equal numbers, of which rounding leaves few digits.
    """
    for name, value in expected.items():
        if not value.is_floating_point() or name.startswith("residual"):
            continue
        other = got[name].to(value)
        scale = float(value.nan_to_num(0, 0, 0).abs().amax()) if value.numel() else 0.0
        if not torch.allclose(other, value, _TOLERANCE, _TOLERANCE * scale, equal_nan=True):
            worst = float((other - value).abs().nan_to_num(torch.inf).amax())
            raise RuntimeError(
                f"{who} gives another {name} than the program: they differ by {worst:.1e}, and the "
                f"largest number is {scale:.1e}"
            )


def _missing(*packages: str) -> list[str]:
    """Return the packages that are not installed."""
    return [package for package in packages if find_spec(package) is None]
