"""Write the measured tables of the documentation: `python -m tools.tables`.

A page marks the place of a table by two comments, and everything between them is written by this
program from files in `benchmarks/results/`, with a line about where the numbers come from:

    <!-- table: rivals -->
    <!-- end of table -->

A test fails when a page and the numbers behind it differ. One file here has the tables of one
subject; `frame.py` has what all of them share. Numbers in sentences are checked, not written:
`sentences.py`.
"""

from tools.tables import (  # noqa: F401  each adds its tables
    choosing,
    designs,
    diffusion,
    family_sentences,
    fields,
    flow,
    front,
    gradients,
    language,
    language_sentences,
    library,
    processes,
    published,
    reason,
    reproduced,
    reproduced_language,
    sentences,
)
from tools.tables.frame import TABLES, pages, read, write

__all__ = ["TABLES", "pages", "read", "write"]
