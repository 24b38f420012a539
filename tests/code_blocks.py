"""The Python programs of a Markdown page; `python tests/code_blocks.py PAGE` prints them as one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def code_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run_blocks(blocks: Iterable[str]) -> dict[str, Any]:
    """Run Python blocks as one program; return its names."""
    program: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "page", "exec", dont_inherit=True), program)
    return program


if __name__ == "__main__":
    print("\n".join(code_blocks(Path(sys.argv[1]))))
