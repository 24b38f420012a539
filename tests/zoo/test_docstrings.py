"""Docstrings of the zoo are Markdown, and other rules that its source keeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

#: Words that no docstring of a function starts with: a verb says what the function does.
NOT_VERBS = {
    *("The", "A", "An", "What", "Which", "Whether", "Of", "Those", "How", "In", "All", "Every"),
    *("With", "By", "To", "From", "So", "As", "Some", "Each", "One", "Two", "Not", "For", "On"),
    *("Because", "If", "They", "It", "Both"),
}
FOLDER = Path(__file__).resolve().parents[2] / "deq_zoo"
RST = re.compile(r"``|:[a-z]+:`|^\s*\.\. [a-z]+::", re.MULTILINE)


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                place = f"{path.relative_to(FOLDER)}:{getattr(node, 'name', 'module')}"
                yield place, ast.get_docstring(node) or ""


def test_docstrings_of_functions_start_with_a_verb() -> None:
    wrong = []
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text and path.name != "presets.py":  # theirs describe the preset
                first = re.match(r"[A-Z][a-z]+\b", text)
                if first is None or first[0] in NOT_VERBS:
                    wrong.append(f"{path.relative_to(FOLDER)}:{node.lineno}: {text[:50]}")  # type: ignore[attr-defined]
    assert wrong == []


def test_assertions_have_no_effect_but_their_check() -> None:
    """Python leaves them out with -O: what they call must change nothing."""
    wrong = []
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
            named = {ast.unparse(each.func) for each in calls if isinstance(each, ast.Call)}
            if named - {"isinstance", "len"}:
                wrong.append(f"{path.relative_to(FOLDER)}: {named}")
    assert wrong == []


def test_no_docstring_is_restructured_text() -> None:
    assert [place for place, text in docstrings() if RST.search(text)] == []


def test_dollars_and_backticks_come_in_pairs() -> None:
    odd = [p for p, text in docstrings() if text.count("$") % 2 or text.count("`") % 2]
    assert odd == []
