"""The programs of the family's README run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.code_blocks import code_blocks, run_blocks
from tests.golden import FOLDER

README = Path(__file__).parents[3] / "deq_zoo" / "ignn" / "README.md"


def test_the_programs_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FOLDER / "runs" / "ignn-smoke", tmp_path / "runs" / "ignn-smoke")
    monkeypatch.chdir(tmp_path)
    program = run_blocks(code_blocks(README))
    assert set(program["answer"].prediction.labels) <= {"ring", "star"}
    assert program["z"].shape == (4, 64)
