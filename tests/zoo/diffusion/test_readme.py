"""The programs of the family's README run."""

from __future__ import annotations

from pathlib import Path

from tests.code_blocks import code_blocks, run_blocks

README = Path(__file__).parents[3] / "deq_zoo" / "diffusion" / "README.md"


def test_the_programs_run_from_top_to_bottom() -> None:
    program = run_blocks(code_blocks(README))
    assert program["inverted"].noise.shape == (2, 3, 16, 16)
    assert program["output"].prediction.noise.shape == (1, 8, 8)
    assert program["noise"].shape == (4, 1, 8, 8)
    assert len(program["pictures"]) == 4
