"""Measured tables in the documentation, put there by the benchmark and not by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "gradients.md"


def insert(tables: Mapping[str, str], page: Path = PAGE) -> None:
    """Replace each table, which is between `<!-- NAME -->` and `<!-- /NAME -->`."""
    text = page.read_text()
    for name, table in tables.items():
        opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        if opening not in text or closing not in text:
            raise ValueError(f"{page.name} has no place for {name!r}: expected {opening.strip()}")
        before, rest = text.split(opening, 1)
        _, after = rest.split(closing, 1)
        text = f"{before}{opening}```text\n{table}\n```\n{closing}{after}"
    page.write_text(text)
