"""Tables of the language models that were trained for equal time."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from tools.tables.frame import markdown, read, table
from tools.tables.language import SEEDS, residual

NAMES = {
    "explicit": "explicit transformer",
    "attractor": "attractor",
    "convergent": "convergent",
    "original": "original",
}
SIZES = (1, 4)
UPDATES = (1_000, 4_000)  # after which all or most designs have a point of their curve
_STEPS = (1, 2, 3, 4, 6, 8, 12, 24, 100)


def scores(name: str, millions: int) -> list[float]:
    """Return the perplexities of a design on `valid`, one for each seed."""
    return [run["perplexity"] for run in runs(name, millions)]


def mean_perplexity(name: str, millions: int) -> str:
    """Return the mean perplexity of a design over seeds."""
    return f"{mean(scores(name, millions)):.1f}"


def runs(name: str, millions: int) -> list[dict[str, Any]]:
    """Return the runs of a design, one for each seed."""
    rows = read("lm_designs/compare")["rows"]
    return [rows[f"{name} {millions} {seed}"] for seed in SEEDS]


def _joined(values: Iterable[str]) -> str:
    return ", ".join(values)


@table("lm_designs/compare", "lm_designs/memory")
def lm_designs() -> str:
    """Return perplexity, updates, time, memory and convergence of designs of two sizes."""
    header = ["parameters", "design", "perplexity", "updates", "ms per update", "memory",
              "evaluations", "relative residual"]  # fmt: skip
    peaks = read("lm_designs/memory")["rows"]
    lines = []
    for millions in SIZES:
        for name, shown in NAMES.items():
            found = runs(name, millions)
            seconds = [run["curve"][-1]["seconds"] / run["updates"] for run in found]
            lines.append(
                [
                    f"{found[0]['parameters'] / 1e6:.2f} M",
                    shown,
                    _joined(f"{run['perplexity']:.1f}" for run in found),
                    _joined(f"{run['updates']:,}" for run in found),
                    _joined(f"{1e3 * each:.0f}" for each in seconds),
                    f"{peaks[f'{name} {millions}']['peak_mb']:.0f} MB",
                    *_solves(found),
                ]
            )
    return markdown(header, lines)


def _solves(found: list[dict[str, Any]]) -> list[str]:
    """Return evaluations and residuals on `valid`; an explicit network has none."""
    if found[0]["valid_residual"] is None:
        return ["", ""]
    return [
        _joined(f"{run['valid_evaluations']:.1f}" for run in found),
        _joined(residual(run["valid_residual"]) for run in found),
    ]


@table("lm_designs/compare")
def lm_equal_updates() -> str:
    """Return held-out losses after the same number of updates, beside those at the end."""

    def cell(run: dict[str, Any], updates: int) -> str:
        for point in run["curve"]:
            if point["updates"] == updates:
                return f"{point['loss']:.2f} ({100 * point['share']:.0f} %)"
        return "not reached"

    lines = [
        [
            f"{millions} M",
            shown,
            *(_joined(cell(run, n) for run in runs(name, millions)) for n in UPDATES),
            _joined(f"{run['held_out_loss']:.2f}" for run in runs(name, millions)),
        ]
        for millions in SIZES
        for name, shown in NAMES.items()
    ]
    after = (f"after {n:,} updates" for n in UPDATES)
    return markdown(["size", "design", *after, "at the end"], lines)


@table("lm_designs/curve")
def lm_designs_curve() -> str:
    """Return held-out loss and residual by evaluations of f, at the larger size."""
    rows = {key.split()[0]: row for key, row in read("lm_designs/curve")["rows"].items()}

    def cell(name: str, count: int) -> str:
        at = rows[name]["steps"].index(count)
        return f"{rows[name]['loss'][at]:.3f} ({residual(rows[name]['residual'][at])})"

    names = [name for name in NAMES if name in rows]
    return markdown(
        ["evaluations", *(NAMES[name] for name in names)],
        [[str(count), *(cell(name, count) for name in names)] for count in _STEPS],
    )


@table("lm_designs/decode")
def lm_designs_writing() -> str:
    """Return tokens per second with a cache and by recomputation."""
    header = ["size", "texts", "design", "with a cache", "evaluations for the next token of all",
              "whole text again"]  # fmt: skip
    lines = []
    for key, row in read("lm_designs/decode")["rows"].items():
        millions, _, batch = key.split()
        for name, shown in NAMES.items():
            speed = row[name]
            count = speed["evaluations"]
            lines.append(
                [
                    f"{millions} M",
                    batch,
                    shown,
                    f"{speed['cached']:,.0f}",
                    f"{count:.1f}" if count else "",
                    f"{speed['recomputed']:.{0 if speed['recomputed'] >= 10 else 1}f}",
                ]
            )
    return markdown(header, lines)


@table("lm_designs/quality")
def lm_attractor_gradients() -> str:
    """Return the error and the time of cheap gradients of a trained attractor."""
    header = ["gradient", "relative error", "of the gated block", "cosine, gated block", "time"]
    lines = [
        [
            name,
            f"{row['error']:.3f}",
            f"{row['error_of_gated_block']:.3f}",
            f"{row['cosine_of_gated_block']:.3f}",
            f"{row['ms']:.0f} ms",
        ]
        for name, row in read("lm_designs/quality")["rows"].items()
    ]
    return markdown(header, lines)


#: The parts of the attractor's training, in the order of the table: name in the results, and words.
_PARTS = {
    "whole": "attractor as its preset trains it",
    "explicit": "explicit transformer",
    "explicit to the end": "one evaluation to the end: never trained as an equilibrium",
    "never explicit": "two steps from the first update on",
    "no residual loss": "without the residual loss",
    "one step": "gradient of one step after up to two, no residual loss",
    "implicit gradient": "implicit gradient (GMRES to 1e-2), no residual loss",
    "random gated blocks at first": "random gated blocks at first (`core_start=random`)",
    "published start": "published start: also `input_rms=0`, `gate_start=0.75`",
    "start at zeros": "solves start at zeros, not at the backbone",
    "Muon": "Muon for the matrices of the backbone",
    "Muon everywhere": "Muon for the matrices of the gated block, too",
    "explicit, Muon": "explicit transformer, Muon for the matrices of all blocks",
    "mixed precision": "mixed precision (bf16)",
    "compiled f": "compiled f",
}


def rates_of(rows: dict[str, Any], name: str) -> list[str]:
    """Return the keys of the rows of a part with several learning rates."""
    return [key for key in rows if key.rpartition(" ")[0] == name]


@table("lm_designs/ablate")
def lm_ablation() -> str:
    """Return what becomes of the attractor without parts of its training."""
    header = ["training", "held-out loss", "after one evaluation", "updates", "evaluations",
              "relative residual"]  # fmt: skip
    rows = read("lm_designs/ablate")["rows"]
    lines = []
    for name, words in _PARTS.items():
        row, shown = rows.get(name), words
        if row is None:  # one of several learning rates
            key = min(rates_of(rows, name), key=lambda key: float(rows[key]["held_out_loss"]))
            row, shown = rows[key], f"{words}, {float(key.split()[-1]):g}, the best of three rates"
        once = row.get("loss after one evaluation")
        solved = row["residual"] is not None
        lines.append(
            [
                shown,
                f"{row['held_out_loss']:.3f}",
                "" if once is None else f"{once:.3f}",
                f"{row['updates']:,}",
                f"{row['evaluations']:.1f}" if solved else "",
                residual(row["residual"]) if solved else "",
            ]
        )
    return markdown(header, lines)


@table("lm_reference/compare", "lm_reference/compress")
def lm_reference() -> str:
    """Return bits per byte of the two models and of compressors."""
    header = ["", "validation text", "test text", "parameters", "updates"]
    models = {"attractor": "attractor", "explicit": "the attractor's blocks, all explicit"}
    lines = []
    for name, shown in models.items():
        row = read("lm_reference/compare")["rows"][name]
        bits = row["bits_per_byte"]
        size, updates = f"{row['parameters']:,}", f"{row['updates']:,}"
        lines.append([shown, f"{bits['val']:.3f}", f"{bits['test']:.3f}", size, updates])
    for name, row in read("lm_reference/compress")["rows"].items():
        for how in ("alone", "after the topics", "after the training text"):
            if how not in row:
                continue
            bits = row[how]
            lines.append([f"{name} {how}", f"{bits['val']:.3f}", f"{bits['test']:.3f}", "", ""])
    return markdown(header, lines)
