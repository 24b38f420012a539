"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """Return a table with the first `texts` columns aligned to the left, the numbers to the right.

    A first cell like the one above it is left blank.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    lines = [line(header), "  ".join("-" * width for width in widths)]
    above = None
    for row in rows:
        lines.append(line(row if row[0] != above else ["", *row[1:]]))
        above = row[0]
    return "\n".join(lines)
