"""Every benchmark answers `--help` instead of measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.help import answer_help

FOLDER = Path(__file__).parents[1] / "benchmarks"
STARTED_BY_OTHERS = ("jax_worker", "resident", "worker")
COMMANDS = [
    file.stem
    for file in sorted(FOLDER.glob("*.py"))
    if 'if __name__ == "__main__"' in file.read_text() and file.stem not in STARTED_BY_OTHERS
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_parses_its_arguments(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert "parse_args(" in text or "answer_help(__doc__)" in text


def test_a_benchmark_without_arguments_prints_its_question_and_refuses_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cost.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        answer_help("What does it cost?")
    assert ended.value.code == 0
    assert "What does it cost?" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["cost.py", "--only", "x"])
    with pytest.raises(SystemExit) as ended:
        answer_help("What does it cost?")
    assert ended.value.code == 2
