"""A reader can follow a page from top to bottom: runs are there, and no folder is in the way."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.zoo.test_page_commands import PAGES, ROOT

_COMMAND = re.compile(r"^(?:    )?(deq-zoo (?:train|sample|predict|convert) [^#\n]*)", re.MULTILINE)
_MADE_IN_PYTHON = re.compile(r'deq_zoo\.train\(.*?out="([^"]+)"')
_USED = re.compile(r"runs/[a-z0-9-]+")


def folder_of(command: str) -> str | None:
    """Return the folder that a command makes, if it makes one."""
    words = shlex.split(command)
    if "--resume" in words or "--help" in words:
        return None
    if "--out" in words:
        return words[words.index("--out") + 1]
    if words[1] == "train":
        return f"runs/{words[2]}"
    writes_pictures = words[1] == "sample" and "lm-" not in words[2]
    return "samples" if writes_pictures else None


def commands(page: Path) -> list[str]:
    return [command.strip() for command in _COMMAND.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_write_to_folders_of_their_own(page: Path) -> None:
    folders = [folder for command in commands(page) if (folder := folder_of(command))]
    assert sorted(folders) == sorted(set(folders))


def test_different_results_on_all_pages_have_different_folders() -> None:
    users: dict[str, set[str]] = {}
    for page in PAGES:
        for command in commands(page):
            folder = folder_of(command)
            if folder is not None and not command.startswith("deq-zoo train"):
                users.setdefault(folder, set()).add(command)
    assert {folder: used for folder, used in users.items() if len(used) > 1} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_makes_the_runs_that_it_uses(page: Path) -> None:
    made: set[str] = set()
    missing = []
    for line in page.read_text().splitlines():
        made |= {folder_of(command) or "" for command in _COMMAND.findall(line)}
        made |= set(_MADE_IN_PYTHON.findall(line))
        code = line.partition("#")[0]
        if line.startswith("    deq-zoo") or "deq_zoo.load(" in code:
            missing += [run for run in _USED.findall(code) if run not in made]
    assert missing == []
