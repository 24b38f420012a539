"""The program accepts every `deq-zoo` command that a page shows; of training, its settings, too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.cli import main
from deq_zoo.command_line import parse_arguments
from deq_zoo.preset import Preset, find_preset

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deq_zoo").glob("*/*.md")),
]
_COMMAND = re.compile(r"^    (deq-zoo [^#\n]*)|`(deq-zoo [^`]*)`", re.MULTILINE)
_FORM = re.compile(r"[|\[\]]|\.\.\.|COMMAND|--help| --launch \d")  # a form, or starts processes
_EXAMPLES = {"NAME": "mdeq-quick", "N": "8"}  # in the place of what a reader chooses


def commands(page: Path) -> list[str]:
    """Return the commands of a page, in blocks and in sentences, each once."""
    found = (block or inline for block, inline in _COMMAND.findall(page.read_text()))
    words = (" ".join(command.split()) for command in found)
    # `deq-zoo train` alone is the name of a command.
    whole = (each for each in words if len(each.split()) > 2 and not _FORM.search(each))
    return list(dict.fromkeys(whole))


SHOWN = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}")
    for page in PAGES
    for command in commands(page)
]


class Accepted(Exception):
    """All settings and flags of a command were accepted, and its work would begin."""


@pytest.fixture
def without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop commands that train or convert after they have read their settings."""

    def stop_training(name: str, change: Callable[[Preset], Preset], **_: Any) -> None:
        change(find_preset(name))
        raise Accepted

    def stop_converting(*_: Any) -> None:
        raise Accepted

    monkeypatch.setattr("deq_zoo.training.train_changed", stop_training)
    monkeypatch.setattr("deq_zoo.convert.convert_file", stop_converting)


@pytest.mark.parametrize("command", SHOWN)
@pytest.mark.usefixtures("without_work")
def test_a_command_of_a_page_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [_EXAMPLES.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] == "train" or "--preset" in words:
        with pytest.raises(Accepted):
            assert main(words) == 0, capsys.readouterr().err
    else:
        parse_arguments(words)


def test_a_wrong_command_is_not_accepted(without_work: None) -> None:
    for command in ("train mdeq-quick --grad 5", "train mdeq-quik", "convert FILE --preset mdeq"):
        assert main(shlex.split(command)) == 2
