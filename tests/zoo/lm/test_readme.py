"""The programs of the family's README run."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.code_blocks import code_blocks, run_blocks

README = Path(__file__).parents[3] / "deq_zoo" / "lm" / "README.md"


BLOCKS = code_blocks(README)
WITH_TRANSFORMERS = [block for block in BLOCKS if "from transformers import" in block]


def test_the_programs_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("Return a string. The value is a list.")
    program = run_blocks(block for block in BLOCKS if block not in WITH_TRANSFORMERS)
    score = program["score"]
    assert_close(score.perplexity, float((-score.log_probs.mean()).exp()), atol=0, rtol=1e-5)
    assert program["text"].ids.tolist()[:1] == [79]
    assert len(program["text"].ids) == 1 + 4


def test_the_programs_with_transformers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="these programs need transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_blocks(WITH_TRANSFORMERS)
    assert capsys.readouterr().out.startswith("The function ")
