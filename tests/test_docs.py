"""The documentation is true: its programs run, and its table of options is that of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.code_blocks import code_blocks
from torchdeq import DEQConfig
from torchdeq.deq import CORES
from torchdeq.grad import BACKWARDS
from torchdeq.loss import WEIGHTS
from torchdeq.norm import NORMS
from torchdeq.solver import SOLVERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAMILIES = sorted((ROOT / "deq_zoo").glob("*/README.md"))
NAMING_PAGES = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "deq_zoo" / "README.md",
    *sorted((ROOT / "deq_zoo").glob("*/*.md")),
    ROOT / "tests" / "golden" / "README.md",
]
FOLDERS = "benchmarks|deq_zoo|docs|examples|notebooks|tests|tools|torchdeq"
NOT_YET = {"tests/zoo/mine/inputs.py"}  # what the author of a new family writes
OPTIONAL = {"hydra", "jsonargparse", "omegaconf"}  # shown, and not needed by anything else


@pytest.fixture(autouse=True)
def _names_of_a_page_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (SOLVERS, BACKWARDS, NORMS, CORES, WEIGHTS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for norm in NORMS.values():
        monkeypatch.setattr(norm, "_target_modules", dict(norm._target_modules))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_of_every_page_run_from_top_to_bottom(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dataclasses and the compiler look for the module of a program by its name.
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    program: dict[str, Any] = vars(module)
    for block in code_blocks(page):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(compile(block, str(page), "exec", dont_inherit=True), program)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise


def test_the_table_of_options_is_that_of_the_code() -> None:
    table = option_table()
    assert table in (ROOT / "docs" / "options.md").read_text(), f"put this there:\n{table}"


def option_table() -> str:
    """Return all options with flag, default and meaning, as Markdown."""
    lines = ["| Flag | Default | Meaning |", "| --- | --- | --- |"]
    metadata = {f.name: f.metadata for f in fields(DEQConfig)}
    for name, default in DEQConfig.defaults().items():
        flag = metadata[name]["flag"].get("name", name)
        spelled = f"`--{flag}`" if flag == name else f"`--{flag}`, in Python `{name}`"
        value = f"{default:g}" if isinstance(default, float) else str(default)
        meaning = metadata[name]["help"].replace("|", r"\|")  # a bar ends a cell
        lines.append(f"| {spelled} | `{value}` | {meaning} |")
    return "\n".join(lines)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", NAMING_PAGES, ids=name_of)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]", page.read_text())
    patterns = {name.replace("NAME", "*") for name in named} - NOT_YET
    assert not [pattern for pattern in sorted(patterns) if not any(ROOT.glob(pattern))]


@pytest.mark.parametrize("page", NAMING_PAGES, ids=name_of)
def test_every_link_of_a_page_to_a_file_leads_there(page: Path) -> None:
    links = set(re.findall(r"\]\((?!https?:)([^()#\s]+)[^()\s]*\)", page.read_text()))
    assert not [link for link in sorted(links) if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", NAMING_PAGES, ids=name_of)
def test_every_module_that_a_page_runs_is_there(page: Path) -> None:
    modules = set(re.findall(rf"python -m ((?:{FOLDERS})[\w.]*\w)", page.read_text()))
    places = {name: ROOT.joinpath(*name.split(".")) for name in modules}
    programs = {name: (at.with_suffix(".py"), at / "__main__.py") for name, at in places.items()}
    assert not [name for name, files in programs.items() if not any(f.exists() for f in files)]


@pytest.mark.parametrize("page", FAMILIES, ids=name_of)
def test_the_programs_of_a_family_have_a_test(page: Path) -> None:
    test = ROOT / "tests" / "zoo" / page.parent.name / "test_readme.py"
    assert test.exists() or not code_blocks(page)


@pytest.mark.slow
def test_the_first_program_of_the_readme_is_short_typed_and_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = next(iter(code_blocks(ROOT / "README.md")))
    assert len([line for line in program.splitlines() if line.strip()]) == 12
    file = tmp_path / "program.py"
    file.write_text(program)
    # As for a user who has installed the library: none of the settings of this repository apply.
    alone = ["--strict", "--config-file=", "--follow-imports=silent", file.name]
    path = {**os.environ, "MYPYPATH": str(ROOT)}
    typed = [sys.executable, "-m", "mypy", *alone]
    subprocess.run(typed, check=True, cwd=tmp_path, env=path, timeout=600)
    torch.manual_seed(0)
    exec(compile(program, "README", "exec", dont_inherit=True), {})
    assert float(capsys.readouterr().out.split()[-1]) < 1e-3
