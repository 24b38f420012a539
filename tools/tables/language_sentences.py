"""Numbers in the sentences about language models; see `sentences.py`."""

from __future__ import annotations

from collections.abc import Iterator
from math import acos, degrees

from tools.tables.designs import SIZES, mean_perplexity, rates_of, runs
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
    yield claim(
        2.5 < _between_seeds("perplexity") < 3.5, "two seeds of one network differ by up to 3"
    )


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


@phrases(PAGE)
def _ablation() -> Iterator[str]:
    rows = read("lm_designs/ablate")["rows"]
    loss = {name: row["held_out_loss"] for name, row in rows.items()}
    adamw = [v for name, v in loss.items() if "Muon" not in name and name != "mixed precision"]
    yield f"all rows lie between {min(adamw):.3f} and {max(adamw):.3f}"
    yield f"two seeds of one network differ by up to {_between_seeds('held_out_loss'):.2f}"
    cost = _fewer("never explicit", "whole")
    yield f"two steps from the first update on cost {cost} of the updates"
    yield f"an implicit gradient {_fewer('implicit gradient', 'no residual loss')}"
    never = rows["explicit to the end"]
    worse = never["held_out_loss"] - never["loss after one evaluation"]
    better = loss["whole"] - rows["whole"]["loss after one evaluation"]
    yield f"after {never['evaluations']:.1f} evaluations, but its loss is then {worse:.3f} higher"
    yield f"of the whole training it is {-better:.3f} lower"


@phrases(PAGE)
def _muon() -> Iterator[str]:
    rows = read("lm_designs/ablate")["rows"]

    def gain(name: str, beside: str) -> float:
        best = min(float(rows[key]["held_out_loss"]) for key in rates_of(rows, name))
        return float(rows[beside]["held_out_loss"]) - best

    alone, everywhere = gain("Muon", "whole"), gain("Muon everywhere", "whole")
    explicit = gain("explicit, Muon", "explicit")
    yield f"{alone:.2f} where it changes the backbone alone, as published, and {everywhere:.2f}"
    yield f"the explicit transformer gains {explicit:.2f}"
    ahead = (
        explicit - everywhere + rows["whole"]["held_out_loss"] - rows["explicit"]["held_out_loss"]
    )
    yield claim(ahead > 0, f"which is then {ahead:.3f} ahead")


def _between_seeds(score: str) -> float:
    """Return by how much a score of the two level networks differs between seeds, at most."""
    pairs = [runs(name, m) for m in SIZES for name in ("explicit", "attractor")]
    return max(float(abs(a[score] - b[score])) for a, b in pairs)


def _fewer(name: str, beside: str) -> str:
    """Return how many updates a part of the training costs, in percent."""
    rows = read("lm_designs/ablate")["rows"]
    return f"{100 - 100 * rows[name]['updates'] / rows[beside]['updates']:.0f} %"
