"""Every program of the front page runs alone, as a reader copies it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.code_blocks import code_blocks, run_blocks

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("block", code_blocks(README))
def test_a_program_of_the_front_page_runs_alone(block: str) -> None:
    run_blocks([block])
