"""The report of a run: one HTML file that needs no network, and the same pictures as PNGs."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from deq_zoo.errors import CheckpointError, DataError, MissingPackage
from deq_zoo.files import write_atomically
from deq_zoo.loading import open_model
from deq_zoo.preset import Preset
from deq_zoo.run import Run
from deq_zoo.task import Picture
from deq_zoo.values import paths

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0;background:#f6f6f4;color:#222}
main{max-width:1080px;margin:0 auto;padding:32px 24px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 12px}
p.sub{color:#666;margin:0 0 20px}
.cards{display:flex;flex-wrap:wrap;gap:12px}
.card{background:#fff;border:1px solid #e3e3df;border-radius:8px;padding:12px 18px;min-width:120px}
.card b{display:block;font-size:22px}.card span{color:#666;font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:16px}
figure{background:#fff;border:1px solid #e3e3df;border-radius:8px;margin:0;padding:12px}
figure.wide{grid-column:1/-1}figure img{width:100%;height:auto;display:block}
figcaption{color:#555;font-size:13px;margin-top:6px}
table{border-collapse:collapse;background:#fff;font-size:13px;width:100%}
td{border:1px solid #e3e3df;padding:4px 10px;font-family:ui-monospace,monospace}
"""


def write_report(run: Run, preset: Preset | None = None) -> None:
    """Draw the curves and the task's examples, and write the report.

    Args:
        run: the run.
        preset: its own, or one whose data lies elsewhere.
    """
    preset = run.preset() if preset is None else preset
    lines = list(run.lines())
    evaluations = [line for line in lines if line["kind"] == "eval"]
    steps = thinned([line for line in lines if line["kind"] == "train"])
    curves = [*_training(steps), *_scores(evaluations, preset), *_solver(evaluations, steps)]
    missing = ""
    examples: list[Picture] = []
    try:
        with torch.random.fork_rng(devices=[]):
            model, _ = open_model(run.path)
            examples = preset.task.pictures(model)
    except (DataError, CheckpointError, MissingPackage) as error:
        missing = str(error)
    for picture in (*curves, *examples):
        write_atomically(run.pictures / f"{picture.name}.png", picture.png)
    page = _page(run, preset, evaluations, steps, curves, examples, missing)
    write_atomically(run.report, page)


