"""Compiled packages in Python: machine code does not check its inputs, so this file does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from torchdeq._torch import compile_package, load_package
from torchdeq.pytree import map_tensors, walk

_KEY = "torchdeq_inputs"  # of the metadata of a package


class Package:
    """A compiled program, called with the inputs of the program; it returns a dict of tensors.

    The machine code reads the memory of its inputs as it was compiled to. So other dtypes, shapes,
    devices and structures are errors here, and inputs with gaps in their memory are copied.

    Args:
        run: the compiled program.
        inputs: the description of its inputs, see `_describe`.
    """

    def __init__(self, run: Callable[..., dict[str, Tensor]], inputs: list[list[Any]]) -> None:
        self._run, self._inputs = run, inputs

    def __call__(self, *inputs: Any) -> dict[str, Tensor]:
        leaves = dict(walk(inputs))
        expected = [path for path, *_ in self._inputs]
        if list(leaves) != expected:
            raise ValueError(
                f"the inputs of this package are {', '.join(expected)}: got {', '.join(leaves)}"
            )
        sizes: dict[str, int] = {}
        for path, *kind in self._inputs:
            _check(f"input {path}", leaves[path], kind, sizes)
        return self._run(*map_tensors(inputs, Tensor.contiguous))


def write_package(program: ExportedProgram, path: Path) -> None:
    """Compile a program and write it with the description of its inputs."""
    compile_package(program, str(path), {_KEY: json.dumps(_describe(program))})


def read_package(path: Path) -> Package:
    """Return the program of a package; raise if `write_package` did not write it."""
    run, metadata = load_package(str(path))
    if _KEY not in metadata:
        raise ValueError(
            f"{path} does not describe its inputs: torchdeq.export.to_aoti writes packages that do"
        )
    return Package(run, json.loads(metadata[_KEY]))


def _describe(program: ExportedProgram) -> list[list[Any]]:
    """Return path, dtype, device and shape of each input; an open size is the name of a symbol.

    Path and `repr` of inputs that are no tensors: their values are constants of the program.
    """
    assert program.example_inputs is not None
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = program.graph_signature.user_inputs
    described: list[list[Any]] = []
    for name, (path, leaf) in zip(names, walk(program.example_inputs[0]), strict=True):
        if isinstance(leaf, Tensor):
            shape = [n if isinstance(n, int) else str(n) for n in values[str(name)].shape]
            described.append([path, str(leaf.dtype), leaf.device.type, shape])
        else:
            described.append([path, repr(leaf)])
    return described


def _check(what: str, given: Any, kind: list[Any], sizes: dict[str, int]) -> None:
    """Raise `ValueError` unless an input is of the kind that the program was compiled for.

    Args:
        what: the name of the input.
        given: the input.
        kind: its description.
        sizes: open sizes by symbol, to which this adds.
    """
    if len(kind) == 1:
        if repr(given) != kind[0]:
            raise ValueError(f"{what} is a constant of this package: got {given!r}, not {kind[0]}")
        return
    dtype, device, shape = kind
    if not isinstance(given, Tensor):
        raise ValueError(f"{what} must be a tensor, got {type(given).__name__}")
    want = [sizes.get(n, n) for n in shape]
    fits = given.dim() == len(want) and all(
        isinstance(n, str) or n == size for n, size in zip(want, given.shape, strict=True)
    )
    if str(given.dtype) != dtype or given.device.type != device or not fits:
        raise ValueError(
            f"{what} must be {dtype} on {device} of shape ({', '.join(map(str, want))}): got "
            f"{given.dtype} on {given.device.type} of shape {tuple(given.shape)}"
        )
    sizes |= {n: size for n, size in zip(shape, given.shape, strict=True) if isinstance(n, str)}
