"""The text of `lm-reference`: Python's reference, and docstrings of packages that are installed.

The text depends on the versions of Python and of the packages; `constraints.txt` has those of the
published numbers.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from inspect import cleandoc
from itertools import accumulate
from pathlib import Path
from platform import python_version

from deq_zoo.errors import MissingPackage
from deq_zoo.lm.data import join_pages, split_text, topic_pages, topics
from deq_zoo.packages import install

#: Packages whose docstrings are read, by the names of their modules.
PACKAGES = {"numpy": "numpy", "scipy": "scipy", "sklearn": "scikit-learn"}
SHORTEST = 200  # characters of a docstring: shorter ones are mostly fragments
#: So often is each page of Python's reference in the training text: docstrings, the bulk of it, are
#: other prose. With 4 and 10, runs of 400 s had 1.89 and 1.75 bits for a byte of validation text.
REPEATS = 10
_COPIED = 60  # so many characters in a row that the held-out text has, too, are a copy
_SKIPPED = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"),
    *("_vendor", "externals"),
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_ADDING = {"add_newdoc", "add_doc"}  # functions that give a docstring to compiled code


def held_out_splits() -> dict[str, str]:
    """Return validation and test text, those of `data="topics"`: Python alone has them."""
    splits = split_text(topics())
    return {split: splits[split] for split in ("val", "test")}


@cache
def reference_splits() -> dict[str, str]:
    """Return the training, validation and test text.

    The training text leaves out pages that the split cuts, and paragraphs that share 60 characters
    in a row with the held-out text, whatever the white space between words: some pages of Python's
    reference repeat others. It contains the remaining pages `REPEATS` times, spread among the
    docstrings.
    """
    held_out = held_out_splits()
    pages, before = topic_pages(), len(split_text(topics())["train"])
    ends = accumulate(len(page) + 2 for page in pages)
    whole = [page for page, end in zip(pages, ends, strict=True) if end <= before]
    windows = {*_windows(_one_line("".join(held_out.values())))}
    strings, pages = (
        [_without_copies(text, windows) for text in texts] for texts in (docstrings(), whole)
    )
    return {"train": join_pages(_mixed(strings, pages * REPEATS)), **held_out}


def _mixed(*lists: Sequence[str]) -> list[str]:
    """Return the texts of several lists, those of each at equal distances and in order."""
    placed = [((k + 1) / len(texts), text) for texts in lists for k, text in enumerate(texts)]
    return [text for _, text in sorted(placed, key=lambda each: each[0])]


def _without_copies(text: str, windows: set[str]) -> str:
    """Return a text without the paragraphs that one of these windows covers or overlaps."""
    paragraphs = [each for each in text.split("\n\n") if each.strip()]
    lines = [_one_line(each) for each in paragraphs]
    joined = " ".join(lines)  # a copy may begin in one paragraph and end in another
    copied = bytearray(len(joined))
    for k, window in enumerate(_windows(joined)):
        if window in windows:
            copied[k : k + _COPIED] = b"\1" * _COPIED
    ends = list(accumulate(len(line) + 1 for line in lines))
    return "\n\n".join(
        each
        for each, line, end in zip(paragraphs, lines, ends, strict=True)
        if not any(copied[end - 1 - len(line) : end - 1])
    )


def _one_line(text: str) -> str:
    """Return a text with one space in place of any white space."""
    return " ".join(text.split())


def _windows(line: str) -> Iterator[str]:
    """Yield all parts of a line that are as long as a copy, in order."""
    return (line[k : k + _COPIED] for k in range(len(line) - _COPIED + 1))


def describe_versions() -> str:
    """Return the versions that the text depends on."""
    found = ", ".join(f"{name} {version(name)}" for name in PACKAGES.values())
    return f"Python {python_version()}, {found}"


def docstrings() -> list[str]:
    """Return the docstrings of the standard library and of the packages, each once, in order."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), *map(_find_package, PACKAGES)]
    texts: dict[str, None] = {}
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if _SKIPPED.isdisjoint(file.relative_to(root).parts):
                texts |= dict.fromkeys(docstrings_of(file))
    return list(texts)


def docstrings_of(file: Path) -> Iterator[str]:
    """Yield the docstrings of a file that are long enough; none of a file that is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # templates, and files for other versions
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            found = [ast.get_docstring(node) or ""]
        elif isinstance(node, ast.Call) and _name(node.func) in _ADDING:
            found = [cleandoc(each) for each in _strings(node)]
        else:
            continue
        yield from (text for text in found if len(text) >= SHORTEST)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _find_package(module: str) -> Path:
    """Return the folder of a package, or raise `MissingPackage`."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise MissingPackage(f"the text of lm-reference needs {module}: {install('reference')}")
    return Path(spec.origin).parent