def thinned(lines: list[dict[str, Any]], most: int = 2000) -> list[dict[str, Any]]:
    """As many lines as a curve can show, the last one among them."""
    gap = -(-len(lines) // most) or 1
    return lines[(len(lines) - 1) % gap :: gap] if lines else []


def to_png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


def line_plot(
    name: str,
    caption: str,
    series: Iterable[tuple[str, Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Picture:
    """One plot of named lines."""
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for label, x, y in series:
        axes.plot(x, y, label=label, linewidth=1.6, marker="." if len(x) < 30 else None)
    axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    if len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize=8)
    return Picture(name, caption, to_png(figure))


def _column(lines: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    held = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in held], [line[key] for line in held]


def _training(steps: list[dict[str, Any]]) -> list[Picture]:
    if not steps:
        return []
    x, loss = _column(steps, "loss")
    log = bool(loss) and min(loss) > 0
    picture = line_plot("loss", "Training loss.", [("loss", x, loss)], "step", "loss", log)
    return [picture]


def _scores(evaluations: list[dict[str, Any]], preset: Preset) -> list[Picture]:
    names = list(evaluations[0]["metrics"]) if evaluations else []
    x = [line["step"] for line in evaluations]
    pictures = []
    for name in names:
        y = [line["metrics"][name] for line in evaluations]
        series = [(name, x, y)]
        if preset.target is not None and preset.target.metric == name:
            series.append(("published", [x[0], x[-1]], [preset.target.value] * 2))
        unit = preset.task.score.unit if name == preset.task.score.name else ""
        caption = f"{name} on held-out data."
        pictures.append(line_plot(f"metric-{name}", caption, series, "step", f"{name} {unit}"))
    return pictures


def _solver(evaluations: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[Picture]:
    pictures = [*_convergence(evaluations)]
    for key, caption, log in (
        ("nfe", "Evaluations of f per solve, in training and evaluation.", False),
        ("residual", "Relative residual of the returned state.", True),
    ):
        series = [("training", *_column(steps, key))]
        found = [(line["step"], line["solver"][key]) for line in evaluations]
        series.append(("evaluation", [s for s, _ in found], [v for _, v in found]))
        series = [(label, x, y) for label, x, y in series if x]
        if series:
            pictures.append(line_plot(key, caption, series, "step", key, log))
    return pictures + _statuses(evaluations) + _radius(evaluations)


def _convergence(evaluations: list[dict[str, Any]]) -> list[Picture]:
    traces = [line for line in evaluations if line["solver"]["trace"]]
    if not traces:
        return []
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for i, line in enumerate(traces):
        shade = colormaps["viridis"](i / max(1, len(traces) - 1))
        trace = line["solver"]["trace"]
        label = f"step {line['step']}" if i in (0, len(traces) - 1) else None
        axes.plot(range(1, len(trace) + 1), trace, color=shade, linewidth=1.4, label=label)
    axes.set(xlabel="evaluation of f", ylabel="relative residual", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    caption = "Convergence of the solver at each evaluation of the model, early (dark) to late."
    return [Picture("convergence", caption, to_png(figure))]


def _statuses(evaluations: list[dict[str, Any]]) -> list[Picture]:
    counts = [line["solver"]["statuses"] for line in evaluations]
    names = sorted({name for count in counts for name in count})
    if not names:
        return []
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    bottom = [0.0] * len(counts)
    labels = [str(line["step"]) for line in evaluations]
    for name in names:
        shares = [100 * count.get(name, 0) / max(1, sum(count.values())) for count in counts]
        axes.bar(labels, shares, bottom=bottom, label=name.lower(), width=0.8)
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
    axes.set(xlabel="step", ylabel="samples, %")
    axes.set_xticks(range(0, len(labels), max(1, len(labels) // 8)))
    axes.legend(fontsize=8, loc="lower left")
    return [Picture("statuses", "How the solve of each sample ended.", to_png(figure))]


def _radius(evaluations: list[dict[str, Any]]) -> list[Picture]:
    found = [
        (line["step"], line["solver"]["spectral_radius"])
        for line in evaluations
        if "spectral_radius" in line["solver"]
    ]
    if not found:
        return []
    series = [("radius", [s for s, _ in found], [v for _, v in found])]
    caption = "Spectral radius of the Jacobian at the equilibrium."
    return [line_plot("radius", caption, series, "step", "spectral radius")]


def _page(
    run: Run,
    preset: Preset,
    evaluations: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    curves: list[Picture],
    examples: list[Picture],
    missing: str,
) -> str:
    cards = "".join(
        f"<div class=card><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in _facts(preset, evaluations, steps)
    )
    rows = "".join(
        f"<tr><td>{html.escape(path)}</td><td>{html.escape(str(value))}</td></tr>"
        for path, _, value in paths(preset)
    )
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{html.escape(run.name)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{html.escape(run.name)}</h1>",
        f"<p class=sub>{html.escape(type(preset.task).__name__)}, seed {preset.seed}</p>",
        f"<div class=cards>{cards}</div>",
        f"<h2>Examples</h2><div class=grid>{_figures(examples, 'wide')}</div>" if examples else "",
        f"<p>No examples: {html.escape(missing)}</p>" if missing else "",
        f"<h2>Training and solver</h2><div class=grid>{_figures(curves, '')}</div>",
        f"<h2>Configuration</h2><table>{rows}</table>",
        "</main></body></html>",
    ]
    return "".join(parts)


def _facts(
    preset: Preset, evaluations: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    facts = []
    if evaluations:
        score = preset.task.score
        values = [line["metrics"][score.name] for line in evaluations]
        best = max(values) if score.higher_is_better else min(values)
        unit = f" {score.unit}" if score.unit else ""
        facts.append((f"best {score.name}", f"{best:.4g}{unit}"))
        facts.append((f"last {score.name}", f"{values[-1]:.4g}{unit}"))
        solver = evaluations[-1]["solver"]
        facts.append(("evaluations of f", f"{solver['nfe']:.3g}"))
        facts.append(("relative residual", f"{solver['residual']:.2g}"))
        if "spectral_radius" in solver:
            facts.append(("spectral radius", f"{solver['spectral_radius']:.3g}"))
    if preset.target is not None:
        facts.append((f"published {preset.target.metric}", f"{preset.target.value}"))
    if steps:
        facts.append(("steps", str(steps[-1]["step"])))
        facts.append(("samples per second", f"{steps[-1].get('samples_per_s', 0):.3g}"))
    return facts


def _figures(pictures: Iterable[Picture], kind: str) -> str:
    return "".join(
        f'<figure class="{kind}"><img alt="{html.escape(p.name)}" '
        f'src="data:image/png;base64,{base64.b64encode(p.png).decode()}">'
        f"<figcaption>{html.escape(p.caption)}</figcaption></figure>"
        for p in pictures
    )
