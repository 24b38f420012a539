"""Notebooks are stored without outputs, and run from top to bottom."""

from __future__ import annotations

import json
import os
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
needs_kernel = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None,
    reason="the extra notebooks is not installed",
)
_SECONDS = 900  # for one cell, on a busy machine


@every_notebook
def test_it_is_stored_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["cells"][0]["source"][0].startswith("# ")
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        assert source.strip(), "an empty cell"
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile(source, str(path), "exec")


@every_notebook
def test_its_format_is_valid(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed")
    nbformat.validate(nbformat.read(path, as_version=nbformat.NO_CONVERT))


def test_the_formatter_of_the_project_covers_them() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert "include" not in config  # by default ruff reads notebooks, too
    assert not any("notebooks" in place for place in config["extend-exclude"])


@every_notebook
def test_a_page_leads_to_it(path: Path) -> None:
    assert f"notebooks/{path.name}" in (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.slow
@needs_kernel
@every_notebook
def test_it_runs_in_a_fresh_kernel(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}  # where the kernel runs
    NotebookClient(notebook, timeout=_SECONDS, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    warnings = [output.text for output in outputs if output.get("name") == "stderr"]
    # A package that others import misses ipywidgets.
    assert [text for text in warnings if "TqdmWarning" not in text] == []
