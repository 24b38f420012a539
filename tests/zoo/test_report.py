"""Reports: what they show of a run, and logs with gaps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deq_zoo import curves
from deq_zoo.curves import STATUS_COLOURS, draw_curves, number, thin
from deq_zoo.drawing import Line, line_plot
from deq_zoo.preset import Preset, Target
from deq_zoo.record import SolverRecord
from deq_zoo.report import summarise, write_report
from deq_zoo.run import Run
from deq_zoo.task import Score
from tests.zoo.toy import toy
from torchdeq import SolverStat, Status


def make_log(evaluations: int = 3, **solver: Any) -> list[dict[str, Any]]:
    """Return the log of a run of 4 updates between two evaluations."""
    how: dict[str, Any] = {
        "nfe": 7.0,
        "residual": 1e-4,
        "statuses": {"CONVERGED": 30, "MAX_ITER": 2},
        "trace": [1.0, 0.1, 0.01],
        **solver,
    }
    lines: list[dict[str, Any]] = []
    for k in range(1, evaluations + 1):
        speed = {"samples_per_s": 100.0, "nfe": 7.0, "residual": 1e-3}
        lines.append({"kind": "train", "step": 4 * k, "loss": 1 / k, **speed})
        lines.append({"kind": "eval", "step": 4 * k, "metrics": {"mse": 1 / k}, "solver": how})
    return lines


def watch_figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that every figure of the curves is added to when it is drawn."""
    drawn: list[Any] = []

    def draw(figure: Any) -> bytes:
        drawn.append(figure)
        return b""

    monkeypatch.setattr(curves, "to_png", draw)
    return drawn


def names_of(lines: list[dict[str, Any]], preset: Preset | None = None) -> list[str]:
    return [picture.name for picture in draw_curves(lines, preset or toy())]


def test_every_figure_has_a_caption_that_names_its_data() -> None:
    pictures = {picture.name: picture for picture in draw_curves(make_log(), toy())}
    assert set(pictures) == {"loss", "metric-mse", "convergence", "nfe", "residual", "statuses"}
    assert "training batches, each point the mean of 4 updates" in pictures["loss"].caption
    for name in ("metric-mse", "convergence", "statuses"):
        assert "validation" in pictures[name].caption
    assert "lowest wins" in pictures["metric-mse"].caption


def test_nothing_is_drawn_from_a_single_point_or_from_nothing() -> None:
    assert names_of([]) == []
    assert names_of(make_log(1)) == ["convergence", "statuses"]
    assert "convergence" not in names_of(make_log(trace=[]))
    assert "convergence" not in names_of(make_log(trace=[0.1]))
    assert line_plot("x", "", [Line("x", [1.0, 2.0], [float("nan"), 1.0])], "", "") == []


def test_a_model_without_equilibrium_has_no_curves_of_a_solver(tmp_path: Path) -> None:
    lines = make_log(nfe=0.0, residual=None, statuses={}, trace=[])
    for line in lines:
        line.pop("nfe", None)
        line.pop("residual", None)
    assert names_of(lines) == ["loss", "metric-mse"]
    assert not any("evaluations" in fact.name for fact in summarise(lines, toy()))


