"""The programs of the family's README run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deq_zoo.mdeq import IMAGENET_SMALL, MDEQ
from deq_zoo.mdeq.convert import to_authors
from tests.code_blocks import code_blocks, run_blocks

README = Path(__file__).parents[3] / "deq_zoo" / "mdeq" / "README.md"


@pytest.fixture
def authors_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a checkpoint of an untrained backbone, and make its folder the current one."""
    monkeypatch.chdir(tmp_path)
    file = Path("MDEQ_ImageNet.pth")
    torch.save(to_authors(MDEQ(IMAGENET_SMALL).state_dict()), file)
    return file


def test_the_programs_run_from_top_to_bottom(authors_file: Path) -> None:
    blocks = code_blocks(README)
    assert "randn(8," in blocks[0]
    blocks[0] = blocks[0].replace("randn(8,", "randn(2,")  # images enough for a test
    program = run_blocks(blocks)
    assert [tuple(z.shape) for z in program["out"].prediction] == [(2, 24, 32, 32), (2, 24, 16, 16)]
    loaded, expected = to_authors(program["model"].state_dict()), torch.load(authors_file)
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())
