"""What `deq-zoo list` and `deq-zoo info` show; listing imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from deq_zoo.errors import DataError, MissingPackage, ZooError
from deq_zoo.family import Family, families, find_family, preset_summaries
from deq_zoo.packages import missing
from deq_zoo.pretrained import Card, names, pretrained_card

if TYPE_CHECKING:
    from deq_zoo.preset import Preset

_log = logging.getLogger("deq_zoo")


class Entry(NamedTuple):
    """A preset in the list.

    Args:
        name: of the preset.
        family: of the preset.
        summary: the first line about it.
        missing: modules that are not installed.
        install: the command that installs them.
    """

    name: str
    family: str
    summary: str
    missing: list[str]
    install: str

    def __str__(self) -> str:
        how = f": {self.install}" if self.install else ""
        mark = f" (not installed: {', '.join(self.missing)}{how})" if self.missing else ""
        return f"{self.name:24} {self.summary}{mark}"


def entries(family: str | None = None) -> list[Entry]:
    """Return the presets of one family, or of all, by name."""
    chosen = families().values() if family is None else [find_family(family)]
    return sorted(entry for each in chosen for entry in _entries_of(each))


class PretrainedEntry(NamedTuple):
    """A pretrained model in the list.

    Args:
        name: of the model.
        family: of the model.
        preset: that it was trained with.
        summary: one sentence.
        scores: on test data.
        size: of the weights, in bytes.
        missing: modules that are not installed.
        install: the command that installs them.
    """

    name: str
    family: str
    preset: str
    summary: str
    scores: dict[str, float]
    size: int
    missing: list[str]
    install: str

    def __str__(self) -> str:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.scores.items())
        how = f": {self.install}" if self.install else ""
        mark = f" (not installed: {', '.join(self.missing)}{how})" if self.missing else ""
        return f"{self.name:18} {self.summary} Test: {scores}; {self.size / 1e6:.2f} MB{mark}"


def pretrained_entries(family: str | None = None) -> list[PretrainedEntry]:
    """Return the pretrained models of one family, or of all, by name."""
    chosen = None if family is None else find_family(family).name
    return [_pretrained_entry(card) for card in _cards() if chosen in (None, card.family)]


def _cards() -> Iterator[Card]:
    """Yield the cards of all pretrained models; one that is damaged hides no other."""
    for name in names():
        try:
            yield pretrained_card(name)
        except ZooError as error:
            _log.warning("%s is left out: %s", name, error)


def _pretrained_entry(card: Card) -> PretrainedEntry:
    family = families()[card.family]
    lacking = missing(family)
    return PretrainedEntry(
        name=card.name,
        family=card.family,
        preset=card.preset,
        summary=card.summary,
        scores=dict(card.scores["test"]),
        size=card.size,
        missing=lacking,
        install=family.install if lacking else "",
    )


def _entries_of(family: Family) -> Iterator[Entry]:
    lines = preset_summaries(family)
    if not lines:
        from deq_zoo.preset import summaries  # imports torch

        lines = summaries(family)
    lacking = missing(family)
    for name, summary in lines.items():
        yield Entry(name, family.name, summary, lacking, family.install if lacking else "")


def preset_info(name: str, preset: Preset) -> dict[str, Any]:
    """Return what `info` shows about a preset, as plain values.

    Args:
        name: of the preset.
        preset: possibly with changed settings.
    """
    from deq_zoo.descriptions import settings
    from deq_zoo.precision import describe_tolerances
    from deq_zoo.preset import PRESETS
    from deq_zoo.values import to_data

    family = families().get(name.partition("-")[0])
    return {
        "name": name,
        "description": (PRESETS[name].__doc__ or "").strip(),
        **_model_info(preset),
        "precision": describe_tolerances(preset.task.deq, preset.precision),
        "target": None if preset.target is None else asdict(preset.target),
        "pretrained": [card.name for card in _cards() if card.preset == name],
        "predicts": family.predicts if family else "",
        "samples": family.samples if family else "",
        "settings": [each._asdict() | {"value": to_data(each.value)} for each in settings(preset)],
    }


def _model_info(preset: Preset) -> dict[str, Any]:
    """Return class and size of the model, or why only the data would tell its shape."""
    from deq_zoo.building import try_to_build

    try:
        model = try_to_build(preset)
    except (DataError, MissingPackage) as error:
        return {"model": None, "parameters": None, "needs_data": str(error)}
    count = sum(p.numel() for p in model.parameters())
    return {"model": type(model).__name__, "parameters": count}


def describe_preset(name: str, preset: Preset) -> Iterator[str]:
    """Yield the lines of `info` for people."""
    from deq_zoo.descriptions import settings
    from deq_zoo.help import format_settings

    info = preset_info(name, preset)
    yield f"{info['description']}\n"
    if info["model"] is None:
        yield f"the size of the model depends on the data: {info['needs_data']}"
    else:
        yield f"{info['model']}: {info['parameters']:,} parameters"
    if preset.target is not None:
        yield f"published: {preset.target.metric} {preset.target.value} ({preset.target.source})"
    if info["pretrained"]:
        yield f"pretrained: {', '.join(info['pretrained'])}, in place of a run"
    if info["precision"]:
        yield info["precision"]
    for use in ("predicts", "samples"):
        if info[use]:
            yield f"{use.removesuffix('s')}: {info[use]}"
    items = list(settings(preset))
    yield "\nsettings, changed by --set KEY=VALUE:"
    yield format_settings(each for each in items if not each.flag)
    if options := [each for each in items if each.flag]:
        yield "\noptions of the equilibrium, changed by --set or by flags, e.g. --f_max_iter 30:"
        yield format_settings(options)
