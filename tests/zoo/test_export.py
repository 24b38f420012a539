"""`deq-zoo export`: models of every family for other programs, with a page about their use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.exporting import pick_solver, write_export
from deq_zoo.preset import find_preset
from torchdeq import Anderson, DEQConfig, FixedPointIter, Status, export
from torchdeq.core import DEQBase

FAMILIES = ("mdeq", "flow", "inr", "lm", "ignn", "diffusion", "reason")
BATCHES = (1, 7, 64)
#: An untrained reasoner does not contract: rounding errors grow over its 16 calls of the network.
TOLERANCES = dict.fromkeys(FAMILIES, 1e-5) | {"reason": 1e-4}


def make(family: str) -> tuple[Exportable, DEQConfig]:
    """Return an untrained model of a smoke preset as it is exported, and its options."""
    task = find_preset(f"{family}-smoke").task
    torch.manual_seed(0)
    model = task.build(task.facts()).eval()
    model.facts = task.facts()
    return task.export(model, task.exporting()), task.deq


def batches(exportable: Exportable) -> list[tuple[Tensor, ...]]:
    """Return inputs for several sizes of the batch; the example alone where it has one size."""
    example = tuple(exportable.example.values())
    if not exportable.open_batch:
        return [example]
    rng = torch.Generator().manual_seed(1)

    def resized(t: Tensor, batch: int) -> Tensor:
        rows = t[torch.randint(len(t), (batch,), generator=rng)]
        noise = torch.rand(rows.shape, generator=rng)
        return rows + 0.3 * noise * t.abs().amax() if t.is_floating_point() else rows

    return [tuple(resized(t, batch) for t in example) for batch in BATCHES]


def use_solver(exportable: Exportable, solver: str) -> None:
    """Give all DEQs of a module another solver, so that its own answers can be compared."""
    for module in exportable.module.modules():
        if isinstance(module, DEQBase):
            setattr(module, "f_solver_kwargs", {})  # noqa: B010  (first: those of the old solver)
            setattr(module, "f_solver", solver)  # noqa: B010


def run_onnx(path: Path, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    values = dict(zip(names, (t.numpy() for t in inputs), strict=True))
    outputs = [node.name for node in session.get_outputs()]
    answers = map(torch.as_tensor, session.run(None, values))
    return dict(zip(outputs, answers, strict=True))


def assert_alike(exportable: Exportable, run: Any, tol: float) -> None:
    """Assert that an exported model gives the answers of its module."""
    for inputs in batches(exportable):
        with torch.no_grad():
            own, other = exportable.module(*inputs), run(*inputs)
        for name, value in own.items():
            scale = max(1.0, float(value.abs().max()))
            np.testing.assert_allclose(other[name], value, atol=tol * scale)
        codes = [code for key in other if key.startswith("status") for code in other[key].tolist()]
        assert set(codes) <= set(map(int, Status))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_its_own_answers_as_a_program_and_in_onnxruntime(
    family: str, tmp_path: Path
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="the extra export is not installed")
    exportable, deq = make(family)
    solver = "anderson" if deq.f_solver == "broyden" else None
    if solver:
        use_solver(exportable, solver)
    path = tmp_path / "model.pt2"
    write_export(exportable, deq, solver, "pt2", path)
    program = torch.export.load(path)
    assert_alike(exportable, program.module(), 1e-5)
    onnx = export.to_onnx(program, tmp_path / "model.onnx")
    assert_alike(exportable, lambda *inputs: run_onnx(onnx, inputs), TOLERANCES[family])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compiled_ahead_of_time(family: str, tmp_path: Path) -> None:
    exportable, deq = make(family)
    solver = "anderson" if deq.f_solver == "broyden" else None
    if solver:
        use_solver(exportable, solver)
    write_export(exportable, deq, solver, "aoti", tmp_path / "model.pt2")
    package = export.load_aoti(tmp_path / "model.pt2")
    assert_alike(exportable, lambda *inputs: package(*inputs), TOLERANCES[family])


def test_a_run_is_exported_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    deq_zoo.train("inr-smoke", steps=1, out=run, quiet=True, report=False)
    assert main(["export", str(run)]) == 0
    path, page = map(Path, capsys.readouterr().out.split()[-2:])
    assert (path, page) == (run / "model.pt2", run / "model.pt2.json")
    facts = json.loads(page.read_text())
    assert facts["inputs"][0] == {
        "name": "points", "dtype": "float32", "shape": ["batch", 2], "meaning": "coordinates",
    }  # fmt: skip
    assert [each["name"] for each in facts["outputs"]][:2] == ["values", "status"]
    assert all(each["meaning"] for each in facts["outputs"])
    assert facts["statuses"]["0"].startswith("CONVERGED")
    model, program = deq_zoo.load(run), torch.export.load(path)
    points = 2 * torch.rand(9, 2) - 1
    with torch.no_grad():
        values = program.module()(points)["values"]
        torch.testing.assert_close(values, model(points).prediction, atol=1e-5, rtol=1e-5)
    assert main(["export", str(run)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["export", str(run), "--solver", "broyden", "--force"]) == 2
    assert "Broyden cannot be exported" in capsys.readouterr().err
    assert main(["export", str(run), "--hight", "3", "--force"]) == 2
    assert "unknown option '--hight'" in capsys.readouterr().err


def test_a_solver_that_cannot_be_exported_is_replaced_only_on_demand() -> None:
    broyden = DEQConfig(f_solver="broyden", f_solver_kwargs={"l_thres": 5})
    with pytest.raises(ZooError, match=r"--solver, one of anderson, fixed_point_iter"):
        pick_solver(None, broyden)
    assert pick_solver("anderson", broyden) == Anderson()
    with pytest.raises(ZooError, match="did you mean 'anderson'"):
        pick_solver("andersen", broyden)
    own = DEQConfig(f_solver="anderson", f_solver_kwargs={"m": 3})
    assert pick_solver(None, own) == pick_solver("anderson", own) == Anderson(m=3)
    assert pick_solver("fixed_point_iter", own) == FixedPointIter()


def test_options_of_the_family_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path / "nothing")]) == 2
    assert "no run folder" in capsys.readouterr().err
    for family, option in (("flow", "height"), ("lm", "length"), ("ignn", "graph")):
        options = find_preset(f"{family}-smoke").task.exporting()
        assert hasattr(options, option)
