"""Make a pretrained model from finished runs of one preset: `python -m tools.pretrain NAME RUN...`

The runs differ in their seeds. The one with the best score on validation data is packaged in
`deq_zoo/pretrained`: its best weights, or with `--last` those of its last update, in half precision
where that keeps their values, and a card with what was measured. The words of the card are in
`tools/pretrained/NAME.toml`; without runs, only the words are written again.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import commit, machine
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.descriptions import shown
from deq_zoo.errors import ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.family import find_family
from deq_zoo.files import write_atomically
from deq_zoo.identity import CHANGEABLE, differing_settings
from deq_zoo.loading import open_model
from deq_zoo.preset import Preset, find_preset
from deq_zoo.pretrained import FOLDER, names, pretrained_card
from deq_zoo.pretrained.cards import Card, Scores, Trained
from deq_zoo.run import Run
from deq_zoo.settings import walk
from deq_zoo.task import Split

# The seed has a place of its own in a card; the length of a run makes another model.
_NOT_LISTED = {"seed", *CHANGEABLE} - {"steps", "epochs"}
WORDS = ("summary", "data", "examples", "limits")
NOTES = Path(__file__).parent / "pretrained"
#: The scores that choose models, in the words of the table of docs/zoo.md.
_IN_WORDS = {
    "accuracy": "{accuracy:.1f} % right",
    "aepe": "mean end-point error of {aepe:.2f} pixels",
    "exact": "{exact:.1f} % solved without an error",
    "loss": "mean squared error {loss:.3f} of its predictions",
    "perplexity": "{bits_per_byte:.2f} bits for each byte",
}
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6  # errors of half precision that a weight may have


def package(
    name: str,
    paths: Sequence[Path],
    folder: Path = FOLDER,
    notes: Path = NOTES,
    best: bool = True,
) -> Card:
    """Write the files of a pretrained model and return its card.

    Args:
        name: of the model.
        paths: run folders of one preset with different seeds.
        folder: where the files go.
        notes: folder with NAME.toml: summary, data, examples and limits.
        best: take each run's best weights by validation data, not its last ones.
    """
    words = _read_words(name, notes)
    runs = [Run.open(path) for path in paths]
    _check_same(runs)
    _check_family(name, runs[0])
    score = runs[0].preset().task.score
    full = {run.preset().seed: _scores(run.path, False, best) for run in runs}
    by_seed = {run.preset().seed: _describe_run(run, full[run.preset().seed], best) for run in runs}
    better = max if score.higher_is_better else min
    chosen = better(runs, key=lambda run: by_seed[run.preset().seed].val[score.name])
    with TemporaryDirectory(dir=folder) as part:  # the old files stay until the new ones are whole
        weights = Path(part) / f"{name}.safetensors"
        _write_weights(chosen, weights, best)
        card = _make_card(name, words, chosen, by_seed, weights, full[chosen.preset().seed], best)
        weights.replace(folder / weights.name)
    write_card(card, folder)
    return card


def _make_card(
    name: str,
    words: dict[str, Any],
    chosen: Run,
    by_seed: dict[int, Trained],
    weights: Path,
    full: dict[str, Scores],
    best: bool,
) -> Card:
    return Card(
        name=name,
        preset=chosen.name,
        settings=tuple(_changed_settings(chosen)),
        **words,
        commands=tuple(_commands(name, chosen, sorted(by_seed), best)),
        steps=chosen.preset().total_steps,
        runs=tuple(by_seed[each] for each in sorted(by_seed)),
        seed=chosen.preset().seed,
        score=chosen.preset().task.score.name,
        parameters=sum(p.numel() for p in open_model(weights)[0].parameters()),
        size=weights.stat().st_size,
        dtype=_stored_as(weights),
        sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        scores=_scores(weights, thorough=True),
        full_precision=full,
        measured={},
        versions=_versions(chosen.name),
        commit=commit(),
        machine=machine(),
    )


def write_card(card: Card, folder: Path = FOLDER) -> None:
    """Write both files of a card."""
    write_atomically(folder / f"{card.name}.json", card.to_json())
    write_atomically(folder / f"{card.name}.md", card.to_markdown())


def in_half(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with float16 in place of float32 where every value stays nearly the same."""
    return {name: _halved(value) for name, value in weights.items()}


def table() -> str:
    """Return the pretrained models as the table of docs/zoo.md."""
    lines = ["| Model | What it does | Test | MB | Seeds |", "| --- | --- | --- | --- | --- |"]
    for card in map(pretrained_card, names()):
        words = _IN_WORDS.get(card.score, f"{card.score} {{{card.score}:.4g}}")
        score = words.format(**card.scores["test"])
        link = f"[`{card.name}`](../deq_zoo/pretrained/{card.name}.md)"
        size, seeds = f"{card.size / 1e6:.2f}", len(card.runs)
        lines.append(f"| {link} | {card.summary} | {score} | {size} | {seeds} |")
    return "\n".join(lines)


