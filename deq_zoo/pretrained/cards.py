"""Cards of pretrained models: what was trained on what, how, and with which result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.family import families

Scores = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One of the runs with different seeds.

    Args:
        seed: of the run.
        step: of the checkpoint that validation data chose.
        minutes: of training at the median speed in the log, on a machine that did other work, too.
        val: scores on validation data.
        test: scores on test data, which chose nothing.
    """

    seed: int
    step: int
    minutes: float
    val: Scores
    test: Scores


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a pretrained model is, and what was measured.

    Args:
        name: of the model.
        preset: that it was trained with.
        settings: changes of the preset, as `--set` takes them.
        summary: one sentence.
        data: what it was trained, validated and tested on.
        examples: commands to try.
        limits: where it fails.
        commands: that make its files again.
        steps: updates of a whole run.
        runs: of all seeds; the one with the best validation score was packaged.
        seed: of the packaged one.
        score: the metric that chose checkpoint and seed.
        parameters: of the model.
        size: of the weights, in bytes.
        dtype: that floating-point weights are stored in; they are loaded as float32.
        sha256: of the file with the weights.
        scores: of the packaged weights, by split.
        full_precision: scores of the same weights in float32, by split.
        measured: further results, by the title of their table.
        versions: of the packages that trained it.
        commit: of the code that packaged the weights; where the machine is unknown, the commit that
            brought them. None if it was not recorded.
        machine: that packaged and scored the weights; None if it was not recorded.
    """

    name: str
    preset: str
    settings: tuple[str, ...]
    summary: str
    data: str
    examples: tuple[str, ...]
    limits: tuple[str, ...]
    commands: tuple[str, ...]
    steps: int
    runs: tuple[Trained, ...]
    seed: int
    score: str
    parameters: int
    size: int
    dtype: str
    sha256: str
    scores: Mapping[str, Scores]
    full_precision: Mapping[str, Scores]
    measured: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    commit: str | None = None
    machine: str | None = None

    @property
    def family(self) -> str:
        """Return the name of the family."""
        return self.preset.partition("-")[0]

    def to_json(self) -> str:
        """Return the card as the text of its JSON file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return the card as the text of its Markdown file."""
        return "\n".join(_lines(self)) + "\n"


def read_card(path: Path) -> Card:
    """Return the card in a JSON file; raise `ZooError` if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError(f"it has a {type(data).__name__} in the place of an object")
        lists = {f.name for f in fields(Card) if "tuple" in str(f.type)}
        values: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in data.items()}
        card = Card(**values | {"runs": tuple(Trained(**run) for run in data["runs"])})
        if card.name != path.stem:
            raise ValueError(f"it is that of {card.name}")
        if card.family not in families():
            raise ValueError(f"there is no family {card.family!r}")
        if not all(isinstance(value, (int, float)) for value in card.scores["test"].values()):
            raise ValueError("a score on test data is no number")
        return card
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ZooError(f"the card {path} cannot be read: {error}") from None


def _lines(card: Card) -> Iterator[str]:
    yield from (f"# {card.name}", "", card.summary, "", card.data, "")
    yield from (f"    {command}" for command in card.examples)
    yield from ("", "## Scores", "")
    splits = {"val": "validation", "test": "test"}
    names = list(next(iter(card.scores.values())))
    rows = {
        f"{splits.get(split, split)}{what}": scores
        for what, by_split in (("", card.scores), (", in float32", card.full_precision))
        for split, scores in by_split.items()
    }
    yield from _table("packaged weights", names, rows)
    for title, scores in card.measured.items():
        yield from ("", f"{title}:", "", "| what | measured |", "| --- | --- |")
        yield from (f"| {name} | {_shown(value)} |" for name, value in scores.items())
    yield from ("", "## Training", "")
    yield (
        f"Preset `{card.preset}`{_with(card.settings)}, {card.parameters:,} parameters, "
        f"{card.steps:,} steps. {_choice(card)} The packaged weights have {card.size:,} bytes, "
        f"floating-point numbers stored as {card.dtype}. The scores of each run, in float32:"
    )
    yield ""
    rows = {f"{run.seed}": _run_row(run) for run in card.runs}
    yield from _table("seed", list(next(iter(rows.values()))), rows)
    yield from (
        "",
        "Minutes are those of all steps at the median speed, beside other work. Made again by:",
        "",
    )
    yield from (f"    {command}" for command in card.commands)
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    yield from ("", f"With {versions}. {_packaged(card)}")
    yield from ("", f"SHA-256 of the weights: `{card.sha256}`.")
    if card.limits:
        yield from ("", "## Limits", "", *(f"- {limit}" for limit in card.limits))


def _run_row(run: Trained) -> dict[str, float]:
    return {
        "step": run.step,
        "minutes": run.minutes,
        **{f"val {name}": value for name, value in run.val.items()},
        **{f"test {name}": value for name, value in run.test.items()},
    }


def _table(corner: str, names: list[str], rows: Mapping[str, Scores]) -> Iterator[str]:
    yield f"| {corner} | {' | '.join(names)} |"
    yield f"| --- |{' --- |' * len(names)}"
    for title, scores in rows.items():
        cells = [_shown(scores[name]) if name in scores else "" for name in names]
        yield f"| {title} | {' | '.join(cells)} |"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _with(settings: tuple[str, ...]) -> str:
    return f" with {', '.join(f'`{each}`' for each in settings)}" if settings else ""


def _packaged(card: Card) -> str:
    """Return where the weights were packaged: a model older than the record has no machine."""
    commit = "an unknown commit" if card.commit is None else f"commit {card.commit}"
    if card.machine is None:
        return f"Packaged in {commit}; the machine was not recorded."
    return f"Packaged by the code of {commit} on this machine: {card.machine}."


def _choice(card: Card) -> str:
    if len(card.runs) == 1:
        return f"One run, with seed {card.seed}."
    return (
        f"{len(card.runs)} runs, of which none has a better `{card.score}` on validation data than "
        f"the packaged one, with seed {card.seed}."
    )
