"""The Python programs of a Markdown page; `python tests/code_blocks.py PAGE` prints them as one."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def code_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    print("\n".join(code_blocks(Path(sys.argv[1]))))
