"""The report of a run: one HTML file that needs no network, and the same pictures as PNGs."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from deq_zoo.curves import LogLine, draw_curves, number
from deq_zoo.errors import ZooError
from deq_zoo.files import write_atomically
from deq_zoo.loading import open_model
from deq_zoo.preset import Preset
from deq_zoo.run import Run
from deq_zoo.settings import walk
from deq_zoo.task import Picture

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0;background:#f6f6f4;color:#222}
main{max-width:1080px;margin:0 auto;padding:32px 24px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 12px}
p.sub{color:#666;margin:0 0 20px;max-width:70ch}
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


class Fact(NamedTuple):
    """A number of the run with its name, for the top of the page."""

    value: str
    name: str


def write_report(run: Run, preset: Preset | None = None) -> None:
    """Draw the curves and the task's examples, and write the report.

    Examples whose data, weights or packages are missing are left out, with the reason on the page.

    Args:
        run: the run.
        preset: its own, or one whose data lies elsewhere.
    """
    preset = run.preset() if preset is None else preset
    lines = list(run.lines())
    curves, missing = draw_curves(lines, preset), ""
    examples: list[Picture] = []
    try:
        with torch.random.fork_rng(devices=[]):
            model, _ = open_model(run.path)
            examples = preset.task.pictures(model)
    except ZooError as error:
        missing = str(error)
    for picture in (*curves, *examples):
        write_atomically(run.pictures / f"{picture.name}.png", picture.png)
    write_atomically(run.report, _page(run, preset, lines, curves, examples, missing))


def summarise(lines: Sequence[LogLine], preset: Preset) -> list[Fact]:
    """Return the numbers of a run: score, test metrics, solver, published result, speed."""
    val = [line for line in lines if line.get("kind") == "eval"]
    test = [line for line in lines if line.get("kind") == "test"][-1:]
    train = [line for line in lines if line.get("kind") == "train"][-1:]
    facts = [*_validation_facts(val, preset)]
    for line in test:
        for name in line.get("metrics") or {}:
            value = number(line, "metrics", name)
            unit = preset.task.score.unit if name == preset.task.score.name else ""
            facts.append(Fact(_with_unit(value, unit), f"test {name}"))
    if preset.target is not None:
        facts.append(Fact(f"{preset.target.value:g}", f"published {preset.target.metric}"))
    facts += _solver_facts((test or val)[-1:])
    for line in train:
        facts.append(Fact(str(line["step"]), "updates"))
        speed = number(line, "samples_per_s")
        facts.append(Fact(_with_unit(speed, ""), "training samples per second"))
    return facts


def _validation_facts(val: Sequence[LogLine], preset: Preset) -> list[Fact]:
    score = preset.task.score
    values = [(number(line, "metrics", score.name), line["step"]) for line in val]
    scored = [(value, step) for value, step in values if value is not None]
    if not scored:
        return []
    best = max if score.higher_is_better else min
    value, step = best(scored, key=lambda each: each[0])  # of equals the first, as it was saved
    name = f"best validation {score.name}, at update {step}"
    return [Fact(_with_unit(value, score.unit), name)]


def _solver_facts(lines: Sequence[LogLine]) -> list[Fact]:
    named = (
        ("nfe", "evaluations of f per solve"),
        ("residual", "relative residual"),
        ("spectral_radius", "spectral radius of the Jacobian"),
    )
    return [
        Fact(f"{value:.3g}", name)
        for line in lines
        if (line.get("solver") or {}).get("statuses")
        for key, name in named
        if (value := number(line, "solver", key)) is not None
    ]


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4g} {unit}".strip()


def _page(
    run: Run,
    preset: Preset,
    lines: Sequence[LogLine],
    curves: list[Picture],
    examples: list[Picture],
    missing: str,
) -> str:
    cards = "".join(
        f"<div class=card><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for value, name in summarise(lines, preset)
    )
    rows = "".join(
        f"<tr><td>{html.escape(field.path)}</td><td>{html.escape(str(field.value))}</td></tr>"
        for field in walk(preset)
    )
    target = preset.target
    published = f" Published: {target.metric} {target.value:g} ({target.source})." if target else ""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{html.escape(run.name)}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{html.escape(run.name)}</h1>",
        f"<p class=sub>{html.escape(type(preset.task).__name__)}, seed {preset.seed}. The best "
        "checkpoint is chosen on validation data; test data is scored once, with its weights."
        f"{html.escape(published)}</p>",
        f"<div class=cards>{cards}</div>",
        f"<h2>Examples</h2><div class=grid>{_figures(examples, 'wide')}</div>" if examples else "",
        f"<p>No examples: {html.escape(missing)}</p>" if missing else "",
        f"<h2>Training and solver</h2><div class=grid>{_figures(curves, '')}</div>",
        f"<h2>Configuration</h2><table>{rows}</table>",
        "</main></body></html>",
    ]
    return "".join(parts)


def _figures(pictures: Iterable[Picture], kind: str) -> str:
    return "".join(
        f'<figure class="{kind}"><img alt="{html.escape(p.name)}" '
        f'src="data:image/png;base64,{base64.b64encode(p.png).decode()}">'
        f"<figcaption>{html.escape(p.caption)}</figcaption></figure>"
        for p in pictures
    )
