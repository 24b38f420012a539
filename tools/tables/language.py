"""Tables of the language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.tables.frame import markdown, power, read, table

#: Labels of the models in `lm.json`, where `explicit` is not the network of that name in
#: `lm_designs.json`: see `benchmarks.lm_rivals`.
DESIGNS = {
    "explicit": "Transformer-XL, 3 explicit blocks",
    "original": "original, implicit gradient",
    "original, JR": "original, regularised Jacobian",
    "redesigned": "redesigned",
    "convergent": "convergent",
}
SEEDS = (0, 1)


def residual(value: float, digits: int = 0) -> str:
    """Return a residual, a small one in scientific notation."""
    return f"{value:#.2g}" if value >= 0.01 else power(value, digits)


def _count(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


@table("lm/compare")
def lm_compare() -> str:
    """Return updates, time, memory, perplexity and convergence of every design, for two seeds."""
    header = ["design", "updates", "time per step", "memory", "perplexity", "relative residual",
              "evaluations"]  # fmt: skip
    found = read("lm/compare")["rows"]
    lines = []
    for name, shown in DESIGNS.items():
        runs = [found[f"{name} {seed}"] for seed in SEEDS]

        def pair(show: Callable[[dict[str, Any]], str], runs: list[Any] = runs) -> str:
            return ", ".join(show(run) for run in runs)

        solved = runs[0]["residual"] is not None
        lines.append(
            [
                shown,
                pair(lambda run: f"{run['updates']:,}"),
                pair(lambda run: f"{run['ms_per_step']:.0f}") + " ms",
                pair(lambda run: f"{run['peak_mb']:.0f}") + " MB",
                pair(lambda run: f"{run['perplexity']:.0f}"),
                pair(lambda run: residual(run["residual"], 1)) if solved else "",
                pair(lambda run: _count(run["nfe"])) if solved else "",
            ]
        )
    return markdown(header, lines)


@table("lm/nfe")
def lm_evaluations() -> str:
    """Return the loss by evaluations of f, with the residuals of the first seed."""
    found = read("lm/nfe")["rows"]
    names = {"original": "original", "original, JR": "original, regularised",
             "redesigned": "redesigned", "convergent": "convergent"}  # fmt: skip

    def cell(name: str, count: int) -> str:
        runs = [found[f"{name} {seed}"] for seed in SEEDS]
        at = runs[0]["steps"].index(count)
        losses = ", ".join(f"{run['loss'][at]:.3f}" for run in runs)
        return f"{losses} ({residual(runs[0]['residual'][at], 0)})"

    return markdown(
        ["evaluations", *names.values()],
        [[str(n), *(cell(name, n) for name in names)] for n in (2, 4, 8, 12, 24, 100)],
    )


@table("lm/decode")
def lm_decoding() -> str:
    """Return tokens per second and evaluations per token, by the way of decoding."""
    ways = {"recomputing": "whole text again", "chunked": "current segment again",
            "incremental, cold": "incremental, from zeros",
            "incremental": "incremental, warm"}  # fmt: skip
    found = read("lm/decode")["rows"]

    def cell(row: dict[str, Any], way: str) -> str:
        speed = row.get(f"tokens_per_s {way}")
        if speed is None:
            return ""
        evaluations = row.get(f"evaluations {way}")
        counted = f" ({_count(evaluations)})" if evaluations is not None else ""
        return f"{speed:.{0 if speed >= 100 else 1}f}{counted}"

    return markdown(
        ["design", *ways.values()],
        [
            [name, *(cell(found[name], way) for way in ways)]
            for name in ("original", "redesigned", "convergent")
        ],
    )