def _halved(value: Tensor) -> Tensor:
    if value.dtype != torch.float32:
        return value
    half = value.half()
    error, allowed = (half.float() - value).abs(), _RELATIVE * value.abs() + _ABSOLUTE
    return half if bool((error <= allowed).all()) else value  # infinity is no small error


def _write_weights(run: Run, out: Path, best: bool) -> None:
    checkpoint = run.checkpoint(best=best)
    weights = in_half(checkpoint.model)
    model, _ = open_model(run.path, best)
    for copy, original in model.copied_weights().items():
        weights[original] = weights[copy]  # the copy is what evaluation uses
    Checkpoint(checkpoint.step, weights, config=checkpoint.config, facts=checkpoint.facts).save(out)


def _describe_run(run: Run, scores: Mapping[str, Scores], best: bool) -> Trained:
    """Return what the log of a finished run says, and its scores."""
    preset, step = run.preset(), run.checkpoint(best=best).step
    if not list(run.lines("test")) or preset.task.val_set is None:
        raise ZooError(
            f"{run.path} is not finished, or has no validation data: train it to its end"
        )
    return Trained(
        seed=preset.seed,
        step=step,
        minutes=round(_seconds(run, preset) / 60, 1),
        val=scores["val"],
        test=scores["test"],
    )


def _seconds(run: Run, preset: Preset) -> float:
    """Return the time of all updates at the median time of the log, whatever paused some.

    The size of a batch may change in the course of training: it is looked up at each line.
    """
    task, times = preset.task, []
    for line in run.lines("train"):
        samples = task.batch_size(task.train_batch(line["step"] - 1, preset.seed))
        times.append(samples * preset.accumulate / float(line["samples_per_s"]))
    return preset.total_steps * median(times)


def _stored_as(weights: Path) -> str:
    """Return the floating-point types in a file of weights."""
    values = Checkpoint.load(weights).model.values()
    return " and ".join(sorted({str(v.dtype)[6:] for v in values if v.is_floating_point()}))


def _check_family(name: str, run: Run) -> None:
    """Raise unless a model is called after the family of its runs."""
    family = find_family(run.name).name
    if name.partition("-")[0] != family:
        raise ZooError(f"{run.path} is a run of the family {family}: call the model {family}-...")


def _check_same(runs: Iterable[Run]) -> None:
    """Raise unless runs have the same settings, but for their seeds, which differ."""
    first, *others = runs
    for other in others:
        differing = differing_settings(first.preset(), other.preset())
        if first.name != other.name or differing != ["seed"]:
            raise ZooError(
                f"{other.path} and {first.path} should be runs of one preset with two seeds; they "
                f"differ in {', '.join(differing) or 'nothing'}"
            )


def _changed_settings(run: Run) -> list[str]:
    """Return the settings in which a run differs from its preset and that make another model."""
    usual = {field.path: field.value for field in walk(find_preset(run.name))}
    return [
        f"{field.path}={shown(field.value)}"
        for field in walk(run.preset())
        if field.path not in _NOT_LISTED and usual.get(field.path) != field.value
    ]


def _commands(name: str, run: Run, seeds: list[int], best: bool) -> list[str]:
    changes = "".join(f" --set {each}" for each in _changed_settings(run))
    folders = [f"runs/{name}-{seed}" for seed in seeds]
    return [
        *(
            f"deq-zoo train {run.name} --seed {seed}{changes} --cpu --out {folder}"
            for seed, folder in zip(seeds, folders, strict=True)
        ),
        f"python -m tools.pretrain {name} {' '.join(folders)}{'' if best else ' --last'}",
    ]


def _scores(source: Path, thorough: bool, best: bool = True) -> dict[str, Scores]:
    model, preset = open_model(source, best)
    splits: tuple[Split, ...] = ("val", "test")
    return {each: dict(evaluate(preset.task, model, each, thorough).metrics) for each in splits}


def _versions(preset: str) -> dict[str, str]:
    names = packages_distributions()
    modules = ["torch", *find_family(preset).packages]
    found = {module: version(names[module][0]) for module in modules if module in names}
    return {"Python": platform.python_version(), **found}


def _read_words(name: str, notes: Path) -> dict[str, Any]:
    """Return the words of a card: lines of text are joined, lists are tuples."""
    file = notes / f"{name}.toml"
    if not file.exists():
        raise ZooError(f"{file} is missing: it has {', '.join(WORDS)}")
    words = tomllib.loads(file.read_text(encoding="utf-8"))
    if words.keys() != set(WORDS):
        raise ZooError(f"{file} has {', '.join(words)}; it should have {', '.join(WORDS)}")
    return {key: _joined(value) for key, value in words.items()}


def _joined(value: Any) -> Any:
    return tuple(map(_joined, value)) if isinstance(value, list) else " ".join(value.split())


def main() -> None:
    """Package the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the pretrained model")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--last", action="store_true", help="the last weights, not the best")
    args = parser.parse_args()
    if args.runs:
        card = package(args.name, args.runs, best=not args.last)
    else:
        card = replace(pretrained_card(args.name), **_read_words(args.name, NOTES))
        write_card(card)
    print(card.to_markdown())


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
