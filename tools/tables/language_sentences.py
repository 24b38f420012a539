"""Numbers in the sentences about language models; see `sentences.py`."""

from __future__ import annotations

from collections.abc import Iterator
from math import acos, degrees

from tools.tables.designs import SIZES, mean_perplexity, runs
from tools.tables.frame import read
from tools.tables.language import SEEDS
from tools.tables.sentences import claim, phrases

PAGE = "deq_zoo/lm/README.md"


@phrases(PAGE)
def _equal_time() -> Iterator[str]:
    small, large = (
        f"{mean_perplexity('attractor', m)} against {mean_perplexity('explicit', m)}" for m in SIZES
    )
    sizes = [f"{runs('attractor', m)[0]['parameters'] / 1e6:.2f} M" for m in SIZES]
    yield f"means of {small} with {sizes[0]} parameters and {large} with {sizes[1]}"
    pairs = [
        (explicit["updates"], attractor["updates"])
        for m in SIZES
        for explicit, attractor in zip(runs("explicit", m), runs("attractor", m), strict=True)
    ]
    fewer = [1 - attractor / explicit for explicit, attractor in pairs]
    yield f"It makes {100 * min(fewer):.0f} to {100 * max(fewer):.0f} % fewer updates"
    spread = max(
        abs(a["perplexity"] - b["perplexity"])
        for m in SIZES
        for name in ("explicit", "attractor")
        for a, b in [runs(name, m)]
    )
    yield claim(2.5 < spread < 3.5, "two seeds of one network differ by up to 3")


@phrases(PAGE)
def _slow_equilibria() -> Iterator[str]:
    slower = [
        explicit["updates"] / run["updates"]
        for m in SIZES
        for name in ("original", "convergent")
        for explicit, run in zip(runs("explicit", m), runs(name, m), strict=True)
    ]
    holds = min(slower) > 3.5 and max(slower) < 9.5
    yield claim(holds, "an update of theirs takes four to nine times as long")
    counts = [run["updates"] for name in ("original", "convergent") for run in runs(name, SIZES[1])]
    yield f"20 minutes are {min(counts) // 100 * 100 + 100:,} to {round(max(counts), -2):,} updates"


@phrases(PAGE)
def _gradients() -> Iterator[str]:
    rows = read("lm_designs/quality")["rows"]
    one, two = (rows[f"{name}, none before"] for name in ("1 step", "2 steps"))
    away = [degrees(acos(row["cosine_of_gated_block"])) for row in (one, two)]
    yield (
        f"the gradient of one step is {away[0]:.0f} degrees away from the exact one, that of two "
        f"steps {away[1]:.0f} degrees"
    )
    yield claim(1.28 < two["ms"] / one["ms"] < 1.38, "for a third more time")


@phrases(PAGE)
def _curve() -> Iterator[str]:
    row = read("lm_designs/curve")["rows"][f"attractor {SIZES[-1]} {SEEDS[-1]}"]
    loss = dict(zip(row["steps"], row["loss"], strict=True))
    last = loss[max(loss)]
    yield f"is {loss[1] - last:.3f} below that after one evaluation"
    yield claim(abs(loss[2] - last) < 0.0025, "two evaluations reach it within 0.002")


@phrases(PAGE)
def _writing() -> Iterator[str]:
    rows = read("lm_designs/decode")["rows"].values()
    share = [row["attractor"]["cached"] / row["explicit"]["cached"] for row in rows]
    holds = all(f"{each:.1f}" == "0.4" for each in share)
    yield claim(holds, "An attractor writes at 0.4 times the speed of the explicit transformer")
    counts = [row["attractor"]["evaluations"] for row in rows]
    yield f"it needs {min(counts):.1f} to {max(counts):.1f} evaluations of its one gated block"
    gains = [row["attractor"]["cached"] / row["attractor"]["recomputed"] for row in rows]
    yield f"The cache makes it {min(gains):.0f} to {max(gains):.0f} times as fast"
