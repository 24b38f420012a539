"""The site: every public name has an entry, links lead somewhere, no request leaves a page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from tools.site_pages import places, relinked, write_pages

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = (
    "torchdeq",
    "torchdeq.solver",
    "torchdeq.grad",
    "torchdeq.linear",
    "torchdeq.norm",
    "torchdeq.loss",
    "torchdeq.stream",
    "torchdeq.export",
    "torchdeq.distributed",
    "torchdeq.diagnostics",
    "torchdeq.monitoring",
    "torchdeq.plots",
    "torchdeq.experimental",
    "torchdeq.registry",
    "deq_zoo",
)
#: Markup that a reader must never see.
RAW = (r"\$\$", r"\\\(", r"\\\[", r"\.\. math", r":(class|func|meth|math):`", r"^:::")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry_in_the_reference(package: str) -> None:
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    entries = {entry.rpartition(".")[2] for entry in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    entries |= {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", text)}
    assert sorted(set(import_module(package).__all__) - entries) == []


def test_every_entry_of_the_reference_is_a_name_with_a_docstring() -> None:
    for page in REFERENCE.glob("*.md"):
        for entry in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            path, _, name = entry.rpartition(".")
            value = getattr(import_module(path), name)
            assert isinstance(value, ModuleType) or value.__doc__, entry


def test_links_between_pages_lead_to_pages(tmp_path: Path) -> None:
    write_pages(tmp_path)
    for page in tmp_path.rglob("*.md"):
        for link in re.findall(r"\]\(([^()\s#:]+)(?:#[^()\s]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(tmp_path)}: {link}"


def test_links_are_those_of_the_page_not_of_its_source() -> None:
    zoo, pages = ROOT / "deq_zoo", places()
    text = (
        "[card](../pretrained/mdeq-digits.md), ![a](../../docs/figures/memory.svg), [x](model.py)"
    )
    expected = "[card](../pretrained/mdeq-digits.md), ![a](../figures/memory.svg), x"
    assert relinked(text, zoo / "mdeq" / "README.md", pages) == expected
    text = "[MDEQ](../deq_zoo/mdeq/README.md#commands), [here](#x), [far](https://example.org/a.md)"
    expected = "[MDEQ](families/mdeq.md#commands), [here](#x), [far](https://example.org/a.md)"
    assert relinked(text, ROOT / "docs" / "zoo.md", pages) == expected


class _Page(HTMLParser):
    """The links, resources, anchors and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = {""}
        self.text: list[str] = []
        self._hidden = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        self._hidden += tag in ("script", "style", "pre", "code")
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") != "canonical":
            self.resources.append(values.get("href", ""))
        elif "src" in values:
            self.resources.append(values["src"])

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "pre", "code")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)


@pytest.fixture(scope="module")
def pages() -> dict[Path, _Page]:
    if find_spec("zensical") is None or find_spec("latex2mathml") is None:
        pytest.skip("the extra [docs] is not installed: make docs")
    subprocess.run([sys.executable, "-m", "tools.site"], cwd=ROOT, check=True, timeout=600)
    site = ROOT / "site"
    return {page: _Page(page.read_text()) for page in site.rglob("*.html")}


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_links_and_anchors_lead_to_pages_that_exist(pages: dict[Path, _Page]) -> None:
    broken = [
        f"{path.name}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # its links begin at the address of the site
        for link in page.links
        if not _leads(path, link, pages)
    ]
    assert broken == []


def _leads(path: Path, link: str, pages: dict[Path, _Page]) -> bool:
    """Return whether a link leads to another host, or to a page and an anchor that exist."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target in pages:
        return unquote(parts.fragment) in pages[target].anchors
    return target.is_file()


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_no_request_leaves_a_page(pages: dict[Path, _Page]) -> None:
    assert [r for page in pages.values() for r in page.resources if urlsplit(r).netloc] == []


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_no_page_shows_raw_markup(pages: dict[Path, _Page]) -> None:
    def found() -> Iterator[str]:
        for path, page in pages.items():
            text = "".join(page.text)
            for pattern in RAW:
                for match in re.finditer(pattern, text, re.MULTILINE):
                    yield f"{path.name}: {text[max(0, match.start() - 30) : match.end() + 30]!r}"

    assert list(found()) == []
