"""ONNX and AOTInductor: the programs of other runtimes give the answers of the library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.export.test_program import BATCHES, Model
from tests.versions import needs_exported_loops
from torchdeq import export
from torchdeq.export.package import _describe

pytestmark = needs_exported_loops
EXAMPLES = Path(__file__).parents[2] / "examples" / "export"


def run_onnx(path: Path, *inputs: Tensor) -> dict[str, Any]:
    """Return the answers of onnxruntime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    values = dict(zip(names, (t.numpy() for t in inputs), strict=True))
    outputs = [node.name for node in session.get_outputs()]
    return dict(zip(outputs, session.run(None, values), strict=True))


def operators(path: Path) -> list[str]:
    """Return the kinds of the nodes of an ONNX model, without those inside loops."""
    onnx = pytest.importorskip("onnx")
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.fixture(scope="module")
def need_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the extra export is not installed")


@pytest.mark.parametrize(
    "solver", ["fixed_point_iter", pytest.param("anderson", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("need_onnx")
def test_onnxruntime_gives_the_answers_and_counts_of_the_library(
    solver: str, tmp_path: Path
) -> None:
    model = Model(f_solver=solver).eval()
    path = export.to_onnx(export.export(model, torch.randn(4, 5)), tmp_path / "model.onnx")
    assert operators(path).count("Loop") == 1
    for batch in BATCHES:
        x = torch.randn(batch, 5)
        out = run_onnx(path, x)
        with torch.no_grad():
            logits, stats = model.solve(x)
        np.testing.assert_allclose(out["output"], logits, atol=1e-5)
        assert out["evaluations"] == stats.nfe
        assert out["steps"].tolist() == stats["nstep"].tolist()
        assert out["status"].tolist() == stats.status.tolist()


@pytest.mark.slow
def test_a_package_gives_the_answers_and_counts_of_the_library(tmp_path: Path) -> None:
    model = Model().eval()
    path = export.to_aoti(export.export(model, torch.randn(4, 5)), tmp_path / "model.pt2")
    package = export.load_aoti(path)
    for batch in BATCHES:
        x = torch.randn(batch, 5)
        out = package(x)
        with torch.no_grad():
            logits, stats = model.solve(x)
        torch.testing.assert_close(out["output"], logits, atol=1e-5, rtol=1e-5)
        assert out["evaluations"] == stats.nfe
        assert out["status"].tolist() == stats.status.tolist()
    gaps = x.t().contiguous().t()
    torch.testing.assert_close(package(gaps)["output"], package(x)["output"], atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"input \[0\] must be torch.float32"):
        package(x.double())


class Scaled(nn.Module):
    """Inputs in a dict, and a number that becomes a constant."""

    def forward(self, x: dict[str, Tensor], y: Tensor, scale: float) -> Tensor:
        return (x["a"] - x["b"]).sum(1) * y * scale


def test_a_package_checks_what_machine_code_does_not() -> None:
    """The program stands in for its machine code, which takes a minute to compile."""
    a, y, seen = torch.randn(4, 3), torch.randn(4), []
    example = ({"a": a, "b": a}, y, 2.0)
    dim = torch.export.Dim("batch")
    shapes = ({"a": {0: dim}, "b": {0: dim}}, {0: dim}, None)
    program = torch.export.export(Scaled(), example, dynamic_shapes=shapes)

    def run(x: Any, y: Tensor, scale: float) -> dict[str, Tensor]:
        seen.append(x["a"].is_contiguous())
        return {"output": program.module()(x, y, scale)}

    package = export.Package(run, json.loads(json.dumps(_describe(program))))
    package({"a": torch.randn(3, 7).t(), "b": torch.randn(7, 3)}, torch.randn(7), 2.0)
    assert seen == [True]
    for wrong, message in (
        (
            ({"b": a, "a": a}, y, 2.0),
            r"'a'\], \[0\]\['b'\], \[1\], \[2\]: got \[0\]\['b'\]",
        ),
        (({"a": a, "b": a}, y), "got"),
        (({"a": a, "b": a}, y, 3.0), "is a constant of this package: got 3.0, not 2.0"),
        (({"a": a, "b": a[:3]}, y, 2.0), r"of shape \(4, 3\): got .* \(3, 3\)"),
        (({"a": a[:, :2], "b": a}, y, 2.0), r"3\): got .* \(4, 2\)"),
        (({"a": a, "b": a}, y[:, None], 2.0), r"of shape \(4\): got .* \(4, 1\)"),
        (({"a": a, "b": a}, y.half(), 2.0), "must be torch.float32 on cpu .* got torch.float16"),
        (({"a": a, "b": a}, 1.0, 2.0), "must be a tensor, got float"),
    ):
        with pytest.raises(ValueError, match=message):
            package(*wrong)
    assert len(seen) == 1


def say(*command: object, **options: Any) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("need_onnx")
def test_the_example_in_onnxruntime_needs_no_torch(tmp_path: Path) -> None:
    expected = say(sys.executable, EXAMPLES / "make_model.py", tmp_path, "onnx").splitlines()[-1]
    out = say(sys.executable, EXAMPLES / "run_onnx.py", tmp_path / "model.onnx").splitlines()
    assert out[0].startswith(f"batch 5: {expected}, CONVERGED")
    assert out[1].endswith("CONVERGED")
    assert "torch" not in (EXAMPLES / "run_onnx.py").read_text().replace("without torch", "")


@pytest.mark.slow
def test_the_example_in_c_plus_plus_runs_without_python(tmp_path: Path) -> None:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    expected = say(sys.executable, EXAMPLES / "make_model.py", tmp_path, "aoti").splitlines()[-1]
    build = tmp_path / "build"
    prefix = torch.utils.cmake_prefix_path
    say("cmake", "-S", EXAMPLES, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}")
    say("cmake", "--build", build)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    out = say(build / "serve", tmp_path / "model.pt2", env=plain).splitlines()
    assert out[0] == f"batch 5: {expected}, all converged"
    assert out[1].endswith("all converged")
