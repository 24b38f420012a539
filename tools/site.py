"""Build the site: `python -m tools.site` writes `site/`, which needs no server and no network.

Zensical makes the pages from `docs/` and the READMEs and cards of the zoo. This program then writes
every formula as MathML, which browsers display without a script, and exchanges the one script that
the pages would fetch for a file of ours.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys

from latex2mathml.converter import convert

from tools.site_pages import ROOT, write_pages

PAGES = ROOT / "build" / "docs"  # `docs_dir` of mkdocs.yml
SITE = ROOT / "site"

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
#: A formula in the index of the search, where backslashes are escaped; nobody searches for these.
_FORMULA = re.compile(r"\\\\\((.*?)\\\\\)|\\\\\[(.*?)\\\\\]")
#: Zensical's pages for reading as files fetch this script, which lets the search work there.
_FETCHED = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"[^>]*></script>')
_OURS = "assets/file_search.js"


def main() -> int:
    """Build the site; return an error code if that fails."""
    write_pages(PAGES)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT
    )
    if built.returncode:
        return built.returncode
    pages = sorted(SITE.rglob("*.html"))
    for page in pages:
        depth = len(page.relative_to(SITE).parts) - 1
        page.write_text(finish(page.read_text(), "../" * depth))
    for index in SITE.glob("search.js*"):
        settings, mark, items = index.read_text().partition('"items"')
        index.write_text(settings + mark + _FORMULA.sub("", items))
    print(f"{len(pages)} pages in {SITE.name}/; open {SITE.name}/index.html")
    return 0


def finish(page: str, root: str) -> str:
    """Return a page with formulas as MathML and without requests to other hosts.

    Args:
        page: the HTML.
        root: the way from the page to the first page of the site, e.g. `"../"`.
    """
    page = _BLOCK.sub(
        lambda match: f'<div class="formula">{_mathml(match[1], "block")}</div>', page
    )
    page = _INLINE.sub(lambda match: _mathml(match[1], "inline"), page)
    return _FETCHED.sub(f'<script src="{root}{_OURS}"></script>', page)


def _mathml(formula: str, display: str) -> str:
    """Return a formula of LaTeX as MathML."""
    return convert(html.unescape(formula).strip(), display=display)


if __name__ == "__main__":
    raise SystemExit(main())
