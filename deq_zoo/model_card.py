"""Model cards: what a saved model is, how good it was, and how it was made.

The front matter is what the Hugging Face Hub reads: library, tags, task, and the results as
`model-index`. Numbers come from the log of the run; without one, there are no results.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from deq_zoo.descriptions import shown
from deq_zoo.errors import ZooError
from deq_zoo.family import Family, families
from deq_zoo.packages import optional
from deq_zoo.preset import Preset, find_preset
from deq_zoo.settings import change_preset, walk
from deq_zoo.task import Task


class Subject(NamedTuple):
    """What a card is about.

    Args:
        name: of the preset.
        preset: with its settings.
        architecture: the class of the model.
        parameters: their number.
        step: updates behind the weights.
        results: the line of the log with the results on test data; None if there is none.
        source: the repository or folder to load.
    """

    name: str
    preset: Preset
    architecture: str
    parameters: int
    step: int
    results: Mapping[str, Any] | None
    source: str


def write_card(subject: Subject) -> str:
    """Return the text of a model card, front matter included."""
    hub = optional("huggingface_hub", "frame", "model cards")
    data = hub.ModelCardData(
        library_name="torchdeq",
        pipeline_tag=_pipeline_tag(subject) or None,
        tags=["torchdeq", "deq_zoo", "deep-equilibrium-model", _family_name(subject)],
        metrics=[*_metrics(subject)] or None,
        model_name=subject.name,
        eval_results=list(_eval_results(subject, hub)) or None,
    )
    if not data.eval_results:
        data.pop("model_name")  # only the Hub's list of results has a place for it
    return "\n".join(["---", data.to_yaml(), "---", "", *_body(subject)])


def remaking_command(name: str, preset: Preset) -> str | None:
    """Return the command that trains a preset with its settings; None if flags cannot say them."""
    try:
        own = find_preset(name)
    except ZooError:
        return None
    former = {field.path: field.value for field in walk(own)}
    changed = [
        f"{field.path}={shown(field.value)}"
        for field in walk(preset)
        if field.value != former.get(field.path) and field.path != "task.data_dir"
    ]
    try:
        again = change_preset(own, changed, {}, None)
    except ZooError:
        return None
    if without_data_dir(again) != without_data_dir(preset):
        return None
    flags = [f"--set {shlex.quote(setting)}" for setting in changed]
    data = ["--data-dir DATA"] if preset.task.reads_data_dir else []
    return " ".join(["deq-zoo train", name, *flags, *data])


def without_data_dir(preset: Preset) -> Preset:
    """Return a preset that names no folder of this machine as the place of its data."""
    if getattr(preset.task, "data_dir", None) is None:
        return preset
    return replace(preset, task=replace(preset.task, data_dir=None))  # type: ignore[type-var]


def family_of(task: Task) -> Family | None:
    """Return the family that declares the class of a task."""
    kind = f"{type(task).__module__}:{type(task).__qualname__}"
    return next((each for each in families().values() if kind in each.tasks), None)


def _family_name(subject: Subject) -> str:
    family = family_of(subject.preset.task)
    return subject.name.partition("-")[0] if family is None else family.name


def _pipeline_tag(subject: Subject) -> str:
    family = family_of(subject.preset.task)
    return "" if family is None else family.pipeline_tag


def _metrics(subject: Subject) -> dict[str, float]:
    """Return the finite metrics of the results, that of the score first."""
    found = {} if subject.results is None else subject.results["metrics"]
    finite = {k: v for k, v in found.items() if v is not None and isfinite(v)}
    score = subject.preset.task.score.name
    return {k: finite[k] for k in sorted(finite, key=lambda k: k != score)}


def _data_name(subject: Subject) -> str:
    data = getattr(subject.preset.task, "data", None)
    return data if isinstance(data, str) else subject.name


def _label(subject: Subject, metric: str) -> str:
    score = subject.preset.task.score
    return f"{metric} ({score.unit})" if metric == score.name and score.unit else metric


def _eval_results(subject: Subject, hub: Any) -> Iterator[Any]:
    """Yield the results in the form that the Hub reads."""
    for metric, value in _metrics(subject).items():
        yield hub.EvalResult(
            task_type=_pipeline_tag(subject) or _family_name(subject),
            dataset_type=_data_name(subject),
            dataset_name=_data_name(subject),
            dataset_split="test",
            metric_type=metric,
            metric_name=_label(subject, metric),
            metric_value=value,
        )


def _body(subject: Subject) -> Iterator[str]:
    family = family_of(subject.preset.task)
    yield f"# {subject.name}\n"
    if family is not None:
        yield f"{family.description} A model of `deq_zoo`, the zoo of TorchDEQ.\n"
    yield f"- Model: `{subject.architecture}`, {subject.parameters:,} parameters"
    if subject.step:
        yield f"- Training: {subject.step:,} updates"
    yield "\n## Use\n"
    yield "```python\nfrom deq_zoo.model import Model\n"
    yield f'model = Model.from_pretrained("{subject.source}")'
    yield "```\n"
    if family is not None and family.predicts:
        yield f"`deq-zoo predict FOLDER FILE...` takes: {family.predicts}\n"
    if family is not None and family.samples:
        yield f"`deq-zoo sample FOLDER` writes: {family.samples}\n"
    yield from _results(subject)
    yield from _making(subject)


def _results(subject: Subject) -> Iterator[str]:
    yield "## Results\n"
    metrics, target = _metrics(subject), subject.preset.target
    if not metrics:
        yield "No results are known for these weights; `deq-zoo evaluate FOLDER` measures them.\n"
        return
    yield f"On the test data of `{_data_name(subject)}`, scored once by the run:\n"
    yield "| Metric | Value | Published |\n| --- | --- | --- |"
    for metric, value in metrics.items():
        matches = target is not None and target.metric == metric
        published = f"{target.value:g} ({target.source})" if target is not None and matches else ""
        yield f"| {_label(subject, metric)} | {value:.4g} | {published} |"
    yield ""
    yield from _solver(subject.results["solver"] if subject.results else {})


def _solver(solver: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about what the solver did on the test data."""
    if solver.get("nfe") is None:
        return
    parts = [f"{solver['nfe']:.3g} evaluations of `f` per solve"]
    if solver.get("residual") is not None:
        parts.append(f"mean relative residual {solver['residual']:.2g}")
    if solver.get("spectral_radius") is not None:
        parts.append(f"spectral radius of the Jacobian {solver['spectral_radius']:.3g}")
    counts = [f"{count} {name}" for name, count in (solver.get("statuses") or {}).items()]
    ends = f" Solves ended as: {', '.join(counts)}." if counts else ""
    yield f"The solver: {', '.join(parts)}.{ends}\n"


def _making(subject: Subject) -> Iterator[str]:
    yield "## How it was made\n"
    command = remaking_command(subject.name, subject.preset)
    if command is None:
        yield "With settings of its own: `config.json` has all of them.\n"
        return
    yield f"This command trains it again:\n\n    {command}\n"
    yield "`config.json` has all settings.\n"
