"""The programs of the family's README run."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.code_blocks import code_blocks, run_blocks

README = Path(__file__).parents[3] / "deq_zoo" / "inr" / "README.md"


#: Of training steps and pixels, a test needs fewer.
SHORTER = {"steps=500": "steps=3", "(1024, 1536)).": "(12, 18))."}


def test_the_programs_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.radial_gradient("L").resize((24, 16)).convert("RGB").save("cat.jpg")
    (block,) = code_blocks(README)
    for long, short in SHORTER.items():
        assert long in block
        block = block.replace(long, short)
    program = run_blocks([block])
    sizes = {}
    for name in ("large", "middle"):
        with Image.open(f"{name}.png") as image:
            sizes[name] = image.size
    assert sizes == {"large": (18, 12), "middle": (48, 32)}
    assert program["out"].prediction.shape == (100, 3)
    assert program["gradient"].shape == (100, 3, 2)
    assert program["curvature"].shape == (100, 3)
