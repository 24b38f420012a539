"""The pages of the site: `docs/`, and a page for each family and each pretrained model.

The READMEs of the families and the cards of the pretrained models are the only source of their
pages. Links between all of these lead from page to page, as they do between the files.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def places() -> dict[Path, Path]:
    """Return for each file that becomes a page its place in the folder of pages."""
    zoo = ROOT / "deq_zoo"
    docs = {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    families = {
        path: Path("families", f"{path.parent.name}.md") for path in zoo.glob("*/README.md")
    }
    cards = {path: Path("pretrained", path.name) for path in zoo.glob("pretrained/*.md")}
    return docs | families | cards


def write_pages(folder: Path) -> None:
    """Write all pages and what they show into a folder, in place of what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder)
    pages = places()
    for source, place in pages.items():
        page = folder / place
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(relinked(source.read_text(), source, pages))


def relinked(text: str, source: Path, pages: dict[Path, Path]) -> str:
    """Return the text of a file with links as its page needs them.

    A link to a file that is no page and not in `docs/` becomes plain text.

    Args:
        text: in Markdown.
        source: the file that it comes from.
        pages: the place of every page.
    """
    start = pages[source].parent

    def relink(match: re.Match[str]) -> str:
        mark, words, link = match.groups()
        path, hash_mark, anchor = link.partition("#")
        if not path or ":" in path:
            return match[0]
        target = Path(os.path.normpath(source.parent / path))
        if target in pages:
            place = pages[target]
        elif target.is_relative_to(DOCS):
            place = target.relative_to(DOCS)
        else:
            return str(words)
        return (
            f"{mark}[{words}]({Path(os.path.relpath(place, start)).as_posix()}{hash_mark}{anchor})"
        )

    return _LINK.sub(relink, text)
