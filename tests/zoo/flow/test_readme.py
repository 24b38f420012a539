"""The programs of the family's README run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deq_zoo
from deq_zoo.flow import video
from tests.code_blocks import code_blocks, run_blocks
from tests.zoo.flow.inputs import write_frames

README = Path(__file__).parents[3] / "deq_zoo" / "flow" / "README.md"


def test_the_programs_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "flow-quick"
    deq_zoo.train("flow-smoke", out=run, steps=1, report=False, quiet=True)
    for file, name in zip(write_frames(tmp_path, 2), ("a.png", "b.png"), strict=True):
        file.rename(name)
    monkeypatch.setattr(video, "read_frames", lambda path: torch.zeros(2, 1, 3, 64, 64))
    program = run_blocks(code_blocks(README))
    assert program["flow"].shape == (2, 66, 70)
    weights = deq_zoo.load(run).state_dict()
    assert all(torch.equal(weights[k], v) for k, v in program["model"].state_dict().items())
