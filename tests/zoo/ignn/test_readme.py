"""The programs of the family's README run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.code_blocks import code_blocks, run_blocks
from tests.golden import FOLDER

README = Path(__file__).parents[3] / "deq_zoo" / "ignn" / "README.md"


def test_each_program_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER / "runs" / "ignn-smoke", tmp_path / "runs" / "ignn-smoke")
    monkeypatch.chdir(tmp_path)
    results: dict[str, Any] = {}
    for block in code_blocks(README):
        results |= run_blocks([block])
    assert set(results["answer"].prediction.labels) <= {"ring", "star"}
    assert results["z"].shape == (4, 64)
