"""The programs of the family's README run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.code_blocks import code_blocks

README = Path(__file__).parents[3] / "deq_zoo" / "reason" / "README.md"


def test_the_programs_run_from_top_to_bottom() -> None:
    program: dict[str, Any] = {}
    for block in code_blocks(README):
        exec(compile(block, str(README), "exec", dont_inherit=True), program)
    assert program["out"].prediction.shape == (8, 16, 6)