@pytest.mark.parametrize(
    "gap",
    [
        {"metrics": {"mse": None}},
        {"metrics": None},
        {"solver": None},
        {"metrics": {}},
        {"solver": {"nfe": None, "residual": None, "statuses": None, "trace": [None, 1.0]}},
    ],
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_null_values_survive(gap: dict[str, Any], everywhere: bool, tmp_path: Path) -> None:
    lines = make_log()
    for line in lines if everywhere else lines[:2]:
        if line["kind"] == "eval":
            line.update(gap)
    lines[0]["loss"] = None
    run = Run.create(tmp_path / "run", "toy", toy())
    run.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(run)
    page = run.report.read_text()
    assert "No examples: there is no checkpoint" in page
    assert ("best validation mse" in page) == (not everywhere or "metrics" not in gap)


def test_each_status_has_a_colour_of_its_own() -> None:
    assert STATUS_COLOURS.keys() == {status.name for status in Status}
    assert len(set(STATUS_COLOURS.values())) == len(Status)


def test_a_solve_without_a_tolerance_is_not_shown_as_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = watch_figures(monkeypatch)
    lines = make_log(statuses={"MAX_ITER": 32})
    captions = {}
    for name, tol in (("with", 1e-3), ("without", 0.0)):
        preset = toy().with_deq(f_tol=tol)
        captions[name] = draw_curves(lines, preset)[-1].caption
    bars = [figure.axes[0].patches[0].get_facecolor() for figure in drawn[1::2]]
    assert bars[0] != bars[1]
    assert "No tolerance was asked for" in captions["without"]
    assert "No tolerance" not in captions["with"]


def test_the_convergence_plot_has_a_line_at_a_relative_tolerance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = watch_figures(monkeypatch)
    for preset in (toy().with_deq(f_stop_mode="rel", f_tol=1e-3), toy()):
        draw_curves(make_log(), preset)
    relative, absolute = (
        {line.get_label() for line in figure.axes[0].lines}
        for figure in drawn
        if figure.axes[0].get_xlabel() == "evaluations of f"
    )
    assert "tolerance" in relative
    assert "tolerance" not in absolute


def test_the_summary_names_best_test_and_published_results() -> None:
    test = {"kind": "test", "step": 12, "metrics": {"mse": 0.4}, "solver": {}}
    preset = replace(toy(), target=Target("mse", 0.1, "a paper"))
    facts = {fact.name: fact.value for fact in summarise([*make_log(), test], preset)}
    assert facts["best validation mse, at update 12"] == "0.3333"
    assert facts["test mse"] == "0.4"
    assert facts["published mse"] == "0.1"


def test_the_trace_is_the_median_so_that_exact_samples_do_not_hide_the_others() -> None:
    trace = torch.tensor([[1.0, 0.5, 0.1], [1.0, 0.4, 0.2], [1.0, 0.0, 0.0]])
    stats = SolverStat(
        {
            "rel_lowest": trace[:, -1],
            "rel_trace": trace,
            "sradius": torch.full((3,), -1.0),
        },
        nfe=3,
        status=torch.zeros(3, dtype=torch.long),
    )
    record = SolverRecord()
    record.add(stats)
    assert record.trace() == pytest.approx([1.0, 0.4, 0.1])


def test_captions_name_the_curves_that_are_drawn() -> None:
    lines = [line for line in make_log() if line["kind"] == "train"]
    captions = {picture.name: picture.caption for picture in draw_curves(lines, toy())}
    assert captions["nfe"].endswith("in training.")
    assert "validation" not in captions["residual"]


def test_long_logs_are_thinned_to_their_end() -> None:
    lines = [{"step": k} for k in range(4321)]
    assert len(thin(lines)) <= 2000
    assert thin(lines)[-1]["step"] == 4320
    assert number({"a": {"b": True}}, "a", "b") is None
    assert number({"a": 2}, "a") == 2.0


def test_of_equal_scores_the_first_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = toy()
    monkeypatch.setattr(type(preset.task), "score", Score("mse", higher_is_better=True))
    lines = [{"kind": "eval", "step": k, "metrics": {"mse": 25.0}} for k in (3, 6, 9)]
    assert [fact.name for fact in summarise(lines, preset)] == ["best validation mse, at update 3"]


def test_the_band_and_the_evaluations_of_samples_are_drawn_if_they_were_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = torch.tensor([[1.0, 0.5, 0.1], [1.0, 0.4, float("nan")], [1.0, 0.2, 0.01]])
    values = {"rel_lowest": trace[:, 1], "rel_trace": trace, "nstep": torch.tensor([3.0, 2.0, 3.0])}
    record = SolverRecord()
    record.add(SolverStat(values, nfe=3, status=torch.zeros(3, dtype=torch.long)))
    summary = record.summary()
    assert summary["steps"] == {"2": 1, "3": 2}
    assert summary["band"][0] == pytest.approx([1.0, 0.24, 0.019])
    assert "evaluations" in names_of(make_log(**summary))
    drawn = watch_figures(monkeypatch)
    draw_curves(make_log(**summary), toy())
    convergence = drawn[0].axes[0]
    assert len(convergence.collections) == 1
    assert "80 % of samples, update 12" in [t.get_text() for t in convergence.get_legend().texts]
