"""Reference numbers of the authors' programs, and optional data sets beside the repository.

`README.md` in this folder says where the numbers come from. They are part of the repository, so a
test that compares with them never skips; only `find_data` does.
"""

from __future__ import annotations

import json
import lzma
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

FOLDER = Path(__file__).parent
DATA_VARIABLE = "TORCHDEQ_TEST_DATA"


def load_tensors(model: str, name: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Read the tensors of `model/name.safetensors.xz`; the caller may change them.

    Args:
        model: a folder beside this file.
        name: the file's name without its endings.
        dtype: what floating-point tensors become; None leaves them as they are stored.
    """
    tensors = load(_decompress(FOLDER / model / f"{name}.safetensors.xz"))
    if dtype is None:
        return tensors
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}


@cache  # decompressing the largest file takes longer than most tests that need it
def _decompress(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


def load_facts(model: str, name: str = "manifest") -> Any:
    """Read `model/name.json`: configurations, losses, counts and what the tensors are."""
    return json.loads((FOLDER / model / f"{name}.json").read_text(encoding="utf-8"))


def select(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, under the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def assert_matches(actual: Any, expected: Any) -> None:
    """Compare in float64, at a tolerance that leaves room for the order of sums and little else."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def find_data(name: str) -> Path:
    """Return the folder of a real data set, or skip the test that asks for it.

    Data sets are not part of the repository. They are looked for in the folder that the environment
    variable `TORCHDEQ_TEST_DATA` names, else in `shared/data` beside the repository.
    """
    root = Path(os.environ.get(DATA_VARIABLE) or FOLDER.parents[2] / "shared" / "data")
    if not (root / name).is_dir():
        pytest.skip(
            f"needs the optional data set {name!r}: set {DATA_VARIABLE} to the folder that holds it"
        )
    return root / name
